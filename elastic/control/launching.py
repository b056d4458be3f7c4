"""``elastic run``: starts a job's coordinator and nodes, keeps the coordinator alive, passes signals on."""

from __future__ import annotations

import collections
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from elastic.control.link import ask
from elastic.control.messages import Gone, Question, Resize, Stop
from elastic.control.processes import Running, told
from elastic.control.running_clock import RunningClock
from elastic.control.tasks import STATUS, CoordinatorTask, NodeTask, command_of, environ_for
from elastic.errors import ControlLostError, ElasticError, GaveUpError

log = logging.getLogger(__name__)

_START_S = 30.0
_RESTARTS = 5
_WITHIN_S = 60.0
_AGAIN_S = 0.2
_HEARD_S = 5.0
"""After that it is known without being told."""
_UNHEARD_S = 5.0
"""Beyond what a node may take to end: who is still there then was cut off when the job was over."""
INTERRUPTED = 130


class Launcher:
    """``coordinator`` is ``None`` for nodes of a job whose coordinator is elsewhere. Runs on the main thread."""

    def __init__(
        self,
        nodes: list[NodeTask],
        coordinator: CoordinatorTask | None,
        secret: bytes,
        *,
        grace_s: float,
        notices: bool = False,
        told_address: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``notices``: a signal comes to all machines of the job and means the job, SIGUSR1 too: it is to end soon."""
        self._nodes = nodes
        self._coordinator = coordinator
        self._secret = secret
        self._grace_s = grace_s
        self._notices = notices
        self.noticed = False
        """Whether SIGUSR1 was such a notice."""
        self._told_address = told_address
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, Running] = {}
        self._statuses: dict[str, int] = {}
        self._leader: Running | None = None
        self._status: int | None = None
        """How the coordinator ended."""
        self._over_at: float | None = None
        self._restarts: collections.deque[float] = collections.deque()
        self._kept: list[int] = []
        """Files in memory for the coordinators: in no directory, which may be full or forbidden meanwhile."""
        self._address = nodes[0].coordinator if nodes else ""
        self._interrupts = 0
        self._asking: list[threading.Thread] = []
        self._ending = threading.Event()

    def run(self) -> int:
        """Until the job (or these nodes' part in it) is over; the exit status."""
        before = {number: signal.signal(number, self._signalled) for number in _SIGNALS}
        try:
            if self._coordinator is not None:
                note = self._keep("elastic-epoch")  # where one leaves the newest world's number to the next
                secret = self._keep("elastic-secret", self._secret)
                self._coordinator = msgspec.structs.replace(self._coordinator, epoch_file=note, secret_file=secret)
                self._lead(self._coordinator)
                self._address = self._wait_address(self._coordinator)
            self._told_address(self._address)
            for task in self._nodes:
                self._start(msgspec.structs.replace(task, coordinator=self._address))
            while not self._is_done():
                self._turn()
            return self._verdict()
        finally:
            self._end_all()
            for descriptor in self._kept:
                os.close(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _keep(self, name: str, content: bytes = b"") -> str:
        """A file of this user's alone that is there as long as this process."""
        self._kept.append(os.memfd_create(name, os.MFD_CLOEXEC))
        os.fchmod(self._kept[-1], 0o600)
        os.write(self._kept[-1], content)
        return f"/proc/{os.getpid()}/fd/{self._kept[-1]}"

    # -- processes ----------------------------------------------------------------------------------------------------

    def _start(self, task: NodeTask) -> None:
        self._running[task.node] = Running(
            command_of(task),
            environ=environ_for(task.environ),
            sink=None,
            ended=lambda status: self._inbox.put(partial(self._node_ended, task.node, status)),
            name=task.node,
        )

    def _lead(self, task: CoordinatorTask) -> None:
        self._leader = Running(
            command_of(task),
            environ=environ_for(),
            sink=None,
            ended=lambda status: self._inbox.put(partial(self._leader_ended, status)),
            name="coordinator",
        )

    def _wait_address(self, task: CoordinatorTask) -> str:
        clock = RunningClock(1.0)
        path, deadline = Path(task.address_file), clock() + _START_S
        while not path.exists():
            if self._status is not None or clock() > deadline or self._interrupts:
                raise ControlLostError(f"the coordinator did not start on {task.listen}")
            self._turn()
        return path.read_text()

    def _node_ended(self, node: str, status: int) -> None:
        del self._running[node]
        self._statuses[node] = status
        if status not in STATUS.values():
            log.warning("the supervisor of node %s is gone: %s", node, told(status))
            self._ask(Gone(node), _HEARD_S)

    def _leader_ended(self, status: int) -> None:
        """The ranks do not notice: it is started again, where it was, and learns the job from the nodes."""
        self._leader = None
        if status in STATUS.values() or self._coordinator is None or not self._address or self._ending.is_set():
            self._status, self._over_at = status, time.monotonic()
            return
        now = time.monotonic()
        self._restarts.append(now)
        while self._restarts and now - self._restarts[0] > _WITHIN_S:
            self._restarts.popleft()
        if len(self._restarts) > _RESTARTS:
            raise GaveUpError(f"the coordinator ended {_RESTARTS + 1} times within {_WITHIN_S:g} s: {told(status)}")
        log.warning("the coordinator is gone (%s) and is started again", told(status))
        host = self._coordinator.listen.rpartition(":")[0]
        port = self._address.rpartition(":")[2]
        self._lead(msgspec.structs.replace(self._coordinator, fresh=False, listen=f"{host}:{port}"))

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        try:
            happened = self._inbox.get(timeout=_AGAIN_S)
        except queue.Empty:
            self._tell_unheard()
            return
        happened()

    def _tell_unheard(self) -> None:
        """Nodes that were cut off when the coordinator ended for good would wait for it much longer."""
        longest_s = max((task.end_s for task in self._nodes), default=0.0)
        if self._over_at is None or time.monotonic() - self._over_at < longest_s + _UNHEARD_S:
            return
        self._over_at = None
        for running in self._running.values():
            running.signal(signal.SIGINT if self._status else signal.SIGUSR1)

    def _is_done(self) -> bool:
        if self._coordinator is None:
            return not self._running
        return self._status is not None and not self._running

    def _verdict(self) -> int:
        if self._interrupts > 1:
            return INTERRUPTED
        if self._status is not None:
            return self._status
        bad = [status for status in self._statuses.values() if status]
        return bad[0] if bad and bad[0] > 0 else int(bool(bad))

    def _end_all(self) -> None:
        self._ending.set()
        for running in [*self._running.values(), *([self._leader] if self._leader is not None else [])]:
            running.signal(signal.SIGKILL)
            running.join()
        for thread in self._asking:
            thread.join()

    # -- signals ------------------------------------------------------------------------------------------------------

    def _signalled(self, number: int, _frame: Any) -> None:
        self._inbox.put(partial(self._heed, signal.Signals(number)))

    def _heed(self, number: signal.Signals) -> None:
        if number is signal.SIGUSR1 and not self._notices:
            self._ask(Resize(None, "SIGUSR1"), 1.0)
            return
        self.noticed |= number is signal.SIGUSR1
        self._interrupts += number is signal.SIGINT
        if self._interrupts > 1:
            self._say("ended at once")
            self._ending.set()
            for running in self._running.values():
                running.signal(signal.SIGKILL)
            if self._leader is not None:
                self._leader.signal(signal.SIGKILL)
        elif self._coordinator is None and not self._notices:
            for running in self._running.values():
                running.signal(signal.SIGTERM)
        else:
            self._say(f"{number.name}: the ranks seal and end within {self._grace_s:g} s")
            self._ask(Stop(number.name, self._grace_s), self._grace_s)

    def _ask(self, question: Question, within_s: float) -> None:
        """Again and again, while the coordinator is being started."""

        def run() -> None:
            deadline = time.monotonic() + within_s
            while not self._ending.is_set():
                try:
                    ask(self._address, question, job=self._nodes[0].job, secret=self._secret)
                    return
                except ElasticError as error:
                    if time.monotonic() > deadline:
                        log.warning("%s was not heard: %s", question, error)
                        return
                self._ending.wait(_AGAIN_S)

        thread = threading.Thread(target=run, name="elastic-ask", daemon=True)
        self._asking.append(thread)
        thread.start()

    def _say(self, text: str) -> None:
        print(f"elastic: {text}", file=sys.stderr, flush=True)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
