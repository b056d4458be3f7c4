"""Deletion of the keys that earlier worlds left on the store servers."""

from __future__ import annotations

import atexit
import logging
import re
import threading
import time

import torch.distributed as dist

from elastic.rendezvous.call_watchdog import CallWatchdog
from elastic.rendezvous.store_server_client import (
    CloseConnections,
    StoreServerClient,
    StoreTimeouts,
    StoreUnreachableError,
)

log = logging.getLogger(__name__)

_EPOCH_KEY = re.compile(r"elastic/(\d+)/")
_STOP_S, _EXIT_S, _EXIT_POLL_S = 1.0, 15.0, 0.2


def epoch_prefix(epoch: int) -> str:
    """Return the prefix of all keys of an epoch."""
    return f"elastic/{epoch}"


def is_old_key(key: str, epoch: int) -> bool:
    """Return whether the key belongs to a world before ``epoch``."""
    found = _EPOCH_KEY.match(key)
    return found is not None and int(found[1]) < epoch


class OldKeyCleanup:
    """Background deletion of the keys of worlds before ``epoch`` on one server.

    Start it when all ranks of ``epoch`` have met: ranks still in an earlier world already count as lost.
    """

    def __init__(
        self, address: str, epoch: int, *, close_connections: CloseConnections, timeouts: StoreTimeouts | None = None
    ) -> None:
        self.deleted = 0
        self._watchdog = CallWatchdog()
        self._holder = StoreServerClient(
            address, close_connections=close_connections, guard=self._watchdog, timeouts=timeouts or StoreTimeouts()
        )
        self._epoch = epoch
        # A thread in torch's C++ code at the interpreter's exit aborts the process.
        atexit.register(self._end_at_exit)
        self._thread = threading.Thread(target=self._run, name="elastic-sweep", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; ``None`` means no limit. Return whether the deletion has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stop the deletion; the cleanup of the next world deletes the remaining keys.

        A thread blocked by a stopped server continues to wait. Its connection cannot be closed without the next
        world's connections to the same server.
        """
        if not self.join(0):
            self._holder.abort()
            self._watchdog.expire_all()
            self.join(_STOP_S)
        self._watchdog.forget()
        self._watchdog.close()

    def _end_at_exit(self) -> None:
        """Close the connections repeatedly until the thread ends: no other world needs them at exit."""
        until = time.monotonic() + _EXIT_S
        while not self.join(0) and time.monotonic() < until:
            self._holder.abort()
            self.join(_EXIT_POLL_S)

    def _run(self) -> None:
        try:
            keys = self._holder.call(_all_keys)
            for key in [key for key in keys if is_old_key(key, self._epoch)]:
                self.deleted += self._holder.call(lambda client, key=key: client.delete_key(key))  # type: ignore[misc]
        except (StoreUnreachableError, dist.DistError) as error:
            log.info("old keys are still on %s: %s", self._holder.address, error)
        finally:
            self._holder.close()
            atexit.unregister(self._end_at_exit)


def _all_keys(client: dist.TCPStore) -> list[str]:
    if not hasattr(client, "list_keys"):  # older versions of torch cannot list keys, so the keys remain
        return []
    return client.list_keys()
