"""What is wrong with what somebody brought.

::

    elastic.PolicyError
    ├── DataError       lines that cannot be learned from: the message names the file and the line
    └── ModelError      a model, a tokenizer or a length that does not fit
"""

from __future__ import annotations

from elastic.errors import PolicyError


class DataError(PolicyError):
    """Lines that cannot be learned from."""


class ModelError(PolicyError):
    """A model, a tokenizer or a length that does not fit."""
