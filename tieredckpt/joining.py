"""How a job's nodes come to know each other: from configuration, or from the world its ranks are in already."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from peerstore.cluster.nodes import Node
from peerstore.cluster.roster import Roster, roster_of
from peerstore.errors import PeerStoreError
from peerstore.peers.plan import TeamPlan
from peerstore.transport.secret import new_secret
from tieredckpt.errors import SettingsError, TierUnavailableError
from tieredckpt.session import Session
from tieredckpt.settings import PeerSettings
from tieredckpt.teaming import WORLD, alone, configured_plan, secret_of, team_settings

_WITHIN = timedelta(seconds=120)


class _Invitation(msgspec.Struct, frozen=True):
    """What the first rank tells all others."""

    roster: Roster | None
    secret: bytes
    problem: str = ""


def join_others(session: Session) -> bool:
    """Have this node's agent keep copies on the job's other nodes, as the settings say; whether there are any."""
    peer = session.settings.peer
    if alone(peer):
        return False
    try:
        plan = _plan_of_world(session, peer) if peer.discovery == WORLD else configured_plan(peer)
        if plan is not None:
            session.join(plan)
        return plan is not None
    except PeerStoreError as error:
        raise TierUnavailableError(f"{session.job}: its nodes cannot keep copies for each other: {error}") from error


def _plan_of_world(session: Session, peer: PeerSettings) -> TeamPlan | None:
    """The nodes of all ranks, told through the store that the ranks met at; ``None`` on a single node."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # set by every launcher that starts several nodes
    if not dist.is_initialized() or local in (0, dist.get_world_size()):
        return None
    store = dist.distributed_c10d._get_default_store()
    prefix = f"tieredckpt/{session.job}/nodes"
    rank = dist.get_rank()
    me = session.node.me() if int(os.environ.get("LOCAL_RANK", "0")) == 0 else None
    store.set(f"{prefix}/{rank}", _text(me))
    if rank == 0:
        store.set(f"{prefix}/all", _text(_invite(store, prefix, peer)))
    store.wait([f"{prefix}/all"], _WITHIN)
    invitation = msgspec.json.decode(store.get(f"{prefix}/all"), type=_Invitation)
    if invitation.problem:
        raise SettingsError(invitation.problem)
    if invitation.roster is None:
        return None
    return TeamPlan(invitation.secret, team_settings(peer), roster=invitation.roster)


def _text(message: object) -> str:
    return msgspec.json.encode(message).decode()


def _invite(store: torch.distributed.Store, prefix: str, peer: PeerSettings) -> _Invitation:
    """What the first rank makes of everybody's node."""
    nodes: dict[str, Node] = {}
    for rank in range(dist.get_world_size()):
        store.wait([f"{prefix}/{rank}"], _WITHIN)
        node = msgspec.json.decode(store.get(f"{prefix}/{rank}"), type=Node | None)
        if node is None:
            continue
        if node.id in nodes and nodes[node.id] != node:
            both = f"{nodes[node.id].address} and {node.address}"
            return _Invitation(None, b"", f"agent.node: {both} are both called {node.id}: give each node its own name")
        nodes[node.id] = node
    if len(nodes) < 2:
        return _Invitation(None, b"")
    try:
        secret = secret_of(peer) if peer.secret else new_secret()
    except SettingsError as error:
        return _Invitation(None, b"", str(error))
    return _Invitation(roster_of(time.time_ns(), nodes.values()), secret)
