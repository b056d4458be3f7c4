"""Try again what another try may change, for as long as the settings say, and raise the rest by its meaning."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from peerstore.units import show_seconds
from tieredckpt.durable.failures import Failure, Meaning, classify
from tieredckpt.durable.store import ObjectExistsError
from tieredckpt.errors import (
    CheckpointDamagedError,
    DurableRefusedError,
    StoreBusyError,
    TieredCheckpointError,
    TierUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BASE_S = 0.2
CAP_S = 20.0
T = TypeVar("T")

_log = logging.getLogger(__name__)


class UploadGoneError(TierUnavailableError):
    """The store no longer knows the multipart upload, or not all of its parts."""


def pause_s(attempt: int, uniform: Callable[[float, float], float], retry_after_s: float = 0.0) -> float:
    """How long to wait after try number ``attempt`` (from 0): full jitter, on top of what the store asked for."""
    return retry_after_s + uniform(0.0, min(CAP_S, BASE_S * 2.0 ** min(attempt, 30)))


@dataclass(frozen=True)
class Retry:
    """The rule of one store. ``retry_s`` counts from an operation's first failure, however long a try takes."""

    retry_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform
    renew: Callable[[], bool] = lambda: False
    """Looks for other credentials when these are refused; whether there are any."""

    def run(
        self,
        what: str,
        operation: Callable[[], T],
        *,
        absent: type[TieredCheckpointError] = DurableRefusedError,
    ) -> T:
        """The result of ``operation``, tried as often as it takes.

        ``what`` begins the message of the error ("reading s3://b/x"), ``absent`` is raised when the store knows no
        such object.
        """
        deadline = 0.0
        attempt = 0
        renewed = False
        while True:
            try:
                return operation()
            except TieredCheckpointError:
                raise
            except Exception as error:  # noqa: BLE001 - every library has a tree of its own; classify() knows them
                failure = classify(error)
                if failure.credentials and not renewed and self.renew():
                    renewed = True
                    continue
                now = self.clock()
                deadline = deadline or now + self.retry_s
                wait_s = pause_s(attempt, self.uniform, failure.retry_after_s)
                if failure.meaning not in (Meaning.AWAY, Meaning.BUSY) or now + wait_s > deadline:
                    _raise(what, failure, error, absent, tries=attempt + 1)
                attempt += 1
                _log.info("%s: %s; try %d in %s", what, failure.detail, attempt + 1, show_seconds(wait_s))
                self.sleep(wait_s)


def _raise(what: str, failure: Failure, error: Exception, absent: type[TieredCheckpointError], *, tries: int) -> None:
    if failure.meaning is Meaning.FOREIGN:
        raise error
    kind = _KINDS.get(failure.meaning, absent)
    again = f" (tried {tries} times; raise durable.retry_s to try longer)" if tries > 1 else ""
    raise kind(f"{what}: {failure.detail}{again}") from error


_KINDS: dict[Meaning, type[TieredCheckpointError]] = {
    Meaning.AWAY: TierUnavailableError,
    Meaning.BUSY: StoreBusyError,
    Meaning.REFUSED: DurableRefusedError,
    Meaning.EXISTS: ObjectExistsError,
    Meaning.SHORT: CheckpointDamagedError,
    Meaning.GONE: UploadGoneError,
}
