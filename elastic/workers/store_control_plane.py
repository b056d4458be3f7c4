"""A ControlPlane over a torch.distributed store, for launchers that restart whole worlds.

``torchrun`` cannot give a living process another place. So a world that is to change ends: all ranks stop at a common
step, seal, and end with status 0; one that is broken ends with an error, and the launcher starts everybody again. What
was sealed is in the nodes' memory, and the next start goes on from it.

Keys, below ``elastic/plane``::

    epochs              how often a first rank has asked who is there
    asked               what it asked last, as a number; answered by every rank with a word of its own
    N/here/R            that word, and the least epoch that this rank can be in; N/come counts them. When the first rank
                        has all of them
    N/all               it says them back: so a rank knows that it is meant, and that this is not left over from an
                        earlier start. With them the epoch, which is N where no rank has been in a later one
    N/beat/R            how far a rank is (:mod:`elastic.workers.peer_hang_detector`)
    E/event/K           what happened in epoch E, in order: a Notice, the target, or that all have come to something
    E/wake/K/R          rank R waits for this, and reads event K then
    E/paused, E/pause/R who has said where it stands, and where
    E/came/WHAT         how many have come to it

Nobody asks anything once per step. A rank has one request at the store that waits, and a heartbeat; both are the same
in a world of any size.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import msgspec
import torch.distributed as dist

from elastic.control.control_plane import ControlNotice, Dismissed, NoticeKind, RankAssignment, RankProgress
from elastic.control.hang_detector import HangTimeouts, StepTimes
from elastic.control.running_clock import since_boot
from elastic.errors import ControlDeadlineError, ControlPlaneUnavailableError, JobFailedError, StaleEpochError
from elastic.rendezvous.rootless_tcpstore import RootlessStore
from elastic.workers.leave_deadline import exit_with_stacks
from elastic.workers.peer_hang_detector import (
    FIRST_HEARTBEAT,
    HEARTBEAT_S,
    IDLE_HEARTBEATS,
    PeerHangDetector,
    RankHeartbeats,
)
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import ErrorPosition, SealedStep
from peerstore.message_codec import from_json

log = logging.getLogger(__name__)

_PREFIX = "elastic/plane"
_LONG = timedelta(days=1)
LEAVE_S = ScalingPolicy().abort_timeout_s


class _Event(msgspec.Struct, frozen=True):
    """Something that all ranks of an epoch are to know. A wish, the target, or what all have come to."""

    want: NoticeKind | None = None
    reason: str = ""
    within_s: float | None = None
    """When who has not stopped is stopped, from when this is heard: clocks of two machines do not say the same."""
    target: int | None = None
    came: str = ""
    hangs: bool = False
    """Somebody does not get on: it may be who hears this."""
    by: str = ""


class StoreControlPlane:
    """One rank's control plane, over a store that ``connect`` gives a client of."""

    def __init__(
        self,
        connect: Callable[[], RootlessStore],
        place: RankAssignment,
        *,
        last: bool = True,
        prefix: str = "",
        limits: HangTimeouts | None = None,
        pace: StepTimes | None = None,
        leave_s: float | None = LEAVE_S,
        beat_s: float = HEARTBEAT_S,
    ) -> None:
        """``place``: with the least epoch this can be. ``last``: no process here has a place in another world.

        ``limits``: how long no rank may get on; ``None``: nobody looks. ``leave_s``: seconds that a process may take to
        leave a broken world, which notices carry as their deadline; ``None``: no limit. After a hang the plane itself
        ends a process that takes longer, also one whose loop is not in ``elastic.run``.
        """
        self._connect = connect  # and what it holds on to: a server that lives as long as this plane
        self._store = connect()
        self._place = place
        self._last = last
        self._prefix = f"{prefix}{_PREFIX}"
        self._limits, self._pace = limits, pace or StepTimes()
        self._leave_s, self._beat_s = leave_s, beat_s
        self._changed = threading.Condition()
        self._number = -1
        """Of the question that was answered by all ranks."""
        self._epoch = -1
        self._event: _Event | None = None
        """The wish that counts."""
        self._until: float | None = None
        """Its deadline."""
        self._heard_events = 0
        self._said_events = 0
        self._target: int | None = None
        self._came: set[str] = set()
        self._progress = RankProgress(-1)
        self._heartbeats: RankHeartbeats | None = None
        self._paused = self._sealed = self._finished = self._left = self._closed = False
        self._is_store_lost = False
        self._broken_calls: list[Callable[[ControlNotice], None]] = []
        self._threads: list[threading.Thread] = []

    # -- ControlPlane -------------------------------------------------------------------------------------------------

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        """The first time: a place among those that were started together. Later: why there is no second one."""
        if self._epoch >= 0:
            self._no_further()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with _lost():
            self._number, self._epoch = self._first(until) if self._place.rank == 0 else self._other(until)
        self._heartbeats = self._beating()
        self._start(self._watch)
        self._start(self._beat, self._heartbeats)
        hang_s = None if self._limits is None else self._limits.longest_s(self._pace)
        return msgspec.structs.replace(self._place, epoch=self._epoch, hang_s=hang_s)

    def notice(self) -> ControlNotice | None:
        event = self._event
        if event is None or event.want is None:
            return None
        left = None if self._until is None else max(0.0, self._until - since_boot())
        return ControlNotice(self._epoch, event.want, event.reason, left)

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        self._check()
        with _lost():
            self._say_pause(step)
        with self._changed:
            found = self._changed.wait_for(lambda: self._target is not None or self._is_stale, timeout_s)
        self._check()
        if not found or self._target is None:
            raise ControlDeadlineError(f"not all others paused within {timeout_s:g} s")
        return self._target

    def report_sealed(self, step: int, *, checkpoint: SealedStep | None = None, timeout_s: float | None = None) -> None:
        self._check()
        self._sealed = True

    def report_progress(self, progress: RankProgress) -> None:
        self._progress = progress
        if progress.idle and self._is_broken:
            self._leaves()

    def report_fault(self, reason: str, *, final: bool = False, position: ErrorPosition | None = None) -> None:
        """The launcher counts its restarts, and no fault is final to it; a broken world takes no second one."""
        if self._is_broken and not self._left:
            return
        self._check()
        self._tell(_Event(NoticeKind.RESTART, f"rank {self._place.rank}: {reason}"))

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        """Where another size is another start of all processes it is a stop for these ranks."""
        if self._epoch < 0:
            raise ControlPlaneUnavailableError(f"{reason}: not known yet who else is there")
        self._tell(_Event(NoticeKind.STOP if self._last and want is NoticeKind.RESIZE else want, reason, deadline_s))

    def on_broken(self, call: Callable[[ControlNotice], None]) -> None:
        with self._changed:
            self._broken_calls.append(call)
            notice = self.notice()
        if notice is not None and notice.kind is NoticeKind.RESTART:
            self._start(call, notice)

    def report_finished(self) -> None:
        self._check()
        self._finished = True

    def mark_broken(self, reason: str) -> None:
        """This rank knows from elsewhere that the world is broken. Who waits here to be in it waits no longer."""
        self._heard(_Event(NoticeKind.RESTART, reason))

    def gather(self, what: str, *, timeout_s: float | None = None, wait: bool = True) -> None:
        """This rank has come to ``what``. Until all ranks of the epoch have: who went on before would take them along.

        To be said once by each. :class:`~elastic.errors.StaleEpochError` where the world breaks meanwhile.
        """
        with _lost():
            if self._store.add(self._name(f"came/{what}"), 1) == self._place.world_size:
                self._tell(_Event(came=what))
        if wait and not self.has_gathered(what, timeout_s=timeout_s):
            raise ControlDeadlineError(f"not all others came to {what!r} within {timeout_s:g} s")
        if wait and what not in self._came:
            self._check()

    def has_gathered(self, what: str, *, timeout_s: float | None) -> bool:
        """Wait until all ranks have come to ``what``, or nobody is to wait for that any more; whether that came."""
        with self._changed:
            return self._changed.wait_for(lambda: what in self._came or self._is_stale, timeout_s)

    def close(self) -> None:
        with self._changed:
            was_closed, self._closed, self._left = self._closed, True, True
            self._changed.notify_all()
        if self._epoch >= 0 and not was_closed and not self._is_store_lost:
            try:
                if self._heartbeats is not None and (self._finished or self._sealed):
                    self._heartbeats.write(self._progress, over=True)
                self._wake(self._heard_events)
            except RuntimeError:
                self._store.abort()  # who waits there would wait on
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._store.close()

    def _name(self, what: str) -> str:
        return f"{self._prefix}/{self._epoch}/{what}"

    # -- meeting ------------------------------------------------------------------------------------------------------

    def _first(self, until: float | None) -> tuple[int, int]:
        number = self._store.add(f"{self._prefix}/epochs", 1) - 1
        word = self._say_here(number)
        self._store.set(f"{self._prefix}/asked", str(number))
        size = self._place.world_size
        names = [f"{self._prefix}/{number}/here/{rank}" for rank in range(size)]
        for pause_s in pauses_s():
            if self._store.add(f"{self._prefix}/{number}/come", 0) >= size and self._store.check(names):
                break
            self._wait_for_others(pause_s, until)
        words = [found.decode() for found in self._store.multi_get(names)]
        assert words[0] == word  # noqa: S101 - nobody else is rank 0
        epoch = max(number, *(int(word.partition(":")[2]) for word in words))
        if epoch > number:
            self._store.add(f"{self._prefix}/epochs", epoch - number)
        self._store.set(f"{self._prefix}/{number}/all", " ".join([*words, str(epoch)]))
        return number, epoch

    def _other(self, until: float | None) -> tuple[int, int]:
        """An answer to an earlier start's question does no harm: the words that come back are not this rank's."""
        said: dict[int, str] = {}
        for pause_s in pauses_s():
            if self._store.check([f"{self._prefix}/asked"]):
                number = int(self._store.get(f"{self._prefix}/asked"))
                if number not in said:
                    said[number] = self._say_here(number)
                if self._store.check([f"{self._prefix}/{number}/all"]):
                    *words, epoch = self._store.get(f"{self._prefix}/{number}/all").decode().split()
                    if words[self._place.rank : self._place.rank + 1] == [said[number]]:
                        return number, int(epoch)
            self._wait_for_others(pause_s, until)
        raise AssertionError  # there is always another pause

    def _say_here(self, number: int) -> str:
        word = f"{secrets.token_hex(8)}:{self._place.epoch}"
        names = (f"beat/{self._place.rank}", f"here/{self._place.rank}")
        self._store.multi_set([f"{self._prefix}/{number}/{name}" for name in names], [FIRST_HEARTBEAT, word])
        self._store.add(f"{self._prefix}/{number}/come", 1)
        return word

    def _wait_for_others(self, pause_s: float, until: float | None) -> None:
        with self._changed:
            left_s = pause_s if until is None else min(pause_s, until - time.monotonic())
            self._changed.wait_for(lambda: self._closed or self._event is not None, max(0.0, left_s))
        if self._closed or self._event is not None:
            reason = "closed" if self._event is None else self._event.reason
            raise StaleEpochError(f"the world ended before all its ranks were there: {reason}")
        if until is not None and time.monotonic() >= until:
            raise ControlDeadlineError("not all ranks came in time")

    # -- what happens -------------------------------------------------------------------------------------------------

    def _tell(self, event: _Event) -> None:
        """Events have an order: who comes second finds the first one's in its place."""
        with _lost():
            self._said_events += 1
            told = msgspec.json.encode(
                msgspec.structs.replace(event, by=f"{self._place.rank}.{self._said_events}")
            ).decode()
            number = self._heard_events
            while self._store.compare_set(self._name(f"event/{number}"), "", told) != told.encode():
                number += 1
            ranks = range(self._place.world_size)
            self._store.multi_set([self._name(f"wake/{number}/{rank}") for rank in ranks], ["1"] * len(ranks))

    def _wake(self, number: int) -> None:
        """This rank's own thread, which waits for that event."""
        self._store.set(self._name(f"wake/{number}/{self._place.rank}"), "1")

    def _say_pause(self, step: int) -> None:
        """The last one to say where it stands says the target to all."""
        if self._paused:
            return
        ranks = range(self._place.world_size)
        self._store.set(self._name(f"pause/{self._place.rank}"), str(step))
        self._paused = True
        if self._store.add(self._name("paused"), 1) == len(ranks):
            said = self._store.multi_get([self._name(f"pause/{rank}") for rank in ranks])
            self._tell(_Event(target=max(map(int, said))))

    def _watch(self) -> None:
        try:
            while not self._closed:
                event = self._next_event(self._heard_events)
                if event is not None:
                    self._heard_events += 1
                    self._heard(event)
        except (RuntimeError, msgspec.MsgspecError) as error:  # it is gone, or says what no rank has said
            self._store_lost(error)

    def _next_event(self, number: int) -> _Event | None:
        """Waits for it; ``None`` where this rank was woken for something else, or nothing happened all day long."""
        with contextlib.suppress(dist.DistStoreError):
            self._store.wait([self._name(f"wake/{number}/{self._place.rank}")], _LONG)
            return None if self._closed else from_json(self._store.get(self._name(f"event/{number}")), _Event)
        return None

    def _store_lost(self, error: Exception) -> None:
        if not self._closed and not self._is_broken:  # else its connections are cut on purpose
            self._is_store_lost = True
            self._store.abort()  # who waits there would wait on
            self._heard(_Event(NoticeKind.RESTART, f"the store that the ranks met at is gone: {error}"))

    # -- who hangs ----------------------------------------------------------------------------------------------------

    def _beating(self) -> RankHeartbeats:
        size, limits = self._place.world_size, self._limits
        keys = [f"{self._prefix}/{self._number}/beat/{rank}" for rank in range(size)]
        judge = (
            None if limits is None else lambda: PeerHangDetector(self._epoch, size, limits, self._pace, self._beat_s)
        )
        return RankHeartbeats(self._store, keys, self._place.rank, judge)

    def _beat(self, heartbeats: RankHeartbeats) -> None:
        """That the store answers is seen here: who waits for an event would not see it."""
        beats = 0
        try:
            while not self._closed and not self._is_broken:
                over, stopping = self._finished or self._sealed, self._event is not None
                reason = heartbeats.beat(self._progress, time.monotonic(), over=over, stopping=stopping)
                if reason is not None:
                    log.error("epoch %d: %s", self._epoch, reason)
                    self._tell(_Event(NoticeKind.RESTART, reason, hangs=True))
                beats, number = beats + 1, self._heard_events
                if beats % IDLE_HEARTBEATS == 0 and self._store.check([self._name(f"event/{number}")]):
                    self._wake(number)  # who told it ended before it could wake all
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._is_broken, self._beat_s)
        except (RuntimeError, ControlPlaneUnavailableError) as error:
            self._store_lost(error)

    def _must_leave(self, reason: str, leave_s: float) -> None:
        """A process that hangs does not come to its end by an error, and no launcher sees it."""
        with self._changed:
            if self._changed.wait_for(lambda: self._left, leave_s):
                return
        log.error("epoch %d: %s; this process has not left it for %g s and ends", self._epoch, reason, leave_s)
        exit_with_stacks()

    def _heard(self, event: _Event) -> None:
        with self._changed:
            if event.came:
                self._came.add(event.came)
            elif event.target is not None:
                self._target = event.target
            elif self._event is None or self._event.want is not NoticeKind.RESTART:
                broken = event.want is NoticeKind.RESTART
                within_s = self._leave_s if broken else event.within_s
                until = None if within_s is None else since_boot() + within_s
                earlier = None if broken else self._until
                self._until = min((one for one in (earlier, until) if one is not None), default=None)
                self._event = event
            self._changed.notify_all()
            notice = self.notice()
            calls = tuple(self._broken_calls)
        if event.hangs and self._leave_s is not None:
            self._start(self._must_leave, event.reason, self._leave_s)
        if event.want is NoticeKind.RESTART and notice is not None and notice.reason == event.reason:
            for call in calls:
                call(notice)

    @property
    def _is_broken(self) -> bool:
        event = self._event
        return event is not None and event.want is NoticeKind.RESTART

    @property
    def _is_stale(self) -> bool:
        return self._epoch < 0 or self._closed or self._is_broken

    def _check(self) -> None:
        if self._is_stale:
            reason = self._event.reason if self._event is not None else "it has not begun, or was left"
            raise StaleEpochError(f"epoch {self._epoch} is over: {reason}")

    def _leaves(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _no_further(self) -> None:
        self._leaves()
        if self._finished or self._sealed:
            raise Dismissed("whoever started this process starts the next ones")
        reason = self._event.reason if self._event is not None else "left without being asked"
        raise JobFailedError(f"this world has ended ({reason}), and whoever started it has to start the next one")

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="elastic-store", daemon=True)
        self._threads.append(thread)
        thread.start()


def pauses_s() -> Iterator[float]:
    """Between two looks at something that comes by itself: a tenth of what it has taken, at the most a second."""
    waited_s = 0.0
    while True:
        pause_s = min(1.0, max(0.02, waited_s / 10))
        yield pause_s
        waited_s += pause_s


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """A store that does not answer leaves open what is wanted."""
    try:
        yield
    except RuntimeError as error:
        raise ControlPlaneUnavailableError(f"the store that the ranks met at does not answer: {error}") from error
