"""``pytest --workers 4``: collect once, then fork workers that share the tests, the longest first.

Workers share everything that the collection imported, such as torch. Starting an interpreter and collecting per worker
would cost more than many tests. Tests with fixtures of class, module or package scope stay together. Every other test
goes to the next free worker.

:class:`Concurrency` runs as many tests at once as keep the cores busy: waiting tests leave room for others, computing
tests do not. Tests that wait for something within a time limit (:data:`TIMED`) run one of each kind at a time, next to
other tests. When no others are left, a few run at once, as one alone leaves half the machine idle.

``--retry-failed 5`` retries up to five failed tests at the end, each in a worker of its own that runs alone
(:mod:`tests.support.flaky`).

Pytest's cache records the seconds of each test, which order the next run.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.runner import CallInfo, TestReport

from tests.support import forked_starts, zygote
from tests.support.flaky import RetryFailed
from tests.support.huge_pages import collapse_private_memory

_END_S = 30.0
_SECONDS = "workers/seconds"
_LENGTH = struct.Struct("!Q")
_KEPT_TOGETHER = {"class", "module", "package"}
TIMED = {"tests/e2e/peers/": "nodes", "tests/scenario/": "nodes", "tests/e2e/hyperpod/": "ranks"}
"""Timed tests by path. They wait for copies and lost agents on other nodes, or for restarting ranks."""
_TIMED_LAST = 3
"""Timed units to run at once when no others are left."""
_BUSY, _ROOM = 0.97, 0.85
_LOOK_S = 1.0
_GUESSED_S = {
    "tests/e2e/cli/test_optional_imports": 20.0,
    "tests/e2e/control/test_elastic_run_random_faults": 8.0,
    "tests/e2e/control/test_elastic_run_store_and_agents": 20.0,
    "tests/e2e/control/test_leader_node_lost": 30.0,
    "tests/e2e/crash/": 15.0,
    "tests/e2e/dcp/test_incarnation": 10.0,
    "tests/e2e/durable/test_drain": 15.0,
    "tests/e2e/durable/test_store_errors": 15.0,
    "tests/e2e/elastic/test_elastic_run_end_to_end": 30.0,
    "tests/e2e/elastic/test_hangs_under_torchrun": 50.0,
    "tests/e2e/elastic/test_inject_command": 20.0,
    "tests/e2e/elastic/test_partition_at_job_end": 30.0,
    "tests/e2e/elastic/test_preempted_nodes": 25.0,
    "tests/e2e/elastic/test_re": 20.0,
    "tests/e2e/finetune/": 25.0,
    "tests/e2e/hyperpod/test_hung_ranks": 60.0,
    "tests/e2e/hyperpod/": 20.0,
    "tests/e2e/peers/test_agent": 15.0,
    "tests/e2e/peers/test_parity_mode": 20.0,
    "tests/e2e/test_benchmarks": 20.0,
    "tests/e2e/test_interrupted_benchmarks": 20.0,
    "tests/faults/": 50.0,
    "tests/typing/": 25.0,
    "tests/unit/elastic/rendezvous/test_old_key_cleanup": 20.0,
    "tests/unit/elastic/supervisor/test_memory_tier_resumable_steps": 20.0,
    "tests/unit/elastic/workers/test_store_control_plane": 20.0,
    "tests/unit/peerstore/membership/test_swim_network": 15.0,
    "tests/unit/peerstore/store/test_node_store_syscall_failures": 15.0,
    "tests/unit/repository/test_naming_law": 8.0,
    "tests/unit/tieredckpt/agent/test_drain_listing": 15.0,
    "tests/e2e": 4.0,
    "tests/hostile": 4.0,
    "tests/scenario": 6.0,
    "tests/simulation": 8.0,
    "tests/worlds": 5.0,
}
"""Assumed seconds of a test, or of a file that stays together, by the first matching prefix."""
_SHORT_S = 0.05
"""Assumed seconds of a test that matches no prefix."""


# -- scheduling --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """Positions in the collection of tests that one worker runs in sequence."""

    tests: tuple[int, ...]
    seconds: float
    timed: str = ""


def timed_kind(file: str) -> str:
    return next((kind for start, kind in TIMED.items() if file.startswith(start)), "")


def make_units(tests: Sequence[tuple[str, bool]], seconds: Mapping[str, float]) -> list[Unit]:
    """Return the units to run, longest first.

    ``tests``: the name of each test and whether it stays with its file. ``seconds``: the last duration of each test.
    """
    of_file: dict[str, list[int]] = defaultdict(list)
    for position, (name, _) in enumerate(tests):
        of_file[_file(name)].append(position)
    units = []
    for file, positions in of_file.items():
        together = any(tests[position][1] for position in positions)
        for unit in [positions] if together else [[position] for position in positions]:
            known = [seconds[name] for position in unit if (name := tests[position][0]) in seconds]
            guessed = _guessed_s(file) if len(known) < len(unit) else 0.0
            units.append(Unit(tuple(unit), sum(known) + guessed, timed_kind(file)))
    return sorted(units, key=lambda unit: (-unit.seconds, unit.tests))


def _guessed_s(file: str) -> float:
    return next((s for start, s in _GUESSED_S.items() if file.startswith(start)), _SHORT_S)


def _file(name: str) -> str:
    return name.split("::", 1)[0]


@dataclass
class Concurrency:
    """Number of units to run at once, from the load of the cores over the last second."""

    least: int
    most: int
    now: int

    def adjust(self, busy: float, running: int) -> None:
        """Adjust to the ``busy`` share of all cores' time with ``running`` units."""
        if busy > _BUSY:
            self.now = max(self.least, self.now - 1)
        elif busy < _ROOM and running >= self.now:
            self.now = min(self.most, self.now + 1)


class Queue:
    """Queue of units to run, with limits for timed ones."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._free: list[Unit] = []
        self._timed: list[Unit] = []
        for unit in units:
            (self._timed if unit.timed else self._free).append(unit)
        self._running_timed: Counter[str] = Counter()
        self.running = 0

    def __bool__(self) -> bool:
        return bool(self._free or self._timed)

    def next(self) -> Unit | None:
        """Return the next unit, or ``None`` if none may begin now."""
        if (timed := next(filter(self._may_begin, self._timed), None)) is not None:
            self._timed.remove(timed)
            self._running_timed[timed.timed] += 1
            chosen = timed
        elif self._free:
            chosen = self._free.pop(0)
        else:
            return None
        self.running += 1
        return chosen

    def _may_begin(self, timed: Unit) -> bool:
        if self._free:
            return not self._running_timed[timed.timed]
        return self._running_timed.total() < _TIMED_LAST

    def done(self, unit: Unit) -> None:
        self.running -= 1
        if unit.timed:
            self._running_timed[unit.timed] -= 1

    def requeue(self, unit: Unit) -> None:
        """Requeue the rest of a unit whose worker died."""
        if unit.tests:
            (self._timed if unit.timed else self._free).insert(0, unit)


# -- messages between the session and its workers ----------------------------------------------------------------------


def _send(end: socket.socket, message: Any) -> None:
    body = pickle.dumps(message)
    end.sendall(_LENGTH.pack(len(body)) + body)


def _receive(end: socket.socket) -> Any:
    """Receive a message; raise :class:`EOFError` if the other side is gone."""
    (size,) = _LENGTH.unpack(_receive_exactly(end, _LENGTH.size))
    return pickle.loads(_receive_exactly(end, size))


def _receive_exactly(end: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        try:
            part = end.recv(size - len(found))
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError
        found += part
    return bytes(found)


# -- a worker ----------------------------------------------------------------------------------------------------------


class _SessionItem:
    """Stand-in for an unknown next test, so that only session fixtures survive."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[Any]:
        return [self._session]


class _Reporting:
    """Plugin of a worker that sends reports to the session instead of printing them."""

    def __init__(self, config: pytest.Config, end: socket.socket) -> None:
        self._config, self._end = config, end

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _send(
            self._end, ("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
        )


def _run_worker(session: pytest.Session, end: socket.socket, number: int) -> None:
    config = session.config
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("terminalreporter", "junitxml", "lfplugin", "nfplugin", "stepwiseplugin", "workers-durations"):
        if (plugin := config.pluginmanager.get_plugin(name)) is not None:
            config.pluginmanager.unregister(plugin)
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:  # its files belong to the session
        capture.stop_global_capturing()
        capture.start_global_capturing()
    paths = config._tmp_path_factory
    paths._given_basetemp, paths._basetemp = paths.getbasetemp() / f"w{number}", None  # sockets have short names
    config.pluginmanager.register(_Reporting(config, end))
    forked_starts.install(end)
    if "torch" in sys.modules:  # else no collected test needs torch
        zygote.prepare(end, *forked_starts.template_sockets())
    last: Any = None
    while (tests := _receive(end)) is not None:
        for index, position in enumerate(tests):
            last = session.items[position]
            following = session.items[tests[index + 1]] if index + 1 < len(tests) else _SessionItem(session)
            _send(end, ("begins", position))
            config.hook.pytest_runtest_protocol(item=last, nextitem=following)
        _send(end, ("done", None))
    call = CallInfo.from_call(lambda: session._setupstate.teardown_exact(None), when="teardown")
    if call.excinfo is not None and last is not None:
        config.hook.pytest_runtest_logreport(report=TestReport.from_item_and_call(last, call))
    _send(end, ("bye", None))


# -- the session -------------------------------------------------------------------------------------------------------


class _Gateway(NamedTuple):
    """Carrier of a worker's name for the terminal reporter."""

    id: str


@dataclass(eq=False)
class _Worker:
    pid: int
    gateway: _Gateway
    _workerinfocache: str
    """Header above the report of a failure."""
    end: socket.socket
    unit: Unit | None = None
    at: int | None = None
    """Position of the current test."""
    over: bool = False
    ran: set[int] = field(default_factory=set)


class _Session:
    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session, self._config = session, session.config
        self._workers: list[_Worker] = []
        self._count, self._number = count, 0
        self._selector = selectors.DefaultSelector()
        cache = getattr(self._config, "cache", None)
        seconds = {} if cache is None else cache.get(_SECONDS, {})
        self._queue = Queue(make_units([_name_and_grouping(item) for item in session.items], seconds))
        least = min(count, (os.cpu_count() or 1) + 1)
        self._pace = Concurrency(least, count, least)
        self._looked_at, self._idle_s = time.monotonic(), _idle_s()
        self._failures = RetryFailed(self._config, self._config.option.retry_failed)
        self._config.pluginmanager.register(self._failures)

    def run(self) -> None:
        if self._config.getoption("forked_starts", default=False):
            forked_starts.prepare()
        gc.collect()
        gc.freeze()  # keeps memory shared with the workers
        collapse_private_memory()
        try:
            self._run(min(self._count, len(self._session.items)))
            if not self._is_stopping and not self._queue:
                self._retry_failed()
        finally:
            self._end_all()
            self._failures.give_up()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)
        if self._queue:
            raise pytest.UsageError("the workers ended before all tests had run")

    def _run(self, workers: int) -> None:
        for _ in range(workers):
            self._fork()
        while self._workers:
            self._adjust_pace()
            self._hand_out()
            for key, _ in self._selector.select(_LOOK_S if self._queue else None):
                self._receive_from(key.data)

    def _retry_failed(self) -> None:
        positions = {item.nodeid: position for position, item in enumerate(self._session.items)}
        for name in self._failures.retries():
            self._queue = Queue([Unit((positions[name],), 0.0)])
            self._run(1)
            if self._is_stopping:
                return

    @property
    def _is_stopping(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _end_all(self) -> None:
        """Interrupt the remaining workers, so that their fixtures clean up; kill them after a timeout."""
        for worker in self._workers:
            os.kill(worker.pid, signal.SIGINT)
        deadline = time.monotonic() + _END_S
        for worker in self._workers:
            while os.waitpid(worker.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(worker.pid, signal.SIGKILL)
                time.sleep(0.01)

    def _fork(self) -> None:
        self._number += 1
        ours, theirs = socket.socketpair()
        self._config.get_terminal_writer().flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                ours.close()
                self._selector.close()
                for worker in self._workers:
                    worker.end.close()
                _run_worker(self._session, theirs, self._number)
                status = 0
            except (EOFError, KeyboardInterrupt):  # the session is gone, or ends before its tests do
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                self._session._setupstate.teardown_exact(None)  # fixtures clean up
            finally:
                os._exit(status)
        theirs.close()
        name = f"worker{self._number}"
        worker = _Worker(pid, _Gateway(name), f"[{name}]", ours)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def _adjust_pace(self) -> None:
        now = time.monotonic()
        passed_s = now - self._looked_at
        if passed_s >= _LOOK_S:
            idle_s = _idle_s()
            busy = 1.0 - (idle_s - self._idle_s) / passed_s / (os.cpu_count() or 1)
            self._pace.adjust(busy, self._queue.running)
            self._looked_at, self._idle_s = now, idle_s

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.unit is None and not worker.over:
                room = self._queue.running < self._pace.now
                worker.unit = self._queue.next() if room and not self._is_stopping else None
                if worker.unit is not None:
                    worker.ran.clear()
                    self._send_to(worker, list(worker.unit.tests))
                elif self._is_stopping or not self._queue:
                    worker.over = True
                    self._send_to(worker, None)

    def _send_to(self, worker: _Worker, what: Any) -> None:
        with contextlib.suppress(ConnectionError):  # the worker died: ``_ended`` follows
            _send(worker.end, what)

    def _receive_from(self, worker: _Worker) -> None:
        try:
            what, body = _receive(worker.end)
        except EOFError:
            self._ended(worker)
            return
        if what == "report":
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=body)
            report.node = worker  # else the reporter prints a file name for each result
            if worker.unit is None:  # an error in the teardown of session fixtures, after the worker's last test
                self._failures.log(report)
            else:
                self._failures.add(report)
        elif what == "begins":
            worker.at = body
            worker.ran.add(body)
        elif what == "done":
            self._queue.done(worker.unit)
            worker.unit = worker.at = None

    def _ended(self, worker: _Worker) -> None:
        self._selector.unregister(worker.end)
        worker.end.close()
        self._workers.remove(worker)
        _, status = os.waitpid(worker.pid, 0)
        if worker.unit is None:
            return
        if worker.at is not None:
            item = self._session.items[worker.at]
            code = os.waitstatus_to_exitcode(status)
            words = f"its worker {'was ended by signal' if code < 0 else 'ended with status'} {abs(code)}"
            report = TestReport(
                item.nodeid, item.location, {}, "failed", f"{item.nodeid}: {words}", "call", duration=0.0
            )
            self._failures.add(report, is_last=True)
        self._queue.done(worker.unit)
        rest = tuple(position for position in worker.unit.tests if position not in worker.ran)
        self._queue.requeue(Unit(rest, worker.unit.seconds, worker.unit.timed))
        if not self._session.shouldfail:
            self._fork()


def _idle_s() -> float:
    """Return the idle seconds of all cores together since boot."""
    times = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(times[4]) + int(times[5])) / os.sysconf("SC_CLK_TCK")


def _name_and_grouping(item: pytest.Item) -> tuple[str, bool]:
    info = getattr(item, "_fixtureinfo", None)
    found = info.name2fixturedefs.values() if info is not None else ()
    together = any(fixture.scope in _KEPT_TOGETHER for each in found for fixture in each)
    return item.nodeid, together


class _Durations:
    """Plugin that caches the seconds of each test, with its fixtures, for the next run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = self._config.cache.get(_SECONDS, {})
        self._config.cache.set(_SECONDS, {**known, **{name: round(s, 1) for name, s in self._seconds.items()}})


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("workers")
    group.addoption(
        "--workers", type=int, default=0, metavar="N", help="share the tests among up to N forked processes"
    )
    group.addoption(
        "--retry-failed",
        type=int,
        default=0,
        metavar="N",
        help="retry up to N failed tests once, each alone, after all other tests; requires --workers",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "timed: waits for an event within a time limit; never runs beside another such test"
    )
    if config.option.retry_failed and not config.option.workers:
        raise pytest.UsageError("--retry-failed N requires --workers N: each retry runs in a worker of its own")
    if config.option.workers and getattr(config, "cache", None) is not None:
        config.pluginmanager.register(_Durations(config), "workers-durations")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect garbage only after the collection: until then nearly everything stays alive."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not session.config.option.workers or session.config.option.collectonly or session.testsfailed:
        return None
    _Session(session, session.config.option.workers).run()
    return True
