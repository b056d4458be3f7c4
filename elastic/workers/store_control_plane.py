"""ControlPlane over a torch.distributed store, for launchers that restart whole worlds.

``torchrun`` cannot assign another rank to a running process. So the processes of a world end when the world changes.
For a planned change, all ranks stop at a common step, seal, and exit with status 0. In a broken world they exit with an
error, and the launcher restarts all processes. Sealed steps stay in the nodes' memory, and the next start resumes.

Keys, below ``elastic/plane``::

    epochs              number of times that a rank 0 has asked for the ranks
    asked               number N of its last question; every rank answers with a random word
    N/here/R            word of rank R, with the lowest epoch that it can be in; N/come counts these keys
    N/all               all words, which rank 0 returns when it has them: a rank finds its own word, so the answer is
                        not from an earlier start. The epoch follows: N, or the epoch of a rank that was in a later one
    N/beat/R            progress of rank R (:mod:`elastic.workers.peer_hang_detector`)
    E/event/K           event K of epoch E, in order: a notice, the target, or a point that all ranks have reached
    E/wake/K/R          rank R waits for this key, and reads event K then
    E/paused, E/pause/R number of ranks that reported their step, and the step of rank R
    E/came/WHAT         number of ranks that have reached WHAT

No rank sends a request per step. Each rank has one waiting request at the store, and a heartbeat; both cost the same in
a world of any size.
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
from elastic.control.epoch_state import (
    BrokenCallback,
    BrokenCallbacks,
    EpochState,
    common_step,
    stale_epoch,
)
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
_DEPARTED = "departed"
"""Point that a rank reaches when it needs the store no longer."""
_EVENT_TIMEOUT = timedelta(days=1)
LEAVE_S = ScalingPolicy().abort_timeout_s


class _Event(msgspec.Struct, frozen=True):
    """Event for all ranks of an epoch: a notice, the target, or a point that all ranks have reached."""

    want: NoticeKind | None = None
    reason: str = ""
    within_s: float | None = None
    """Seconds after receipt within which all ranks must stop; ``None``: no limit.

    Clocks of two machines differ.
    """
    target: int | None = None
    came: str = ""
    hangs: bool = False
    """Whether a rank hangs. It may be the receiving rank."""
    by: str = ""


class StoreControlPlane:
    """Control plane of one rank, over the store client that ``connect`` returns."""

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
        """Connect to the store. ``place`` has the lowest possible epoch.

        With ``last``, no process here can be in another world. ``limits``: time without progress after which a rank
        hangs; ``None``: no hang detection. ``leave_s``: seconds that a process may take to leave a broken world, which
        notices carry as their deadline; ``None``: no limit. After a hang the plane itself ends a process that takes
        longer, even if its loop does not use ``elastic.run``.
        """
        self._connect = connect  # holds a server that must live as long as this plane
        self._store = connect()
        self._place = place
        self._is_last_world = last
        self._prefix = f"{prefix}{_PREFIX}"
        self._limits, self._pace = limits, pace or StepTimes()
        self._leave_s, self._beat_s = leave_s, beat_s
        self._changed = threading.Condition()
        self._number = -1
        """Number of the question that all ranks have answered."""
        self._state = EpochState()
        """State of the only epoch, with deadlines on the clock since boot."""
        self._received_events = 0
        self._sent_events = 0
        self._gathered: set[str] = set()
        self._progress = RankProgress(-1)
        self._heartbeats: RankHeartbeats | None = None
        self._paused = self._sealed = self._finished = self._left = self._closed = False
        self._is_store_lost = self._departed = False
        self._broken_callbacks = BrokenCallbacks()
        self._threads: list[threading.Thread] = []

    @property
    def restarts_processes(self) -> bool:
        return True

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        """Return the assignment in the started world.

        The second call raises the reason why no other world follows.
        """
        if self._epoch >= 0:
            self._no_further()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with _store_errors():
            self._number, epoch = self._meet_as_first_rank(until) if self._place.rank == 0 else self._meet(until)
        with self._changed:
            self._state = msgspec.structs.replace(self._state, epoch=epoch)
        self._heartbeats = self._make_heartbeats()
        self._start(self._watch)
        self._start(self._beat, self._heartbeats)
        hang_s = None if self._limits is None else self._limits.longest_s(self._pace)
        return msgspec.structs.replace(self._place, epoch=self._epoch, hang_s=hang_s)

    def notice(self) -> ControlNotice | None:
        return self._state.notice(since_boot())

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        self._check()
        try:
            self.report_pause(step)
        except ControlPlaneUnavailableError:
            if self._closed:  # its store was closed with it
                self._check()
            raise
        with self._changed:
            self._changed.wait_for(lambda: self._state.target is not None or self._is_stale, timeout_s)
        self._check()
        target = self._state.target
        if target is None:
            raise ControlDeadlineError(f"not all others paused within {timeout_s:g} s")
        return target

    def report_pause(self, step: int) -> None:
        """Report the step of this rank, without a wait for the others."""
        if self._paused:
            return
        ranks = range(self._place.world_size)
        with _store_errors():
            self._store.set(self._name(f"pause/{self._place.rank}"), str(step))
            self._paused = True
            if self._store.add(self._name("paused"), 1) == len(ranks):
                reported = self._store.multi_get([self._name(f"pause/{rank}") for rank in ranks])
                self._publish(_Event(target=common_step(map(int, reported))))

    def report_sealed(self, step: int, *, checkpoint: SealedStep | None = None, timeout_s: float | None = None) -> None:
        self._check()
        self._sealed = True

    def report_progress(self, progress: RankProgress) -> None:
        self._progress = progress
        if progress.idle and self._state.is_broken:
            self._mark_left()

    def report_fault(self, reason: str, *, final: bool = False, position: ErrorPosition | None = None) -> None:
        """Report a fault, unless this rank has to leave a broken world: that world takes no second fault.

        The launcher counts restarts, so ``final`` and ``position`` have no effect.
        """
        if self._state.is_broken and not self._left:
            return
        self._check()
        self._publish(_Event(NoticeKind.RESTART, f"rank {self._place.rank}: {reason}"))

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        """Request a change. If another size needs a restart of all processes, a resize stops these ranks."""
        if self._epoch < 0:
            raise ControlPlaneUnavailableError(f"{reason}: the other ranks are not known yet")
        self._publish(
            _Event(NoticeKind.STOP if self._is_last_world and want is NoticeKind.RESIZE else want, reason, deadline_s)
        )

    def on_broken(self, call: BrokenCallback) -> None:
        with self._changed:
            self._broken_callbacks.add(call, self.notice())

    def report_finished(self) -> None:
        self._check()
        self._finished = True

    def mark_broken(self, reason: str) -> None:
        """Mark the world as broken from another source, so that pending waits of this rank end."""
        self._apply(_Event(NoticeKind.RESTART, reason))

    def gather(self, what: str, *, timeout_s: float | None = None, wait: bool = True) -> None:
        """Report that this rank has reached ``what``, and wait for all ranks of the epoch.

        Call it once per point.

        A rank that continued earlier could end the world for the others. Raises
        :class:`~elastic.errors.StaleEpochError` if the world breaks meanwhile.
        """
        with _store_errors():
            if self._store.add(self._name(f"came/{what}"), 1) == self._place.world_size:
                self._publish(_Event(came=what))
        if wait and not self.has_gathered(what, timeout_s=timeout_s):
            raise ControlDeadlineError(f"not all others came to {what!r} within {timeout_s:g} s")
        if wait and what not in self._gathered:
            self._check()

    def has_gathered(self, what: str, *, timeout_s: float | None) -> bool:
        """Wait until all ranks have reached ``what`` or the epoch is over, and return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: what in self._gathered or self._is_stale, timeout_s)

    def depart(self, *, wait_s: float | None = None) -> bool:
        """Announce that this rank needs the store no longer. Return whether this is the first announcement.

        With ``wait_s``, wait that long for all other ranks: a process that serves the store ends after them.
        """
        with self._changed:
            if self._departed:
                return False
            self._departed = True
        try:
            self.gather(_DEPARTED, wait=False)
        except ControlPlaneUnavailableError as error:
            log.info("cannot announce the exit of this rank: %s", error)
            return True
        if wait_s is not None and not self.has_gathered(_DEPARTED, timeout_s=wait_s):
            log.warning("not all ranks have left after %g s", wait_s)
        return True

    def close(self) -> None:
        with self._changed:
            was_closed, self._closed, self._left = self._closed, True, True
            self._changed.notify_all()
        if self._epoch >= 0 and not was_closed and not self._is_store_lost:
            try:
                if self._heartbeats is not None and (self._finished or self._sealed):
                    self._heartbeats.write(self._progress, over=True)
                self._wake(self._received_events)
            except RuntimeError:
                self._store.abort()  # a thread that waits there would never return
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._store.close()

    def _name(self, what: str) -> str:
        return f"{self._prefix}/{self._epoch}/{what}"

    def _meet_as_first_rank(self, until: float | None) -> tuple[int, int]:
        number = self._store.add(f"{self._prefix}/epochs", 1) - 1
        word = self._announce(number)
        self._store.set(f"{self._prefix}/asked", str(number))
        size = self._place.world_size
        names = [f"{self._prefix}/{number}/here/{rank}" for rank in range(size)]
        for pause_s in pauses_s():
            if self._store.add(f"{self._prefix}/{number}/come", 0) >= size and self._store.check(names):
                break
            self._wait_for_others(pause_s, until)
        words = [found.decode() for found in self._store.multi_get(names)]
        assert words[0] == word  # noqa: S101 - only this process is rank 0
        epoch = max(number, *(int(word.partition(":")[2]) for word in words))
        if epoch > number:
            self._store.add(f"{self._prefix}/epochs", epoch - number)
        self._store.set(f"{self._prefix}/{number}/all", " ".join([*words, str(epoch)]))
        return number, epoch

    def _meet(self, until: float | None) -> tuple[int, int]:
        """Return the question's number and the epoch.

        An answer to a question of an earlier start is ignored: its words differ.
        """
        reported: dict[int, str] = {}
        for pause_s in pauses_s():
            if self._store.check([f"{self._prefix}/asked"]):
                number = int(self._store.get(f"{self._prefix}/asked"))
                if number not in reported:
                    reported[number] = self._announce(number)
                if self._store.check([f"{self._prefix}/{number}/all"]):
                    *words, epoch = self._store.get(f"{self._prefix}/{number}/all").decode().split()
                    if words[self._place.rank : self._place.rank + 1] == [reported[number]]:
                        return number, int(epoch)
            self._wait_for_others(pause_s, until)
        raise AssertionError  # pauses_s never ends

    def _announce(self, number: int) -> str:
        word = f"{secrets.token_hex(8)}:{self._place.epoch}"
        names = (f"beat/{self._place.rank}", f"here/{self._place.rank}")
        self._store.multi_set([f"{self._prefix}/{number}/{name}" for name in names], [FIRST_HEARTBEAT, word])
        self._store.add(f"{self._prefix}/{number}/come", 1)
        return word

    def _wait_for_others(self, pause_s: float, until: float | None) -> None:
        with self._changed:
            left_s = pause_s if until is None else min(pause_s, until - time.monotonic())
            self._changed.wait_for(self._has_ended, max(0.0, left_s))
        if self._has_ended():
            reason = self._state.reason or "closed"
            raise StaleEpochError(f"the world ended before all its ranks had joined: {reason}")
        if until is not None and time.monotonic() >= until:
            raise ControlDeadlineError("not all ranks came in time")

    def _publish(self, event: _Event) -> None:
        """Append ``event`` at the next free position, and wake all ranks."""
        with _store_errors():
            self._sent_events += 1
            encoded = msgspec.json.encode(
                msgspec.structs.replace(event, by=f"{self._place.rank}.{self._sent_events}")
            ).decode()
            number = self._received_events
            while self._store.compare_set(self._name(f"event/{number}"), "", encoded) != encoded.encode():
                number += 1
            ranks = range(self._place.world_size)
            self._store.multi_set([self._name(f"wake/{number}/{rank}") for rank in ranks], ["1"] * len(ranks))

    def _wake(self, number: int) -> None:
        """Wake this rank's watching thread, which waits for event ``number``."""
        self._store.set(self._name(f"wake/{number}/{self._place.rank}"), "1")

    def _watch(self) -> None:
        try:
            while not self._closed:
                event = self._next_event(self._received_events)
                if event is not None:
                    self._received_events += 1
                    self._apply(event)
        except (RuntimeError, msgspec.MsgspecError) as error:  # the store is gone, or has invalid content
            self._store_lost(error)

    def _next_event(self, number: int) -> _Event | None:
        """Wait for the event and return it; ``None`` for another wake-up, or after a day."""
        with contextlib.suppress(dist.DistStoreError):
            self._store.wait([self._name(f"wake/{number}/{self._place.rank}")], _EVENT_TIMEOUT)
            return None if self._closed else from_json(self._store.get(self._name(f"event/{number}")), _Event)
        return None

    def _store_lost(self, error: Exception) -> None:
        if not self._closed and not self._state.is_broken:  # after both, connections are closed on purpose
            self._is_store_lost = True
            self._store.abort()  # a thread that waits there would never return
            self._apply(_Event(NoticeKind.RESTART, f"the store that the ranks met at is gone: {error}"))

    def _make_heartbeats(self) -> RankHeartbeats:
        size, limits = self._place.world_size, self._limits
        keys = [f"{self._prefix}/{self._number}/beat/{rank}" for rank in range(size)]
        judge = (
            None if limits is None else lambda: PeerHangDetector(self._epoch, size, limits, self._pace, self._beat_s)
        )
        return RankHeartbeats(self._store, keys, self._place.rank, judge)

    def _beat(self, heartbeats: RankHeartbeats) -> None:
        """Send heartbeats. They also detect a lost store: the thread that waits for an event would not notice."""
        beats = 0
        try:
            while not self._closed and not self._state.is_broken:
                over, stopping = self._finished or self._sealed, self._state.current_change is not None
                reason = heartbeats.beat(self._progress, time.monotonic(), over=over, stopping=stopping)
                if reason is not None:
                    log.error("world %d: %s", self._epoch, reason)
                    self._publish(_Event(NoticeKind.RESTART, reason, hangs=True))
                beats, number = beats + 1, self._received_events
                if beats % IDLE_HEARTBEATS == 0 and self._store.check([self._name(f"event/{number}")]):
                    self._wake(number)  # the publishing rank ended before it could wake all ranks
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._state.is_broken, self._beat_s)
        except (RuntimeError, ControlPlaneUnavailableError) as error:
            self._store_lost(error)

    def _end_if_not_left(self, reason: str, leave_s: float) -> None:
        """End this process if it has not left the world after ``leave_s`` seconds.

        No launcher detects a process that hangs.

        """
        with self._changed:
            if self._changed.wait_for(lambda: self._left, leave_s):
                return
        log.error("world %d: %s; this process has not left it for %g s and ends", self._epoch, reason, leave_s)
        exit_with_stacks()

    def _apply(self, event: _Event) -> None:
        with self._changed:
            if event.came:
                self._gathered.add(event.came)
            elif event.target is not None:
                self._state = self._state.agree((event.target,))
            elif event.want is not None:
                within_s = self._leave_s if event.want is NoticeKind.RESTART else event.within_s
                until = None if within_s is None else since_boot() + within_s
                self._state = self._state.change(event.want, event.reason, until)
            self._changed.notify_all()
            self._broken_callbacks.run(self.notice())
        if event.hangs and self._leave_s is not None:
            self._start(self._end_if_not_left, event.reason, self._leave_s)

    @property
    def _epoch(self) -> int:
        return self._state.epoch

    def _has_ended(self) -> bool:
        return self._closed or self._state.current_change is not None

    @property
    def _is_stale(self) -> bool:
        return self._epoch < 0 or self._closed or self._state.is_broken

    def _check(self) -> None:
        if self._is_stale:
            raise stale_epoch(self._epoch, self._state.reason or "it has not begun, or was left")

    def _mark_left(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _no_further(self) -> None:
        self._mark_left()
        if self._finished or self._sealed:
            raise Dismissed("the launcher of this process starts the next ones")
        reason = self._state.reason or "left without a reported fault"
        raise JobFailedError(f"this world has ended ({reason}), and its launcher has to start the next one")

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="elastic-store", daemon=True)
        self._threads.append(thread)
        thread.start()


def pauses_s() -> Iterator[float]:
    """Yield pauses between polls, in seconds: a tenth of the time waited so far, from 0.02 s to 1 s."""
    waited_s = 0.0
    while True:
        pause_s = min(1.0, max(0.02, waited_s / 10))
        yield pause_s
        waited_s += pause_s


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Raise :class:`ControlPlaneUnavailableError` if the store does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise ControlPlaneUnavailableError(f"the store that the ranks met at does not answer: {error}") from error
