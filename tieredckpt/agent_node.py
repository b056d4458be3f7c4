"""The node as a trainer reaches it: through the agent's socket, starting the agent where none answers."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from peerstore import frames
from peerstore.agent_watch import Caretakers
from peerstore.client import Client, Connector, connect
from peerstore.cluster.nodes import Node as PeerNode
from peerstore.errors import AgentUnreachableError, PeerStoreError
from peerstore.launch import connect_or_launch, refuse_hung, replace_hung
from peerstore.peers.plan import TeamPlan
from peerstore.records import Group, ShardKey
from peerstore.settings import AgentPlace
from tieredckpt.agent.memory_service.options import command_line
from tieredckpt.agent.messages import (
    MAX_WAIT_S,
    AskDurability,
    AskLayouts,
    AskNames,
    AskParts,
    AskPieces,
    AskSummary,
    AskSurvey,
    Configure,
    DropSteps,
    Join,
    Lift,
    Loading,
    LoadOver,
    Nothing,
    Observe,
    OfJob,
    Quarantine,
    Restored,
    WaitDurable,
)
from tieredckpt.errors import wire_errors
from tieredckpt.manifest import unpack
from tieredckpt.node import (
    Acquaintance,
    ClusterView,
    Described,
    DrainView,
    Durability,
    FoundLayouts,
    FoundParts,
    FoundPieces,
    Need,
    Page,
    Passport,
    Protected,
    StateNames,
    Summary,
    Survey,
    described,
)
from tieredckpt.quiet import collector_paused
from tieredckpt.settings import DurableSettings, Settings

_ADOPTION_S = 660.0
_RETRY_S = 20.0
_DROP_S = 300.0
_SLACK_S = 1.0
"""What an agent has for an answer that is not waited for."""
_WAIT_AGAIN_S = 300.0
_HINT_S = 5.0
caretakers = Caretakers()
"""Of the agents that this process uses."""


class AgentNode:
    """A :class:`~tieredckpt.node.Node` behind the agent's socket."""

    def __init__(self, settings: Settings, job: str) -> None:
        place = settings.agent_place
        self.place = place
        command, environ = agent_command(settings), _agent_environment()
        self._embedded = settings.agent.embedded
        self._seek: Connector = partial(connect, place.socket, named=place.named)
        self._connector: Connector = (
            partial(connect_or_launch, place, command, environ=environ) if self._embedded else self._seek
        )
        self._replace = partial(replace_hung if self._embedded else refuse_hung, place)
        self._looks_after = False
        self.store = _client(place, self._connector, job, self._replace)

    def look_after(self) -> None:
        """From here on the agent is started again when it dies, and replaced when it hangs, also while nobody calls it:
        by one process of the node, whichever has the lock.
        """
        if self._embedded and not self._looks_after:
            with contextlib.suppress(PeerStoreError, OSError):  # the next save tries again
                caretakers.begin(self.place, self._connector, self._replace)
                self._looks_after = True

    def look_away(self) -> None:
        if self._looks_after:
            self._looks_after = False
            caretakers.end(self.place)

    def configure(self, job: str, durable: DurableSettings) -> None:
        self.store.call("configure", Configure(job, durable), type(None))

    def survey(self, job: str, *, fresh: bool = False, patience_s: float = 0.0) -> Survey:
        ask = AskSurvey(job, fresh, patience_s)
        return self.store.call("survey", ask, Survey, timeout_s=patience_s + _ADOPTION_S)

    def describe(self, job: str, group: Group) -> Described:
        return described(self, job, group)

    def summary(self, job: str, group: Group) -> Summary:
        return self.store.call("step_summary", AskSummary(job, group), Summary, timeout_s=_ADOPTION_S)

    def layouts(self, job: str, group: Group, layouts: Sequence[str], tables: Sequence[str]) -> FoundLayouts:
        ask = AskLayouts(job, group, tuple(layouts), tuple(tables))
        return self.store.call("step_layouts", ask, FoundLayouts, timeout_s=_ADOPTION_S)

    def names(self, job: str, group: Group) -> StateNames:
        packed, digest = bytearray(), ""
        while True:
            ask = AskNames(job, group, digest, len(packed))
            page: Page = self.store.call("step_names", ask, Page, timeout_s=_ADOPTION_S)
            if page.digest != digest:
                digest = page.digest
                packed.clear()
            packed += page.data
            if len(packed) >= page.size_bytes or not page.data:
                with collector_paused():  # millions of names, and none of them in a circle
                    return frames.decode(unpack(bytes(packed)), StateNames)

    def pieces(self, job: str, group: Group, rank: int, needs: Sequence[Need], objects: Sequence[str]) -> FoundPieces:
        ask = AskPieces(job, group, rank, tuple(needs), tuple(objects))
        return self.store.call("step_pieces", ask, FoundPieces, timeout_s=_ADOPTION_S)

    def parts(self, job: str, group: Group, parts: Sequence[int], *, item_sizes: bool = False) -> FoundParts:
        ask = AskParts(job, group, tuple(parts), item_sizes)
        return self.store.call("step_parts", ask, FoundParts, timeout_s=_ADOPTION_S)

    def quarantine(self, job: str, group: Group, reason: str) -> None:
        self.store.call("quarantine", Quarantine(job, group, reason), type(None))

    def lift(self, job: str, group: Group) -> None:
        self.store.call("lift", Lift(job, group), type(None))

    def drop(self, job: str, groups: Sequence[Group]) -> None:
        self.store.call("drop_steps", DropSteps(job, tuple(groups)), type(None), timeout_s=_DROP_S)

    def loading(self, job: str, group: Group, rank: int) -> None:
        self.store.call("loading", Loading(job, group, rank), type(None))

    def restored(self, job: str, group: Group, *, goes_on: bool) -> None:
        self.store.call("restored", Restored(job, group, goes_on=goes_on), type(None))

    def load_over(self, job: str, *, stepped: bool) -> None:
        if stepped:
            self.store.call("load_over", LoadOver(job, stepped), type(None), timeout_s=_HINT_S)
        else:  # a process that ends has no agent started for its goodbye
            self.store.tell("load_over", LoadOver(job, stepped), timeout_s=_HINT_S)

    def drains(self, job: str) -> tuple[DrainView, ...]:
        return self.store.call("drains", OfJob(job), tuple[DrainView, ...], timeout_s=_ADOPTION_S)

    def wait_durable(self, job: str, group: Group | None, timeout_s: float) -> DrainView | None:
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            ask = WaitDurable(job, group, min(left, MAX_WAIT_S))
            view = self.store.call("wait_durable", ask, DrainView | None, within_s=max(_SLACK_S, ask.timeout_s))
            if view is None or view.state not in ("waiting", "running") or left <= MAX_WAIT_S:
                return view

    def join(self, job: str, plan: TeamPlan) -> None:
        self.store.call("join", Join(job, plan), type(None))

    def me(self) -> PeerNode | None:
        return self.store.call("me", Nothing(), PeerNode | None)

    def acquaintance(self, job: str) -> Acquaintance | None:
        return self.store.call("acquaintance", OfJob(job), Acquaintance | None)

    def passport(self, job: str) -> Passport | None:
        return self.store.call("passport", OfJob(job), Passport | None)

    def cluster(self, job: str) -> ClusterView:
        return self.store.call("cluster", OfJob(job), ClusterView, timeout_s=_ADOPTION_S)

    def durability(self, key: ShardKey, *, copies: int = 0, domains: int = 0, timeout_s: float = 0.0) -> Durability:
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            ask = AskDurability(key, copies, domains, min(left, MAX_WAIT_S))
            within_s = max(_SLACK_S, ask.timeout_s)
            found: Durability = self.store.call("durability", ask, Durability, within_s=within_s)
            if left <= MAX_WAIT_S or (found.copies >= copies and found.domains >= domains):
                return found

    def observe(self, job: str, values: Mapping[str, float]) -> Protected | None:
        told = Observe(job, dict(values))
        found: Protected | None = self.store.tell(
            "observe", told, timeout_s=_HINT_S, seek=self._seek, answer=Protected | None
        )
        return found

    def close(self) -> None:
        self.look_away()
        self.store.close()


_unreachable: dict[Path, float] = {}
"""Sockets that nobody answered on when this process waited for it, and when that was."""


def _client(place: AgentPlace, connector: Connector, job: str, replace: Callable[[], bool]) -> Client:
    """A client, waited for once: a training loop that tries again with every save must not wait every time."""
    waited = time.monotonic() - _unreachable.get(place.socket, -math.inf) < _WAIT_AGAIN_S
    try:
        client = Client(connector, job=job, errors=wire_errors(), retry_s=0.0 if waited else _RETRY_S, replace=replace)
    except AgentUnreachableError:
        _unreachable[place.socket] = time.monotonic()
        raise
    _unreachable.pop(place.socket, None)
    return client


def agent_command(settings: Settings, *, detach: bool = True, linger: bool = True) -> list[str]:
    """How an agent with these settings is started."""
    agent = settings.agent
    command = [sys.executable, "-m", "tieredckpt.agent", "--dir", str(settings.agent_directory)]
    command += ["--cluster-config", ""]  # what the cluster says is in these settings already
    command += ["--budget", agent.budget, "--slots-per-part", str(agent.slots_per_rank)]
    command += ["--burst-slots", str(agent.burst_slots), "--job-ttl-s", str(agent.job_ttl_s), "--http", agent.http]
    command += ["--node", agent.node, "--peers", agent.peers, "--labels", agent.labels]
    command += ["--interface", agent.interface, "--tls", agent.tls, "--transport", agent.transport]
    command += command_line(agent.served)
    if linger:
        command += ["--linger-s", str(agent.linger_s)]
    return command + (["--detach"] if detach else [])


def _agent_environment() -> dict[str, str]:
    """The agent runs from ``/``, so it must find this package where this process found it."""
    root = str(Path(__file__).resolve().parent.parent)
    known = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{known}" if known else root}
