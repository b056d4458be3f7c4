"""A user's callback for each step that has become durable, on the first rank, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from peerstore.errors import PeerStoreError
from peerstore.shard_records import VersionId
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.format.object_keys import plain_prefix, shards_prefix
from tieredckpt.session.session import Session

log = logging.getLogger(__name__)

_WAIT_S = 0.2
"""Seconds of one wait for an upload, after which the thread notices that the Checkpointer was closed."""
_CLOSE_S = 10.0
"""Seconds for the user's code to return when the Checkpointer is closed. A recovery waits for it."""


class DurableStep(NamedTuple):
    """A step in the durable tier, for references in an experiment tracker or a model registry."""

    job: str
    step: int
    url: str
    """The folder of the step's files in the durable tier."""


class DurableCallback:
    """Calls ``on_durable`` in the order of the saves. Its errors are logged and stop nothing."""

    def __init__(self, job: str, durable_url: str, on_durable: Callable[[DurableStep], object]) -> None:
        self._job, self._url, self._on_durable = job, durable_url.rstrip("/"), on_durable
        self._pending: queue.SimpleQueue[tuple[Session, VersionId] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, session: Session, version_id: VersionId) -> None:
        """Wait in the background for the upload of a sealed step."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tieredckpt-durable", daemon=True)
            self._thread.start()
        self._pending.put((session, version_id))

    def call_plain(self, step: int) -> None:
        """Report a plain DCP checkpoint, which was written while this package is disabled."""
        self._call(step, plain_prefix(self._job, step))

    def close(self) -> None:
        """Call for the steps whose uploads have ended, and warn of the others."""
        self._closing.set()
        if self._thread is not None:
            self._pending.put(None)
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                log.error("%s: on_durable has not returned within %.0f s and is left behind", self._job, _CLOSE_S)

    def _run(self) -> None:
        missed = []
        while (item := self._pending.get()) is not None:
            session, version_id = item
            state = self._wait(session, version_id)
            if state == "done":
                self._call(version_id.version, shards_prefix(self._job, version_id))
            elif state in ("waiting", "running", ""):
                missed.append(str(version_id.version))
        if missed:
            log.warning(
                "%s: on_durable was not called for step %s, because the Checkpointer was closed before the upload "
                "ended. Call wait('durable') before",
                *(self._job, ", ".join(missed)),
            )

    def _wait(self, session: Session, version_id: VersionId) -> str:
        """Return the state of the upload once it has ended or the Checkpointer is closed; "" if it is unknown."""
        state: str
        while True:
            closing = self._closing.is_set()
            try:
                upload = session.agent.wait_durable(self._job, version_id, 0.0 if closing else _WAIT_S)
                state = upload.state if upload is not None else "skipped"
            except (PeerStoreError, TieredCheckpointError) as error:
                log.debug("whether step %d is durable is unknown: %s", version_id.version, error)
                state = ""
                self._closing.wait(_WAIT_S)
            if closing or state not in ("waiting", "running", ""):
                return state

    def _call(self, step: int, folder: str) -> None:
        try:
            self._on_durable(DurableStep(self._job, step, f"{self._url}/{folder}"))
        except Exception:
            log.exception("%s: on_durable raised an error for step %d", self._job, step)
