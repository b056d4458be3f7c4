"""Errors of the API server, grouped by the caller's possible reaction.

::

    ApiServerError
    ├── ApiServerUnreachableError   outcome unknown: retry later
    ├── ResourceConflictError       another client wrote after the read: read again, decide again
    ├── ResourceNotFoundError       the resource does not exist, or no longer
    ├── ExpiredError                the server has forgotten the changes since then: list again
    └── ApiServerRefusedError       the server refused: do not retry
"""

from __future__ import annotations


class ApiServerError(Exception):
    """Root of all errors of requests to the API server."""


class ApiServerUnreachableError(ApiServerError):
    """No response, or an invalid one."""


class ResourceConflictError(ApiServerError):
    """The object has changed since it was read, or an object of that name exists."""


class ResourceNotFoundError(ApiServerError):
    """The object does not exist."""


class ExpiredError(ApiServerError):
    """The server no longer has the revision of a watch or of a list's next page."""


class ApiServerRefusedError(ApiServerError):
    """The server refused the request; its message states the reason."""
