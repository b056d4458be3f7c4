"""What can go wrong with samples, sorted by what the caller can do about it.

::

    ElasticError
    ├── PolicyError                 (elastic.errors) no such order, plan or dataset: the message says what to change
    ├── CursorError                 a saved cursor belongs to other data or another order: use those, or allow it
    ├── StepError                   the loop takes steps out of turn (a step that was not committed): fix the loop
    └── WorkersLostError            processes that read samples died; iterating again starts new ones

What a dataset raises reaches the caller as it is, with the worker's traceback in its message.
"""

from __future__ import annotations

from elastic.errors import ElasticError


class CursorError(ElasticError, ValueError):
    """Going on at this cursor would repeat or leave out samples."""


class StepError(ElasticError):
    """Steps are taken in an order in which samples could get lost unnoticed."""


class WorkersLostError(ElasticError):
    """Processes that read samples died; nothing that was committed is affected."""
