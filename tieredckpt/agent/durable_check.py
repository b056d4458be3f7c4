"""Check of a durable tier before the first save."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable

from tieredckpt.durable.object_store import ObjectStore
from tieredckpt.errors import DurableRefusedError, StoreBusyError, TierUnavailableError
from tieredckpt.settings import DurableSettings

_TIMEOUT_S = 5.0
_RETRY_S = 3.0
_PAUSE_S = 0.5

StoreOpener = Callable[[str, DurableSettings], ObjectStore]


def check_durable(open_durable: StoreOpener, job: str, durable: DurableSettings, *, writes: bool) -> None:
    """Raise :class:`DurableRefusedError` if no step of ``job`` can become durable.

    With ``writes``, write, read and delete one small object, and raise :class:`TierUnavailableError` if the store does
    not answer. Without, check only a directory.
    """
    brief = dataclasses.replace(durable, retry_s=0.0, timeout_s=min(durable.timeout_s, _TIMEOUT_S))
    with contextlib.closing(open_durable(durable.url, brief)) as store:
        try:
            if writes:
                _check_writes(store)
            else:
                store.check_root()
        except DurableRefusedError as error:
            raise DurableRefusedError(
                f"No step of job {job!r} can become durable in durable.url {durable.url}: {error}{_advice(durable.url)}"
            ) from error
        except TierUnavailableError as error:
            if not writes:
                return
            where = " at ".join(filter(None, (durable.url, durable.options.get("endpoint", ""))))
            raise TierUnavailableError(
                f"The durable tier of job {job!r} does not answer ({where}): {error}. Check the endpoint and network. "
                "To start in memory and upload when the store answers, set durable.on_unreachable=continue "
                "($TIEREDCKPT_DURABLE_ON_UNREACHABLE)"
            ) from error


def _check_writes(store: ObjectStore) -> None:
    """Check that ``store`` accepts objects; retry for ``_RETRY_S`` seconds if it does not answer."""
    deadline = time.monotonic() + _RETRY_S
    while True:
        try:
            store.check_writes()
        except StoreBusyError:  # the store answers, but limits the request rate
            return
        except TierUnavailableError:
            if time.monotonic() + _PAUSE_S > deadline:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def _advice(url: str) -> str:
    if url.startswith(("/", "file:")):
        return ". Name a directory that this node's agent can write, or s3://bucket/prefix"
    return ""
