"""Everything this node has to do with others: where it listens, which jobs' nodes it knows, what it does for them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from peerstore import deadlines
from peerstore.cluster.discovery import Discovery, parse_discovery
from peerstore.cluster.members import MembershipSettings
from peerstore.cluster.nodes import Node, NodeId, node_id
from peerstore.cluster.roster import Roster
from peerstore.decode import from_msgpack
from peerstore.errors import ArenaFullError, PeerStoreError, ShardNotFoundError, UnavailableError
from peerstore.listening import SealListener
from peerstore.peers.calling import Pass
from peerstore.peers.desk import Desk
from peerstore.peers.plan import TEAM, SharedNames, TeamPlan
from peerstore.peers.team import Team
from peerstore.peers.tending import FAREWELL_S
from peerstore.records import Group, ShardFact, ShardKey, ShardRecord
from peerstore.store import NodeStore
from peerstore.transport.seam import Listener, Transport
from peerstore.transport.severable import Severable

log = logging.getLogger(__name__)

_JOIN_S = 5.0


@dataclass(frozen=True)
class Identity:
    """This node among others."""

    node: NodeId
    listen: str
    """``host:port`` to listen on for other nodes' agents; port 0 picks one."""
    labels: tuple[tuple[str, str], ...] = ()
    memory_bytes: int = 0
    port_file: Path | None = None
    """Where the port is noted that was picked, so that the next agent of this node is found where this one was."""
    membership: MembershipSettings = field(default_factory=MembershipSettings)


class GivenRoster:
    """A list of nodes that somebody has made already."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def roster(self) -> Roster:
        return self._roster


class Neighbourhood(SealListener):
    """The peer tier of one node agent, for all jobs."""

    def __init__(
        self,
        store: NodeStore,
        identity: Identity,
        transport: Transport,
        *,
        version: str = "",
        blobs_of: Callable[[ShardFact], tuple[str, ...]] = lambda _fact: (),
        shared: SharedNames = SharedNames(),  # noqa: B008 - it is never changed
    ) -> None:
        self._store = store
        self._identity = identity
        self._transport = Severable(transport)
        self._blobs_of = blobs_of
        self._lock = threading.RLock()
        self._teams: dict[str, Team] = {}
        self._plans: dict[str, TeamPlan] = {}
        self._listener: Listener | None = None
        self.desk = Desk(store, identity.node, team_of=self.team, version=version, shared=shared)

    def start(self) -> None:
        """Go on for the jobs that a killed agent took part in."""
        for job in self._store.jobs():
            try:
                plan = from_msgpack(self._store.get_blob(job, TEAM), TeamPlan)
                self.join(job, plan, wait_s=0.0)
            except ShardNotFoundError:  # a job that has only this node
                continue
            except (PeerStoreError, msgspec.DecodeError, OSError) as error:
                log.warning("job %s: its other nodes are not looked after: %s", job, error)
        self._store.subscribe(self)  # now that somebody can mend what is found damaged

    def close(self) -> None:
        with self._lock:
            teams, self._teams = list(self._teams.values()), {}
            listener, self._listener = self._listener, None
        with deadlines.within(FAREWELL_S):
            for team in teams:
                team.protecting.close()  # nothing new goes out
        if listener is not None:
            listener.close()
        for team in teams:
            team.close()
        self.desk.close()
        self._transport.close()

    def cut_off(self, seconds: float) -> None:
        """Have this node reach no other, and no other this one, for so long: a partition on purpose."""
        log.warning("cut off from all other nodes for %g s, on purpose", seconds)
        self._transport.cut(seconds)

    # -- who I am -----------------------------------------------------------------------------------------------------

    @property
    def me(self) -> Node:
        """This node, reachable: from the first call on it listens."""
        with self._lock:
            if self._listener is None:
                self._listener = self._listen()
                log.info("node %s listens for others on %s", self._identity.node, self._listener.address)
            identity = self._identity
            return Node(node_id(identity.node), self._listener.address, identity.labels, identity.memory_bytes)

    def _listen(self) -> Listener:
        """Where the others know the agent before this one to be, if that can be had."""
        wanted, noted = self._identity.listen, self._identity.port_file
        host, _, port = wanted.rpartition(":")
        if noted is None or port != "0":
            return self._transport.listen(wanted, self.desk.serve)
        with contextlib.suppress(OSError, ValueError):
            before = int(noted.read_text())
            try:
                return self._transport.listen(f"{host}:{before}", self.desk.serve)
            except (PeerStoreError, OSError) as error:
                log.warning("port %d, where others know this node, cannot be had (%s): another one", before, error)
        listener = self._transport.listen(wanted, self.desk.serve)
        try:
            noted.write_text(listener.address.rpartition(":")[2])
        except OSError as error:
            log.warning("the port is not noted, and a restarted agent takes another one: %s", error)
        return listener

    @property
    def name(self) -> NodeId:
        return self._identity.node

    @property
    def listening(self) -> str:
        """Where this node listens, or nothing."""
        with self._lock:
            return self._listener.address if self._listener is not None else ""

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def team(self, job: str) -> Team | None:
        with self._lock:
            return self._teams.get(job)

    @property
    def teams(self) -> list[Team]:
        with self._lock:
            return [self._teams[job] for job in sorted(self._teams)]

    def join(self, job: str, plan: TeamPlan, *, wait_s: float = _JOIN_S) -> Team:
        """Take part in ``job`` as ``plan`` says; a plan that is in force already changes nothing."""
        discovery: Discovery = GivenRoster(plan.roster) if plan.roster is not None else parse_discovery(plan.discovery)
        with self._lock:
            team, known = self._teams.get(job), self._plans.get(job)
            if team is not None and known == plan:
                return team
            replaced, fresh = None, False
            if team is not None and known is not None and known.like(plan):
                self._remember(job, plan)
                team.tending.follow(discovery)
            else:
                replaced = self._teams.pop(job, None)
                team = self._teams[job] = self._team(job, plan)
                self._remember(job, plan)
                fresh = True
        if replaced is not None:
            replaced.close()
        if fresh:
            team.start(discovery)
        team.tending.wait_quorum(wait_s)  # also of those that only a changed list of nodes names
        return team

    def _team(self, job: str, plan: TeamPlan) -> Team:
        me = self.me
        return Team(
            self._store,
            me,
            Pass(job, me.id, plan.secret),
            self._transport,
            plan.settings,
            membership=self._identity.membership,
            blobs_of=self._blobs_of,
        )

    def _remember(self, job: str, plan: TeamPlan) -> None:
        self._plans[job] = plan
        try:
            self._store.put_blob(job, TEAM, msgspec.msgpack.encode(plan))
        except (ArenaFullError, UnavailableError) as error:
            log.warning("job %s: a restarted agent will not know the job's other nodes: %s", job, error)

    def leave(self, job: str) -> None:
        with self._lock:
            team = self._teams.pop(job, None)
            self._plans.pop(job, None)
        if team is not None:
            team.close()
            if job in self._store.jobs():
                self._store.remove_blob(job, TEAM)
                self._store.copies.guard(job, guarded=False)

    # -- what happens to shards ---------------------------------------------------------------------------------------

    def sealed(self, record: ShardRecord) -> None:
        team = self.team(record.key.job)
        if team is not None:
            team.protecting.wake()

    def copied(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        self.sealed(record)

    def dropped(self, job: str) -> None:
        self.leave(job)

    def damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        team = self.team(key.job)
        if team is not None:
            team.damaged(record)

    def parity(self, record: ShardRecord) -> None:
        self.sealed(record)

    def decided(self, job: str, group: Group, *, torn: bool) -> None:
        team = self.team(job)
        if team is not None:
            team.protecting.wake()
