"""What is said to a request that is not done, in the words its client knows."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any


class RefusedError(Exception):
    """The request is not done: a status, and why."""

    def __init__(self, status: HTTPStatus, detail: Any, *, retry_after_s: int = 0) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a request's values."""

    kind: str
    where: tuple[str, str]
    message: str
    found: str | None

    @property
    def told(self) -> dict[str, Any]:
        return {"type": self.kind, "loc": list(self.where), "msg": self.message, "input": self.found}


class Invalid(RefusedError):  # noqa: N818 - what it is, as its status is called
    """The request's values are not what they should be."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(HTTPStatus.UNPROCESSABLE_ENTITY, [problem.told for problem in problems])


def not_found(detail: str = "Not found") -> RefusedError:
    return RefusedError(HTTPStatus.NOT_FOUND, detail)


def no_namespace(namespace: str) -> RefusedError:
    return not_found(f"Namespace '{namespace}' not found")
