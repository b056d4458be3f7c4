"""Slots ready before they are needed: made ahead, with pages behind them."""

from __future__ import annotations

import logging
from collections import deque

from peerstore.errors import ArenaFullError, RequestError
from peerstore.leasing import MAX_PARTS
from peerstore.ledger import size_class, suits
from peerstore.names import job_name
from peerstore.pages import closing, populate_file
from peerstore.records import SlotInfo, SlotState
from peerstore.shelf import Shelf

log = logging.getLogger(__name__)


class Warming:
    """``reserve`` of the store, and the work of the thread behind it."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._waiting: deque[str] = deque()

    def reserve(self, job: str, part: int, size_bytes: int, slots: int) -> list[SlotInfo]:
        job = job_name(job)
        if not 0 <= part < MAX_PARTS or size_bytes < 0:
            raise RequestError(f"part {part} of job {job}: {size_bytes} bytes cannot be reserved")
        shelf = self._shelf
        with shelf.lock:
            shelf.check_open()
            size_bytes = size_class(size_bytes)
            mine = [slot for slot in shelf.slots.values() if (slot.job, slot.part) == (job, part)]
            for slot in mine:
                if slot.state is SlotState.FREE and not (suits(slot.view, size_bytes) and shelf.intact(slot)):
                    shelf.drop(slot)
            mine = [slot for slot in mine if slot.name in shelf.slots]
            allocated = sum(view.size_bytes for view in shelf.views())
            want = min(slots or shelf.limits.slots, shelf.limits.slots)
            while len(mine) < want and allocated + size_bytes <= shelf.limits.budget_bytes:
                try:
                    mine.append(shelf.create(job, part, size_bytes))
                except ArenaFullError as error:
                    log.warning("reserve for part %d of job %s: %s", part, job, error)
                    break
                allocated += size_bytes
            free = [slot for slot in mine if slot.state is SlotState.FREE]
            self._waiting.extend(slot.name for slot in free if slot.warm_bytes < slot.size_bytes)
            shelf.changed.notify_all()
            return [SlotInfo(s.name, s.size_bytes, s.generation) for s in free]

    def work(self) -> None:
        """Put pages behind one reserved slot after the other, until the store closes."""
        shelf = self._shelf
        while True:
            with shelf.lock:
                while not self._waiting and not shelf.closed:
                    shelf.changed.wait()
                if shelf.closed:
                    return
                slot = shelf.slots.get(self._waiting.popleft())
                if slot is None or slot.state is not SlotState.FREE:
                    continue
                size, warm = slot.size_bytes, slot.warm_bytes
            try:
                with closing(shelf.arena.open(slot.name, writable=True)) as fd:
                    reached = populate_file(fd, size, lambda: shelf.closed, start=warm)
            except (ArenaFullError, OSError, ValueError) as error:
                log.warning("populating %s stopped: %s", slot.name, error)
                continue
            with shelf.lock:
                slot.warm_bytes = max(slot.warm_bytes, min(reached, slot.size_bytes))
