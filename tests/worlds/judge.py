"""Invariants of the coordinator's decisions, checked after every decision with independent records."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from elastic.world.next_world import next_world
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import (
    BreakWorld,
    EventBatch,
    FailJob,
    FormationKind,
    FormWorld,
    JobStopRequested,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodesPreempted,
    PauseWorld,
    RankFault,
    RankLost,
    RejoinReport,
    ReleaseNode,
    ResizeRequested,
    RespawnStragglers,
    StopJob,
    WorldAction,
    WorldEvent,
    WorldState,
)
from tests.worlds.simulated_supervisor import Violation


class Judge:
    def __init__(self, policy: ScalingPolicy) -> None:
        self.policy = policy
        step = policy.replica_increment_step or 1
        self.sizes = policy.replica_discrete_values or range(policy.min_replicas, policy.max_replicas + 1, step)
        self.alive: dict[str, int] = {}
        self.joined_s: dict[str, float] = {}
        self.respawned_s: dict[tuple[str, int], float] = {}
        self.gone: dict[str, int] = {}
        self.preempted: dict[str, int] = {}
        """Generations of the preempted nodes."""
        self.preemptions: set[tuple[str, int, float]] = set()
        """Node, generation and deadline of every preemption."""
        self.preempted_from_world: set[str] = set()
        """Nodes of the newest world that were preempted since it formed."""
        self.resize_requested = False
        """Whether a resize was requested since the newest world formed, which allows it to grow at once."""
        self.places: tuple[str, ...] = ()
        self.stop_requested = False
        self.failed_for_good = False
        """Whether a rank of the newest world has reported a final fault."""
        self.epoch = -1
        self.formed = 0
        self.causes = self.faults = 0
        """Number of events that can cause a new world, and how many of them were faults."""
        self.running = self.pausing = self.stopping = self.faulted = False
        self.broke_s = self.formed_s = self.until_s = 0.0
        self.shrunk_s: float | None = None
        self.restarts_s: deque[float] = deque()
        self.restarts = 0
        self.losses: Counter[tuple[str, int]] = Counter()
        self._decisions = 0

    def at_most(self, nodes: int, world: WorldState) -> int:
        most = nodes if world.max_nodes is None else min(nodes, world.max_nodes)
        return max((size for size in self.sizes if size <= most), default=0)

    def event_happened(self, count: int = 1, *, fault: bool = True) -> None:
        self.causes += count
        self.faults += count * fault

    # -- events -------------------------------------------------------------------------------------------------------

    def actions_decided(
        self, before: WorldState, event: WorldEvent, world: WorldState, actions: tuple[WorldAction, ...], now_s: float
    ) -> None:
        self._decisions += 1
        if self._decisions % 16 == 0 and next_world(before, event, self.policy, now_s) != (world, actions):
            raise Violation("the same event in the same world leads to different decisions")
        self._apply_event(event, now_s)
        if self._is_final(event, before):
            self.failed_for_good = True
            if not world.phase.is_over:
                raise Violation(f"the job continues after {event}")
        self._restarted(before.restarts, world.restarts, now_s)
        if len(world.node_faults) > len(before.node_faults):
            self.event_happened(fault=False)  # the node may rejoin a world when its fault expires
        self._follow(before, world, actions, now_s)
        if world.restarts > self.faults:
            raise Violation(f"{world.restarts} restarts, although only {self.faults} faults have happened")

    def rebuilt(self, world: WorldState, actions: tuple[WorldAction, ...], now_s: float) -> None:
        self.joined_s = dict.fromkeys(self.alive, now_s)
        self.places = world.ranked_nodes
        self.restarts = world.restarts
        self._follow(world, world, actions, now_s)

    def coordinator_restarted(self, reports: Iterable[RejoinReport]) -> None:
        """Forget everything that a restarted coordinator cannot learn from the nodes' reports."""
        reports = list(reports)
        self.alive = {report.node: report.generation for report in reports}
        self.preempted, self.gone, self.shrunk_s = {}, {}, None
        self.epoch = max((report.epoch for report in reports), default=-1)
        self.running, self.pausing, self.faulted = self.epoch >= 0, False, False
        self.preemptions.clear()
        self.restarts_s.clear()
        self.losses.update((report.node, report.generation) for report in reports if report.lost_ranks)

    def _apply_event(self, event: WorldEvent, now_s: float) -> None:
        if isinstance(event, EventBatch):
            for one in event.events:
                self._apply_event(one, now_s)
        elif isinstance(event, NodeJoined):
            if event.generation > max(self.gone.get(event.node, -1), self.alive.get(event.node, -1)):
                self.alive[event.node] = event.generation
                self.joined_s[event.node] = now_s
                self.preempted.pop(event.node, None)
        elif isinstance(event, (NodeLost, NodeLeft)):
            self._remove_node(event.node, event.generation)
        elif isinstance(event, ResizeRequested):
            self.resize_requested = True
        elif isinstance(event, NodesPreempted):
            for node in event.nodes:
                if node in self.alive and event.deadline_s >= self.joined_s[node]:
                    life = self.preempted[node] = self.alive[node]
                    if any(
                        known == node and known_life != life and deadline_s == event.deadline_s
                        for known, known_life, deadline_s in self.preemptions
                    ):
                        self.event_happened(fault=False)  # a repeated message preempts the next generation, too
                    self.preemptions.add((node, life, event.deadline_s))
                    if node in self.places:
                        self.preempted_from_world.add(node)
        elif isinstance(event, RankLost):
            self.losses[event.node, event.generation] += 1
        elif isinstance(event, JobStopRequested):
            self.stop_requested = True

    @staticmethod
    def _is_final(event: WorldEvent, world: WorldState) -> bool:
        """Return whether a rank of the newest world reports a fault that a restart cannot fix."""
        if not isinstance(event, RankFault) or not event.final or world.phase.is_over or event.epoch != world.epoch:
            return False
        member = world.members.get(event.node)
        if member is None or member.generation != event.generation or not member.has_ranks:
            return False
        return not (member.sealed and (world.stopping or member.is_draining))

    def _remove_node(self, node: str, life: int) -> None:
        self.gone[node] = max(life, self.gone.get(node, -1))
        if self.alive.get(node, life + 1) <= life:
            del self.alive[node]

    def _restarted(self, before: int, after: int, now_s: float) -> None:
        policy = self.policy
        self.restarts += after - before
        self.restarts_s.extend([now_s] * (after - before))
        while self.restarts_s and self.restarts_s[0] <= min(now_s - policy.eval_period_s, self.formed_s):
            self.restarts_s.popleft()
        each, full = policy.num_restart_before_full_job_restart, policy.max_full_job_restarts
        if each is not None and full is not None and len(self.restarts_s) > (each + 1) * (full + 1):
            raise Violation(f"the job continues after {len(self.restarts_s)} restarts in one evaluation period")

    # -- actions ------------------------------------------------------------------------------------------------------

    def _follow(self, before: WorldState, world: WorldState, actions: tuple[WorldAction, ...], now_s: float) -> None:
        for action in actions:
            if isinstance(action, BreakWorld):
                self._broken(action, now_s, counted=world.restarts > before.restarts or before is world)
            elif isinstance(action, PauseWorld):
                self._paused(action, before, now_s)
            elif isinstance(action, FormWorld):
                self._check_formed(action, before, world, now_s)
            elif isinstance(action, RespawnStragglers):
                self.event_happened()
                self.respawned_s[action.node, action.generation] = now_s
            elif isinstance(action, ReleaseNode):
                self._check_released(action, now_s)
                self._remove_node(action.node, action.generation)
            elif isinstance(action, StopJob):
                self._check_stopped(before, now_s)
            elif isinstance(action, FailJob):
                self._job_failed(action)

    def _broken(self, action: BreakWorld, now_s: float, *, counted: bool) -> None:
        if action.reason == "it was left behind" and action.epoch < self.epoch:
            return
        if not self.running or action.epoch != self.epoch:
            raise Violation(f"epoch {action.epoch} is broken, but it does not run")
        if self.pausing and now_s >= self.until_s:
            self.event_happened()  # a slow rank let the pause time out
        self.running = self.pausing = False
        self.broke_s, self.faulted = now_s, counted

    def _paused(self, action: PauseWorld, before: WorldState, now_s: float) -> None:
        if not self.running or action.epoch != self.epoch:
            raise Violation(f"epoch {action.epoch} is paused, but it does not run")
        if action.deadline_s < now_s:
            raise Violation("the deadline of a pause has already passed")
        for node, life, deadline_s in self.preemptions:
            if node in self.places and self.alive.get(node) == life and action.deadline_s > deadline_s:
                raise Violation(f"the pause ends after the preemption deadline of {node}")
        self.pausing, self.until_s = True, action.deadline_s
        if action.stop and not self.stop_requested and not self.stopping:
            self._check_too_few_nodes(
                "pauses to stop",
                [node for node in self._present_nodes() if self._could_form_world(before, node)],
                before,
            )
        self.stopping = self.stopping or action.stop

    @staticmethod
    def _could_form_world(world: WorldState, node: str) -> bool:
        member = world.members.get(node)
        return member is not None and (member.has_ranks or member.ready)

    def _present_nodes(self) -> list[str]:
        return [node for node, life in self.alive.items() if self.preempted.get(node) != life]

    def _check_too_few_nodes(self, action: str, nodes: list[str], world: WorldState) -> None:
        size = self.at_most(len(nodes), world)
        if size:
            raise Violation(f"the job {action}, although {nodes} are available and {size} are enough")

    def _check_formed(self, form: FormWorld, before: WorldState, world: WorldState, now_s: float) -> None:
        nodes = form.nodes
        if form.epoch != self.epoch + 1:
            raise Violation(f"epoch {form.epoch} follows {self.epoch}")
        if self.running and not self.pausing:
            raise Violation(f"epoch {form.epoch} begins while epoch {self.epoch} runs")
        if self.at_most(len(nodes), world) != len(nodes):
            raise Violation(f"a world of {len(nodes)} nodes is not allowed by the policy")
        if len(set(nodes)) < len(nodes):
            raise Violation(f"a node has two places in {nodes}")
        if not set(nodes) <= set(self._present_nodes()):
            raise Violation(f"{sorted(set(nodes) - set(self._present_nodes()))} are in a new world, dead or preempted")
        stay = [node for node in before.ranked_nodes if node in nodes]
        if stay != [node for node in nodes if node in before.ranked_nodes]:
            raise Violation(f"{stay} change their order: {nodes}")
        self._check_size(form, world, before.size, now_s)
        self._offenders(form, world, now_s)
        self.epoch, self.formed, self.formed_s = form.epoch, self.formed + 1, now_s
        if self.formed > self.causes:
            raise Violation(f"{self.formed} worlds, although only {self.causes} events have happened")
        self.running, self.pausing, self.faulted = True, False, False
        self.preempted_from_world.clear()
        self.resize_requested = False
        self.places = nodes

    def _check_size(self, form: FormWorld, world: WorldState, old: int, now_s: float) -> None:
        policy, size = self.policy, len(form.nodes)
        expected = self.at_most(old - len(self.preempted_from_world), world)
        if self.faulted and size < expected and now_s < self.broke_s + policy.faulty_scale_down_timeout_s:
            raise Violation(f"the world shrinks from {old} to {size} nodes without waiting for a replacement")
        if form.kind is FormationKind.GROW:
            if not self.resize_requested and now_s < self.formed_s + policy.scaling_timeout_s:
                raise Violation(f"the world grows {now_s - self.formed_s:g} s after it began")
            if self.shrunk_s is not None and now_s < self.shrunk_s + policy.scale_up_snooze_s:
                raise Violation(f"the world grows {now_s - self.shrunk_s:g} s after a fault made it smaller")
        if self.faulted and size < old:
            self.shrunk_s = now_s

    def avoided(self, world: WorldState, now_s: float) -> set[str]:
        policy = self.policy
        counts = Counter(one.node for one in world.node_faults if now_s < one.at_s + policy.eval_period_s)
        last = {one.node: one.at_s for one in world.node_faults}
        bad = [node for node in counts if counts[node] >= policy.repeat_offender_faults]
        bad.sort(key=lambda node: (-counts[node], -last[node], node))
        return set(bad[: policy.max_num_repeat_offenders_to_avoid])

    def _offenders(self, form: FormWorld, world: WorldState, now_s: float) -> None:
        avoid = self.avoided(world, now_s)
        others = [
            one.node for one in world.members.values() if one.ready and not one.has_ranks and one.node not in avoid
        ]
        if avoid.intersection(form.nodes) and others:
            raise Violation(f"{sorted(avoid.intersection(form.nodes))} have ranks again, and {others} have none")

    def _check_released(self, action: ReleaseNode, now_s: float) -> None:
        if self.preempted.get(action.node) == action.generation or self.losses[action.node, action.generation] >= 3:
            return
        policy = self.policy
        patience_s, since_s = 0.99 * policy.restart_timeout_s, self.respawned_s.get((action.node, action.generation))
        if since_s is None and action.node in self.alive:
            since_s = self.joined_s[action.node] + policy.leave_hang_s
        if since_s is not None and now_s < since_s + patience_s:
            raise Violation(f"{action.node} is released before its timeout")

    def _check_stopped(self, before: WorldState, now_s: float) -> None:
        if self.stop_requested or self.stopping:
            return
        self._check_too_few_nodes("stops", self._present_nodes(), before)
        if self.faulted and now_s < self.broke_s + self.policy.faulty_scale_down_timeout_s:
            raise Violation("the job stops without waiting for a replacement")

    def _job_failed(self, action: FailJob) -> None:
        each, full = self.policy.num_restart_before_full_job_restart, self.policy.max_full_job_restarts
        most = self.policy.job_max_retry_count
        limits = [(each + 1) * (full + 1)] if each is not None and full is not None else []
        limits += [most + 1] if most is not None else []
        if self.failed_for_good:
            return
        if "startup_timeout_s" not in action.attempts and self.restarts < min(limits, default=1 << 30):
            raise Violation(f"the job fails after {self.restarts} restarts: {action.reason}")

    # -- states -------------------------------------------------------------------------------------------------------

    def node_preempted(self, node: str, life: int, deadline_s: float, world: WorldState) -> None:
        member = world.members.get(node)
        if (
            (node, life, deadline_s) in self.preemptions
            and member is not None
            and member.generation == life
            and not world.phase.is_over
        ):
            raise Violation(f"{node} was preempted until {deadline_s:g} s and is still in the job")

    def check_at_rest(self, world: WorldState, now_s: float) -> None:
        avoid = self.avoided(world, now_s)
        good = [node for node in self._present_nodes() if node not in avoid]
        size = self.at_most(len(good), world)
        if world.size < size:
            raise Violation(f"the job rests with {world.size} nodes, although {good} are available")
        if avoid.intersection(world.ranked_nodes) and set(good) - set(world.ranked_nodes):
            raise Violation(
                f"{avoid} have ranks despite their faults, and {set(good) - set(world.ranked_nodes)} have none"
            )

    def check_no_world_needed(self, world: WorldState) -> None:
        self._check_too_few_nodes("never begins", self._present_nodes(), world)
