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
from integration.hyperpod.operator.decision import OperatorDecision, OperatorEvent, ReleasePod, ReplacePod
from integration.hyperpod.operator.elastic_agent_client import ElasticAgentClient
from integration.hyperpod.operator.job_spec import JobSpec
from integration.hyperpod.operator.job_state import JobState
from integration.hyperpod.operator.observed_pods import ObservedJob, ObservedPod
from integration.hyperpod.operator.sim_pods import PodProvider
from integration.hyperpod.operator.state_machine import decide_job
from peerstore.message_codec import from_json
from peerstore.server.store_server import ensure_private_directory
from peerstore.shard_records import validate_job_name

_ACTIVE_POLL_S = 0.1
"""Between two looks while something is going on: nobody waits for a job that runs."""


class SimulatedOperator:
    """One job and its pods, from whatever was stored of it until it has ended."""

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
        self._spec, self._pods, self._place, self._client = spec, pods, place, client
        self._told, self._every_s, self._clock = told, every_s, clock
        kept = place.load()
        self.state = JobState() if kept is None else kept.state
        self._problems: dict[str, str] = {}

    def run(self, stop: threading.Event) -> bool:
        """Until the job has ended (true), or ``stop`` is set."""
        while not stop.is_set():
            decision = self.reconcile_once()
            if decision.finished:
                return True
            stop.wait(_ACTIVE_POLL_S if decision.actions else self._every_s)
        return False

    def reconcile_once(self) -> OperatorDecision:
        wishes = self._place.load_overrides()
        places = self._pods.endpoints(wishes.bad_nodes)
        addresses = {one.name: one.address for one in places}
        heard = self._client.poll_all(addresses)
        pods = tuple(
            ObservedPod(
                name=one.name, group=one.group, node=one.node, ip=one.ip, agent_status=heard[one.name].status,
                node_health_problem=one.node_health_problem, terminating=one.terminating,
            )
            for one in places
        )  # fmt: skip
        seen = ObservedJob(pods=pods, capacity=wishes.capacity, can_replace=self._pods.can_replace)
        now_s = self._clock()
        decision = decide_job(self._spec, self.state, seen, now_s)
        self._place.save(StoredSimulation(self._spec, decision.state, seen, now_s))
        self.state = decision.state
        for event in (*self._pods.take_events(), *decision.events):
            self._told(now_s, event)
        self._do(decision, addresses)
        self._pods.scale_to(decision.wanted, wishes.bad_nodes)
        return decision

    def _do(self, decision: OperatorDecision, addresses: dict[str, str]) -> None:
        problems = self._client.send_all(decision.actions, addresses)
        for pod, problem in problems.items():
            if self._problems.get(pod) != problem:
                self._told(self._clock(), OperatorEvent("CallFailed", problem, warning=True))
        self._problems = problems
        for action in decision.actions:
            if isinstance(action, ReplacePod):
                self._pods.replace(action.pod)
            elif isinstance(action, ReleasePod):
                self._pods.release(action.pod)


SIM_DIRECTORY_ENV = "HYPERPOD_SIM_DIRECTORY"


class StoredSimulation(msgspec.Struct, frozen=True):
    """Stored before anything is done."""

    spec: JobSpec
    state: JobState
    observed: ObservedJob
    at_s: float


class SimOverrides(msgspec.Struct, frozen=True):
    """What a cluster would say by itself."""

    capacity: int | None = None
    bad_nodes: dict[str, str] = {}


class SimDirectory:
    def __init__(self, job: str, root: Path | None = None) -> None:
        self.root = root or default_sim_root()
        self.job = str(validate_job_name(job))
        self.folder = self.root / self.job
        self._kept, self._wishes = self.folder / "state.json", self.folder / "overrides.json"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Nobody else on this machine operates this job."""
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

    def save(self, kept: StoredSimulation) -> None:
        write_private_file(self._kept, msgspec.json.encode(kept))

    def load(self) -> StoredSimulation | None:
        try:
            return from_json(self._kept.read_bytes(), StoredSimulation)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as damaged:
            raise ControlPlaneUnavailableError(f"{self._kept} cannot be read: {damaged}") from damaged

    def load_overrides(self) -> SimOverrides:
        try:
            return from_json(self._wishes.read_bytes(), SimOverrides)
        except FileNotFoundError:
            return SimOverrides()
        except (OSError, msgspec.MsgspecError) as damaged:
            raise ControlPlaneUnavailableError(f"{self._wishes} cannot be read: {damaged}") from damaged

    def save_overrides(self, wishes: SimOverrides) -> None:
        write_private_file(self._wishes, msgspec.json.encode(wishes))

    def clear(self) -> None:
        """The job is over; what its pods printed stays."""
        self._kept.unlink(missing_ok=True)
        self._wishes.unlink(missing_ok=True)


def default_sim_root() -> Path:
    """``$HYPERPOD_SIM_DIRECTORY``, or on the machine's shared memory."""
    named = os.environ.get(SIM_DIRECTORY_ENV)
    return Path(named) if named else Path("/dev/shm") / f"hyperpod-sim-{os.getuid()}"  # noqa: S108


def find_sim_directory(job: str | None) -> SimDirectory:
    """The job somebody means who named it, or the only one that is here."""
    root = default_sim_root()
    if job is not None:
        return SimDirectory(job, root)
    found = sorted(path.parent.name for path in root.glob("*/state.json"))
    if not found:
        raise ControlPlaneUnavailableError(f"no job is operated on this machine (looked in {root})")
    if len(found) > 1:
        raise PolicyError(f"several jobs are operated on this machine, name one with --job: {', '.join(found)}")
    return SimDirectory(found[0], root)
