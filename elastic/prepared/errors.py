"""What can go wrong with prepared batches, sorted by what the caller can do about it.

::

    ElasticError
    ├── PolicyError
    │   ├── BatchKindError          a batch has something in it that cannot be kept: convert it in ``prepare``
    │   └── CachePlaceError         the directory is not this user's own: name another one
    ├── CacheFullError              the cache was required, and the batch does not fit: enlarge it
    └── PrepareError                the user's ``prepare`` raised; its error is the cause, the batch is named

A batch that is absent or damaged is neither: it is prepared (again), and counted.
"""

from __future__ import annotations

from elastic.errors import ElasticError, PolicyError


class BatchKindError(PolicyError):
    """A batch that is not made of tensors, numbers, text, bytes, lists, tuples and dicts."""


class CachePlaceError(PolicyError):
    """A directory that somebody else owns, or can enter."""


class CacheFullError(ElasticError):
    """No room for a batch: of the budget, or of the file system."""


class PrepareError(ElasticError):
    """``prepare`` raised for this batch; -1 where it was not known which one is next."""

    def __init__(self, index: int, text: str) -> None:
        super().__init__(index, text)
        self.index = index
        self.text = text

    def __str__(self) -> str:
        return f"{f'batch {self.index}' if self.index >= 0 else 'a batch'} could not be prepared: {self.text}"


class BatchDamagedError(Exception):
    """What lies there is not what was put; never leaves this package, since any batch can be prepared again."""
