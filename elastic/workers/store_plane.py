"""A control plane that is nothing but a store that all ranks reach: for launchers that start whole worlds at a time.

``torchrun`` cannot give a living process another place. So a world that is to change ends: all ranks stop at a common
step, seal, and end with status 0; one that is broken ends with an error, and the launcher starts everybody again. What
was sealed is in the nodes' memory, and the next start goes on from it.

Keys, below ``elastic/plane``::

    epochs              how often a first rank has asked who is there
    asked               what it asked last, as a number; answered by every rank with a word of its own
    N/here/R            that word, and the least epoch that this rank can be in; when the first rank has all of them
    N/all               it says them back: so a rank knows that it is meant, and that this is not left over from an
                        earlier start. With them the epoch, which is N where no rank has been in a later one
    E/events  E/event/N what happened in epoch E, in order: a Notice, or the common target
    E/paused  E/pause/R who has said where it stands, and where

Nobody asks anything once per step: a thread waits for the next event, and what it hears is read from memory.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import torch
import torch.distributed as dist

from elastic.control.plane import Assignment, Dismissed, Notice, Progress, Want
from elastic.errors import ControlLostError, DeadlineError, GaveUpError, StaleEpochError
from peerstore.decode import from_json

log = logging.getLogger(__name__)

_PREFIX = "elastic/plane"
_LOOK_S = 0.1
_POLL_S = 0.02


class _Event(msgspec.Struct, frozen=True):
    """Something that all ranks of an epoch are to know. Either a wish, or the target."""

    want: Want | None = None
    reason: str = ""
    until: float | None = None
    """When who has not stopped is stopped, by everybody's clock."""
    target: int | None = None


class StorePlane:
    """One rank's control plane, over a store. ``connect`` gives a client of its own every time: one may be waiting."""

    def __init__(self, connect: Callable[[], torch.distributed.Store], place: Assignment, *, last: bool = True) -> None:
        """``place``: with the least epoch this can be. ``last``: no process here has a place in another world."""
        self._connect = connect
        self._place = place
        self._last = last
        self._clients: list[torch.distributed.Store] = []
        self._store = self._opened(_PREFIX)
        self._changed = threading.Condition()
        self._epoch = -1
        self._event: _Event | None = None
        """The wish that counts."""
        self._target: int | None = None
        self._paused = self._sealed = self._finished = self._closed = False
        self._broken_calls: list[Callable[[Notice], None]] = []
        self._threads: list[threading.Thread] = []

    # -- ControlPlane -------------------------------------------------------------------------------------------------

    def ready(self, *, timeout_s: float | None = None) -> Assignment:
        """The first time: a place among those that were started together. Later: why there is no second one."""
        if self._epoch >= 0:
            self._no_further()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with _lost():
            self._epoch = self._first(until) if self._place.rank == 0 else self._other(until)
            watching = self._opened(f"{_PREFIX}/{self._epoch}")
        self._start(self._watch, watching)
        return msgspec.structs.replace(self._place, epoch=self._epoch)

    def notice(self) -> Notice | None:
        event = self._event
        if event is None or event.want is None:
            return None
        left = None if event.until is None else max(0.0, event.until - time.time())
        return Notice(self._epoch, event.want, event.reason, left)

    def pause(self, step: int, *, timeout_s: float | None = None) -> int:
        self._check()
        with _lost():
            self._say_pause(step)
        with self._changed:
            found = self._changed.wait_for(lambda: self._target is not None or self._is_stale, timeout_s)
        self._check()
        if not found or self._target is None:
            raise DeadlineError(f"not all others paused within {timeout_s:g} s")
        return self._target

    def sealed(self, step: int, *, timeout_s: float | None = None) -> None:
        self._check()
        self._sealed = True

    def progress(self, progress: Progress) -> None:
        pass  # nobody to tell: whoever runs the job looks at the processes

    def fault(self, reason: str, *, final: bool = False) -> None:
        """Whoever started these processes counts how often it does, and knows no fault that is final."""
        self._check()
        self._tell(_Event(Want.RESTART, f"rank {self._place.rank}: {reason}"))

    def request(self, want: Want, reason: str, *, deadline_s: float | None = None, nodes: int | None = None) -> None:
        """Where another size is another start of all processes it is a stop for these ranks."""
        if self._epoch < 0:
            raise ControlLostError(f"{reason}: not known yet who else is there")
        until = None if deadline_s is None else time.time() + deadline_s
        self._tell(_Event(Want.STOP if self._last and want is Want.RESIZE else want, reason, until))

    def on_broken(self, call: Callable[[Notice], None]) -> None:
        with self._changed:
            self._broken_calls.append(call)
            notice = self.notice()
        if notice is not None and notice.want is Want.RESTART:
            self._start(call, notice)

    def finished(self) -> None:
        self._check()
        self._finished = True

    def end(self, reason: str) -> None:
        """This rank knows from elsewhere that the world is broken. Who waits here to be in it waits no longer."""
        self._heard(_Event(Want.RESTART, reason))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for client in self._clients:
            let_go(client)

    def _opened(self, prefix: str) -> torch.distributed.Store:
        self._clients.append(self._connect())
        return dist.PrefixStore(prefix, self._clients[-1])

    # -- meeting ------------------------------------------------------------------------------------------------------

    def _first(self, until: float | None) -> int:
        number = int(self._store.add("epochs", 1)) - 1
        word = self._say_here(number)
        self._store.set("asked", str(number))
        names = [f"{number}/here/{rank}" for rank in range(self._place.world_size)]
        while not self._store.check(names):
            self._pause(until)
        words = [self._store.get(name).decode() for name in names]
        assert words[0] == word  # noqa: S101 - nobody else is rank 0
        epoch = max(number, *(int(word.partition(":")[2]) for word in words))
        if epoch > number:
            self._store.add("epochs", epoch - number)
        self._store.set(f"{number}/all", " ".join([*words, str(epoch)]))
        return epoch

    def _other(self, until: float | None) -> int:
        """An answer to an earlier start's question does no harm: the words that come back are not this rank's."""
        said: dict[int, str] = {}
        while True:
            if self._store.check(["asked"]):
                number = int(self._store.get("asked"))
                if number not in said:
                    said[number] = self._say_here(number)
                if self._store.check([f"{number}/all"]):
                    *words, epoch = self._store.get(f"{number}/all").decode().split()
                    if words[self._place.rank : self._place.rank + 1] == [said[number]]:
                        return int(epoch)
            self._pause(until)

    def _say_here(self, number: int) -> str:
        word = f"{secrets.token_hex(8)}:{self._place.epoch}"
        self._store.set(f"{number}/here/{self._place.rank}", word)
        return word

    def _pause(self, until: float | None) -> None:
        if self._closed or self._event is not None:
            reason = "closed" if self._event is None else self._event.reason
            raise StaleEpochError(f"the world ended before all its ranks were there: {reason}")
        if until is not None and time.monotonic() > until:
            raise DeadlineError("not all ranks came in time")
        time.sleep(_POLL_S)

    # -- what happens -------------------------------------------------------------------------------------------------

    def _tell(self, event: _Event) -> None:
        with _lost():
            number = int(self._store.add(f"{self._epoch}/events", 1)) - 1
            self._store.set(f"{self._epoch}/event/{number}", msgspec.json.encode(event).decode())

    def _say_pause(self, step: int) -> None:
        """The last one to say where it stands says the target to all."""
        if self._paused:
            return
        place = self._place
        self._store.set(f"{self._epoch}/pause/{place.rank}", str(step))
        self._paused = True
        if int(self._store.add(f"{self._epoch}/paused", 1)) == place.world_size:
            said = [int(self._store.get(f"{self._epoch}/pause/{rank}")) for rank in range(place.world_size)]
            self._tell(_Event(target=max(said)))

    def _watch(self, store: torch.distributed.Store) -> None:
        number = 0
        while not self._closed:
            name = f"event/{number}"
            try:
                if not store.check([name]):  # waiting for it would have torch warn of every wait that ends
                    with self._changed:
                        self._changed.wait_for(lambda: self._closed, _LOOK_S)
                    continue
                event = from_json(store.get(name), _Event)
            except RuntimeError as error:
                if not self._closed:
                    self._heard(_Event(Want.RESTART, f"the store that the ranks met at is gone: {error}"))
                return
            self._heard(event)
            number += 1

    def _heard(self, event: _Event) -> None:
        with self._changed:
            if event.target is not None:
                self._target = event.target
            elif self._event is None or self._event.want is not Want.RESTART:
                earlier = None if self._event is None else self._event.until
                untils = [until for until in (earlier, event.until) if until is not None]
                self._event = msgspec.structs.replace(event, until=min(untils, default=None))
            self._changed.notify_all()
            notice = self.notice()
            calls = tuple(self._broken_calls)
        if event.want is Want.RESTART and notice is not None and notice.reason == event.reason:
            for call in calls:
                call(notice)

    @property
    def _is_stale(self) -> bool:
        event = self._event
        return self._epoch < 0 or self._closed or (event is not None and event.want is Want.RESTART)

    def _check(self) -> None:
        if self._is_stale:
            reason = self._event.reason if self._event is not None else "it has not begun, or was left"
            raise StaleEpochError(f"epoch {self._epoch} is over: {reason}")

    def _no_further(self) -> None:
        if self._finished or self._sealed:
            raise Dismissed("whoever started this process starts the next ones")
        reason = self._event.reason if self._event is not None else "left without being asked"
        raise GaveUpError(f"this world has ended ({reason}), and whoever started it has to start the next one")

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="elastic-store", daemon=True)
        self._threads.append(thread)
        thread.start()


def let_go(store: torch.distributed.Store) -> None:
    """Close a client that is to be closed, below whatever prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    close = getattr(store, "close", None)
    if close is not None:
        close()


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """A store that does not answer leaves open what is wanted."""
    try:
        yield
    except RuntimeError as error:
        raise ControlLostError(f"the store that the ranks met at does not answer: {error}") from error
