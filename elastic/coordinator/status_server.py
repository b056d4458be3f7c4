"""The coordinator's HTTP listener: a page for browsers and ``/status`` as JSON.

It has a thread of its own, and reads only what the coordinator's loop has published.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from http import HTTPStatus
from pathlib import Path

import msgspec

from elastic.control.control_messages import ElasticJobStatus
from elastic.coordinator.job_status import EVENT_LOG_NAME
from elastic.coordinator.world_changes import WorldChange, WorldHistory
from tieredckpt.event_log.log_follower import EventLogFollower
from tieredckpt.http_server import HttpReply, resource_server

log = logging.getLogger(__name__)

_RETRY_S = 10.0
_READ_EVERY_S = 2.0
_END_S = 10.0
_HTML = "text/html; charset=utf-8"
_NOT_LEADING = HttpReply(b"this coordinator does not lead the job now\n", status=HTTPStatus.SERVICE_UNAVAILABLE)


class RecordedChanges:
    """The changes of world in an event log. It reads new lines only, and at most every two seconds."""

    def __init__(self, event_log: Path) -> None:
        self._follower, self._history = EventLogFollower(event_log, first=EVENT_LOG_NAME), WorldHistory()
        self._lock = threading.Lock()
        self._changes: list[WorldChange] = []
        self._read_at = -math.inf

    def read(self) -> list[WorldChange]:
        with self._lock:
            if time.monotonic() >= self._read_at + _READ_EVERY_S:
                try:
                    for event in self._follower.read_new():
                        self._history.add(event)
                except OSError as error:
                    log.info("the event log cannot be read: %s", error)
                self._changes = self._history.changes()
                self._read_at = time.monotonic()
            return self._changes


class StatusServer:
    """Server of one coordinator's page. It starts to listen at the first :meth:`publish`.

    ``event_log`` is the directory of the event log, or "".
    """

    def __init__(self, job: str, address: tuple[str, int], event_log: str) -> None:
        self._job, self._address = job, address
        self._status: ElasticJobStatus | None = None
        self._changes = RecordedChanges(Path(event_log)) if event_log else None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def publish(self, status: ElasticJobStatus | None) -> None:
        """Set the status to show. ``None`` while another coordinator may lead. Returns at once."""
        self._status = status
        if self._thread is None and status is not None and not self._ending.is_set():
            self._thread = threading.Thread(target=self._run, name="elastic-http", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        resources = {"/": self._page, "/status": self._json}
        while not self._ending.is_set():
            try:
                server = resource_server("the coordinator's page", self._address, resources)
            except (OSError, OverflowError, UnicodeError) as error:
                host, port = self._address
                log.warning("the page of job %s cannot be served on %s port %d: %s", self._job, host, port, error)
                self._ending.wait(_RETRY_S)
                continue
            with server.running() as bound:
                log.warning("the page of job %s is at http://%s", self._job, bound)
                self._ending.wait()

    def _page(self) -> HttpReply:
        from elastic.coordinator.coordinator_page import coordinator_page

        status = self._status
        if status is None:
            return _NOT_LEADING
        changes = None if self._changes is None else self._changes.read()
        return HttpReply(coordinator_page(status, changes, time.time_ns() // 1000).encode(), _HTML)

    def _json(self) -> HttpReply:
        status = self._status
        return _NOT_LEADING if status is None else HttpReply(msgspec.json.encode(status), "application/json")
