"""One incarnation of the simulated job: ranks that write their parts of each step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from peerstore.errors import ArenaBusyError, FencedError, NoQuorumError, PeerStoreError
from peerstore.shard_records import Lease, ShardKey, VersionId
from tests.simulation.agent import JOB, TRAINER
from tests.simulation.memory import SHARD_BYTES, shard_content

if TYPE_CHECKING:
    from tests.simulation.world import SimulatedWorld

_TRIES = 4
_WAIT_S = 0.8


class Trainers:
    """The ranks of one incarnation. Rank ``part`` runs on ``places[part]``."""

    def __init__(
        self, world: SimulatedWorld, places: tuple[str, ...], epoch: int, name: str, origin: VersionId | None
    ) -> None:
        self.world, self.places = world, places
        self.epoch, self.name, self.origin = epoch, name, origin
        self.base = None if origin is None else origin.version
        self.step = -1 if self.base is None else self.base
        self.running = True
        self.refused = ""
        """The error that stopped the job, if a rank was refused."""
        self._gone: set[str] = set()
        self._sealed: dict[VersionId, set[int]] = {}
        self._aborted_after_seal: set[ShardKey] = set()
        self.committed: list[VersionId] = []

    def __str__(self) -> str:
        return f"{self.epoch % 1000}{self.name} on {','.join(sorted(set(self.places)))}"

    def lose_machine(self, machine: str) -> None:
        """End the ranks of one machine. The others wait until the job restarts."""
        if machine in self.places:
            self._gone.add(machine)
            self.running = False

    def stop(self, machines: list[str]) -> None:
        """End the ranks on these machines before a restart. Ranks elsewhere may not notice."""
        if set(machines) & set(self.places):
            self._gone |= set(machines)
            self.running = False

    def save(self, *, without: int | None = None, sealed: bool = False) -> VersionId | None:
        """Save a step. Rank ``without`` skips its part, or with ``sealed`` aborts it after sealing it."""
        if not self.running:
            return None
        self.step += 1
        group = VersionId(self.epoch, self.step, 0, self.name)
        self.world.log(f"{self} saves step {self.step}")
        self._sealed[group] = set()
        self.world.truth.version_saved(group, self.base, len(self.places))
        for part in range(len(self.places)):
            key = ShardKey(JOB, self.step, self.epoch, self.name, 0, part)
            if part != without:
                self._run_soon(0.2, part, partial(self._write, key, _TRIES))
            elif sealed:
                self._aborted_after_seal.add(key)
                self._run_soon(0.2, part, partial(self._write, key, _TRIES))
            else:
                self._run_soon(0.2, part, partial(self._abort_part, key))
        return group

    def _abort_part(self, key: ShardKey) -> None:
        """Report a skipped part to the rank's agent. Retry until the agent runs."""
        agent = self.world.agent_at(self.places[key.part])
        if agent is None:
            self.world.events.schedule(_WAIT_S, partial(self._run_if_alive, key.part, partial(self._abort_part, key)))
            return
        self.world.log(f"{self} skips {self.world.short_name(key)}")
        agent.abort_part(key)

    def _run_soon(self, within_s: float, part: int, work: partial[None]) -> None:
        self.world.events.schedule(self.world.random.random() * within_s, partial(self._run_if_alive, part, work))

    def _run_if_alive(self, part: int, work: partial[None]) -> None:
        if self.places[part] not in self._gone:
            work()

    def _write(self, key: ShardKey, tries: int) -> None:
        agent = self.world.agent_at(self.places[key.part])
        try:
            if agent is None:
                raise ArenaBusyError("the agent is not running")
            lease = agent.leasing.lease(key, SHARD_BYTES, len(self.places), wait_s=0.0, owner=TRAINER)
        except (FencedError, NoQuorumError) as error:
            self._stop_after(key, error)
        except PeerStoreError:
            if tries:
                self.world.events.schedule(
                    _WAIT_S, partial(self._run_if_alive, key.part, partial(self._write, key, tries - 1))
                )
            else:
                self._abort_part(key)
        else:
            self.world.truth.incarnation_admitted(self, agent.name)
            agent.machine.arena.bytes[lease.slot][:] = shard_content(key)
            self._run_soon(0.1, key.part, partial(self._seal, lease, _TRIES))

    def _seal(self, lease: Lease, tries: int) -> None:
        key = lease.key
        agent = self.world.agent_at(self.places[key.part])
        if agent is None:
            if tries:
                self.world.events.schedule(
                    _WAIT_S, partial(self._run_if_alive, key.part, partial(self._seal, lease, tries - 1))
                )
            else:
                self._abort_part(key)
            return
        try:
            agent.sealing.seal(lease.id, SHARD_BYTES, self.meta(key), (), lambda _: None)
        except FencedError as error:
            self._stop_after(key, error)
            return
        self.world.truth.write_admitted(self, agent.name)
        agent.sealed(key)
        if key in self._aborted_after_seal:
            self._run_soon(0.2, key.part, partial(self._abort_part, key))
        group = key.version_id
        self._sealed[group].add(key.part)
        if len(self._sealed[group]) == len(self.places):
            self._commit(group)

    def meta(self, _key: ShardKey) -> bytes:
        return b"%d" % (-1 if self.base is None else self.base)

    def _commit(self, group: VersionId) -> None:
        self.world.log(f"{self} completes step {group.version}")
        self.committed.append(group)
        self.world.truth.committed(group)

    def _stop_after(self, key: ShardKey, error: PeerStoreError) -> None:
        if self.running:
            self.world.log(f"{self} stops at {self.world.short_name(key)}: {type(error).__name__}: {str(error)[:150]}")
        self.running, self.refused = False, type(error).__name__
