"""Steps that the drain uploads: states, order and displacement. Pure.
::

    waiting -> running, skipped, failed
    running -> done, waiting, failed, skipped
    done    ->
    skipped ->
    failed  -> waiting

A step is done when its manifest is written. It waits again if the store or another node must do something first. With
durable.on_busy "skip", it is skipped once a newer step was sealed. A save in memory never waits for the store, so a
step is also skipped if the save needs its slots. It is skipped if its owner dropped it. It fails if the store rejected
it, and waits again if this node then seals another part.

A required step is one whose save requested durability explicitly. Only saves in memory displace it, after all other
steps. It then counts as failed, and callers that wait for it see the failure.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from peerstore.shard_records import ShardKey, VersionId
from tieredckpt.agent.agent_api import DrainState, DrainStatus

TRANSITIONS: Mapping[DrainState, tuple[DrainState, ...]] = {
    "waiting": ("running", "skipped", "failed"),
    "running": ("done", "waiting", "failed", "skipped"),
    "done": (),
    "skipped": (),
    "failed": ("waiting",),
}
"""States that may follow each state."""
_MAX_CLOSED_STEPS = 32


@dataclass
class DrainingStep:
    """One step of one job. The caller holds the drain's lock during each change."""

    job: str
    version_id: VersionId
    parts: int
    base: int | None
    state: DrainState = "waiting"
    shards: dict[ShardKey, int] = field(default_factory=dict)
    """Sizes of this node's shards, in bytes."""
    done: set[ShardKey] = field(default_factory=set)
    bytes_done: int = 0
    error: str = ""
    required: bool = False
    """Whether the save requested durability explicitly.

    Only saves in memory displace the step; it then fails.
    """
    over: str = ""
    """Why it can no longer become durable, even if an upload is in progress; "" if it can."""
    dropped: bool = False
    """Whether its owner dropped it. Its objects in the durable tier are then deleted."""
    cancel: threading.Event = field(default_factory=threading.Event)
    """Set to stop its upload."""
    url: str = ""
    """URL of the store that has the ``done`` shards."""
    held: bool = False
    """Whether its shards hold their slots."""
    not_before: float = 0.0
    sealed_at: float = 0.0
    uploaded_at: float = 0.0
    """Time when all of this node's parts were uploaded; 0 before."""
    checked_at: float = 0.0
    """Time when these uploads were last checked; 0 before."""

    @property
    def view(self) -> DrainStatus:
        return DrainStatus(self.version_id, self.state, self.bytes_done, sum(self.shards.values()), self.error)

    @property
    def is_open(self) -> bool:
        return self.state in ("waiting", "running")

    @property
    def accepts_shards(self) -> bool:
        return self.state not in ("done", "skipped") and not self.over

    @property
    def is_uploaded_here(self) -> bool:
        """Whether all of this node's shards are uploaded."""
        return self.done.issuperset(self.shards)

    def move(self, state: DrainState, error: str = "") -> None:
        """Change the state as :data:`TRANSITIONS` allows."""
        if state != self.state and state not in TRANSITIONS[self.state]:
            raise ValueError(f"{self.job} step {self.version_id.version} cannot become {state}: it is {self.state}")
        self.state, self.error = state, error

    def hold(self, key: ShardKey, size_bytes: int) -> None:
        """Add a shard of this node, which holds its slot."""
        self.held, self.shards[key] = True, size_bytes

    def add_sealed(self, key: ShardKey, size_bytes: int, now: float, *, required: bool) -> None:
        """Add a shard that this node has sealed now, so that the step is uploaded soon."""
        self.required |= required
        self.hold(key, size_bytes)
        self.sealed_at, self.not_before = now, 0.0
        if self.state != "running":
            self.move("waiting", self.error)

    def start(self) -> None:
        self.move("running", self.error)
        self.cancel.clear()

    def wait_until(self, not_before: float, why: str) -> None:
        """Wait for the time ``not_before``, because the store or other nodes must do something first."""
        self.move("waiting", why)
        self.not_before = not_before

    def use_store(self, url: str) -> None:
        """Upload to this store; uploads to another one do not count."""
        if self.url != url:
            self.url, self.done = url, set()
            self.uploaded_at = self.checked_at = 0.0

    def give_up(self, why: str) -> None:
        """Skip the step for good, or fail it if it is required and was not dropped."""
        self.over = why
        self.move("failed" if self.required and not self.dropped else "skipped", why)


class DrainSteps:
    """All steps that the drain knows, by job and version."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, VersionId], DrainingStep] = {}

    def __iter__(self) -> Iterator[DrainingStep]:
        return iter(list(self._steps.values()))

    def get(self, job: str, group: VersionId) -> DrainingStep | None:
        return self._steps.get((job, group))

    def add(self, step: DrainingStep) -> DrainingStep:
        """Return the known step of this job and version, or add ``step``."""
        return self._steps.setdefault((step.job, step.version_id), step)

    def of_job(self, job: str, group: VersionId | None = None, *, before: int | None = None) -> list[DrainingStep]:
        """Return the job's steps (one for ``group``, or those ``before`` a step), oldest first."""
        found = (step for step in self._steps.values() if step.job == job and group in (None, step.version_id))
        return sorted(
            (step for step in found if before is None or step.version_id.version < before),
            key=lambda step: step.version_id,
        )

    def forget_closed(self, job: str) -> None:
        """Forget all but the newest closed steps of a job."""
        closed = [step for step in self.of_job(job) if not step.is_open]
        for step in closed[:-_MAX_CLOSED_STEPS]:
            del self._steps[job, step.version_id]

    def next_ready(self, now: float) -> DrainingStep | None:
        """Return the oldest waiting step whose time has come."""
        ready = [one for one in self if one.state == "waiting" and one.not_before <= now and one.shards]
        return min(ready, key=lambda step: step.version_id, default=None)

    def seconds_until_ready(self, now: float) -> float | None:
        """Return the time until the next waiting step is due; ``None`` without one."""
        return min((step.not_before - now for step in self if step.state == "waiting"), default=None)

    def superseded_by(self, newer: DrainingStep) -> list[DrainingStep]:
        """Return the waiting steps that a newer complete one displaces: none is required or partly uploaded."""
        return [step for step in self._older_waiting(newer) if not step.done and not step.required]

    def incomplete_before(self, newer: DrainingStep) -> list[DrainingStep]:
        """Return the steps before a durable one that are uploaded here and lack parts of other nodes."""
        return [step for step in self._older_waiting(newer) if step.is_uploaded_here and not step.required]

    def slots_to_free(self, job: str, *, last: bool) -> tuple[list[DrainingStep], DrainingStep | None]:
        """Return the steps whose uploaded shards can give up their slots, or else the step to skip.

        A running upload continues. A required step remains while the save can wait (not ``last``), unless its upload
        has failed.
        """
        waiting = sorted(
            (step for step in self.of_job(job) if step.state == "waiting"),
            key=lambda step: (step.required, bool(step.done), step.version_id),
        )
        uploaded = [step for step in waiting if step.held and step.is_uploaded_here]
        held = [step for step in waiting if step.held and (last or step.error or not step.required)]
        return uploaded, None if uploaded or not held else held[0]

    def _older_waiting(self, newer: DrainingStep) -> list[DrainingStep]:
        return [
            step for step in self.of_job(newer.job) if step.version_id < newer.version_id and step.state == "waiting"
        ]


def summarize(steps: Sequence[DrainingStep]) -> DrainStatus | None:
    """Return one status for steps that a caller waits for, oldest first.

    It is the status of the newest open step. With none open, it is the newest failed step's, unless a newer one is
    durable, or else the newest step's.
    """
    unfinished = [step for step in steps if step.is_open]
    failed = [step for step in steps if step.state == "failed"]
    done = [step for step in steps if step.state == "done"]
    if not unfinished and failed and not (done and done[-1].version_id > failed[-1].version_id):
        return failed[-1].view
    return (unfinished or steps)[-1].view if steps else None


def all_closed(steps: Collection[DrainingStep]) -> bool:
    return not any(step.is_open for step in steps)
