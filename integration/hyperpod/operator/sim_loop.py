"""The simulated operator's loop (observe, decide, store, act) and its state directory.

::

    /dev/shm/hyperpod-sim-UID/JOB/state.json   overrides.json   pods.json   pods/NAME/agent.log, logs/   lock
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from elastic.control.run_directory import write_private_file
from elastic.errors import ControlPlaneRefusedError, ControlPlaneUnavailableError, PolicyError
from integration.hyperpod.job_resource import JobSpec
from integration.hyperpod.operator.decision import OperatorDecision, OperatorEvent, ReleasePod, ReplacePod
from integration.hyperpod.operator.elastic_agent_client import ElasticAgentClient
from integration.hyperpod.operator.job_state import JobState
from integration.hyperpod.operator.observed_pods import ObservedJob, ObservedPod
from integration.hyperpod.operator.sim_pods import PodProvider
from integration.hyperpod.operator.state_machine import decide_job
from peerstore.daemon_process import ensure_private_directory
from peerstore.message_codec import from_json
from peerstore.shard_records import validate_job_name

_ACTIVE_POLL_S = 0.1
"""Seconds between two reconciles while the operator acts; a running job needs no fast polling."""


class SimulatedOperator:
    """Operator of one job and its pods, from the stored state to the end of the job."""

    def __init__(
        self,
        spec: JobSpec,
        pods: PodProvider,
        place: SimDirectory,
        client: ElasticAgentClient,
        *,
        told: Callable[[float, OperatorEvent], None],
        every_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._spec, self._pods, self._directory, self._client = spec, pods, place, client
        self._on_event, self._every_s, self._clock = told, every_s, clock
        stored = place.load()
        self.state = JobState() if stored is None else stored.state
        self._problems: dict[str, str] = {}

    def run(self, stop: threading.Event) -> bool:
        """Operate the job until it ends (return True) or ``stop`` is set (return False)."""
        while not stop.is_set():
            decision = self.reconcile_once()
            if decision.finished:
                return True
            stop.wait(_ACTIVE_POLL_S if decision.actions else self._every_s)
        return False

    def reconcile_once(self) -> OperatorDecision:
        overrides = self._directory.load_overrides()
        endpoints = self._pods.endpoints(overrides.bad_nodes)
        addresses = {endpoint.name: endpoint.address for endpoint in endpoints}
        replies = self._client.poll_all(addresses)
        pods = tuple(
            ObservedPod(
                name=endpoint.name, group=endpoint.group, node=endpoint.node, ip=endpoint.ip,
                agent_status=replies[endpoint.name].status,
                node_health_problem=endpoint.node_health_problem, terminating=endpoint.terminating,
            )
            for endpoint in endpoints
        )  # fmt: skip
        observed = ObservedJob(pods=pods, capacity=overrides.capacity, can_replace=self._pods.can_replace)
        now_s = self._clock()
        decision = decide_job(self._spec, self.state, observed, now_s)
        self._directory.save(StoredSimulation(self._spec, decision.state, observed, now_s))
        self.state = decision.state
        for event in (*self._pods.take_events(), *decision.events):
            self._on_event(now_s, event)
        self._carry_out(decision, addresses)
        self._pods.scale_to(decision.wanted, overrides.bad_nodes)
        return decision

    def _carry_out(self, decision: OperatorDecision, addresses: dict[str, str]) -> None:
        problems = self._client.send_all(decision.actions, addresses)
        for pod, problem in problems.items():
            if self._problems.get(pod) != problem:
                self._on_event(self._clock(), OperatorEvent("CallFailed", problem, warning=True))
        self._problems = problems
        for action in decision.actions:
            if isinstance(action, ReplacePod):
                self._pods.replace(action.pod)
            elif isinstance(action, ReleasePod):
                self._pods.release(action.pod)


SIM_DIRECTORY_ENV = "HYPERPOD_SIM_DIRECTORY"


class StoredSimulation(msgspec.Struct, frozen=True):
    """State of a simulation, stored before any action."""

    spec: JobSpec
    state: JobState
    observed: ObservedJob
    at_s: float


class SimOverrides(msgspec.Struct, frozen=True):
    """Facts that a real cluster would report."""

    capacity: int | None = None
    bad_nodes: dict[str, str] = {}


class SimDirectory:
    def __init__(self, job: str, root: Path | None = None) -> None:
        self.root = root or default_sim_root()
        self.job = str(validate_job_name(job))
        self.folder = self.root / self.job
        self._state_file, self._overrides_file = self.folder / "state.json", self.folder / "overrides.json"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the job against other operators on this machine.

        Raise :class:`ControlPlaneRefusedError` if another operator holds the lock.
        """
        ensure_private_directory(self.root)
        ensure_private_directory(self.folder)
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ControlPlaneRefusedError(f"job {self.job} has an operator on this machine already") from None
            yield
        finally:
            os.close(fd)

    def save(self, stored: StoredSimulation) -> None:
        write_private_file(self._state_file, msgspec.json.encode(stored))

    def load(self) -> StoredSimulation | None:
        try:
            return from_json(self._state_file.read_bytes(), StoredSimulation)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise ControlPlaneUnavailableError(f"{self._state_file} cannot be read: {error}") from error

    def load_overrides(self) -> SimOverrides:
        try:
            return from_json(self._overrides_file.read_bytes(), SimOverrides)
        except FileNotFoundError:
            return SimOverrides()
        except (OSError, msgspec.MsgspecError) as error:
            raise ControlPlaneUnavailableError(f"{self._overrides_file} cannot be read: {error}") from error

    def save_overrides(self, overrides: SimOverrides) -> None:
        write_private_file(self._overrides_file, msgspec.json.encode(overrides))

    def clear(self) -> None:
        """Delete the stored state. The pods' logs remain."""
        self._state_file.unlink(missing_ok=True)
        self._overrides_file.unlink(missing_ok=True)


def default_sim_root() -> Path:
    """Return ``$HYPERPOD_SIM_DIRECTORY``, or a directory on the machine's shared memory."""
    named = os.environ.get(SIM_DIRECTORY_ENV)
    return Path(named) if named else Path("/dev/shm") / f"hyperpod-sim-{os.getuid()}"  # noqa: S108


def find_sim_directory(job: str | None) -> SimDirectory:
    """Return the directory of ``job``; of the only job on this machine if ``job`` is None."""
    root = default_sim_root()
    if job is not None:
        return SimDirectory(job, root)
    found = sorted(path.parent.name for path in root.glob("*/state.json"))
    if not found:
        raise ControlPlaneUnavailableError(f"no job is operated on this machine (looked in {root})")
    if len(found) > 1:
        raise PolicyError(f"several jobs are operated on this machine, name one with --job: {', '.join(found)}")
    return SimDirectory(found[0], root)
