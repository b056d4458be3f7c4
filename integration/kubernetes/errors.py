"""Errors of the API server, grouped by what the caller can do about each.

::

    ApiServerError
    ├── ApiServerUnreachableError   unknown: retry later
    ├── ResourceConflictError       another client wrote after the read: read again, decide again
    ├── ResourceNotFoundError       the resource does not exist, or no longer
    ├── ExpiredError                the server has forgotten the changes since then: list again
    └── ApiServerRefusedError       the server refuses: do not retry
"""

from __future__ import annotations


class ApiServerError(Exception):
    """The root of what can go wrong between the controller and the API server."""


class ApiServerUnreachableError(ApiServerError):
    """No answer, or one that says nothing about what was asked."""


class ResourceConflictError(ApiServerError):
    """The object has changed since it was read, or one of that name is there already."""


class ResourceNotFoundError(ApiServerError):
    """There is no such object."""


class ExpiredError(ApiServerError):
    """A watch, or the next page of a list, of a revision that the server has forgotten."""


class ApiServerRefusedError(ApiServerError):
    """The server's words say what is wrong with it."""
