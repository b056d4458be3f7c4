"""What the API server can answer, by what follows from it.

::

    ClusterError
    ├── UnreachableError   nothing is known: the same again later
    ├── ConflictError      somebody else has written since it was read: read again, decide again
    ├── AbsentError        it is not there (any more)
    ├── ExpiredError       what changed since then is not known any more: list again
    └── RefusedError       it will not be done, however often it is asked for
"""

from __future__ import annotations


class ClusterError(Exception):
    """The root of what can go wrong between the controller and the API server."""


class UnreachableError(ClusterError):
    """No answer, or one that says nothing about what was asked."""


class ConflictError(ClusterError):
    """The object has changed since it was read, or one of that name is there already."""


class AbsentError(ClusterError):
    """There is no such object."""


class ExpiredError(ClusterError):
    """A watch, or the next page of a list, of a revision that the server has forgotten."""


class RefusedError(ClusterError):
    """The server's words say what is wrong with it."""
