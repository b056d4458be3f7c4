"""Exchange of the agents' addresses between a job's nodes, through the ranks' store."""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from peerstore.errors import PeerStoreError
from peerstore.membership.topology import MemberList, PeerNode, member_list
from peerstore.message_codec import from_json
from peerstore.settings import JobPeersConfig
from peerstore.transport.authentication import generate_secret, read_secret
from tieredckpt.agent.agent_api import KnownPeers
from tieredckpt.agent.peer_config import (
    DISCOVERY_OFF,
    DISCOVERY_WORLD,
    configured_peer_plan,
    is_unreplicated,
    peer_secret,
    replication_settings,
)
from tieredckpt.errors import SettingsError, TierUnavailableError
from tieredckpt.session.session import Session
from tieredckpt.settings import PeerSettings, is_local_rank_zero, local_world_size

log = logging.getLogger(__name__)

_WITHIN_S = 120.0
_LOOK_AGAIN_S = 0.5
_FILE_PREFIX = "peer-secret."
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/mnt")


class _PeerPlanOffer(msgspec.Struct, frozen=True):
    """What the first rank tells all others."""

    member_list: MemberList | None
    secret: bytes
    """Where none is configured. Every process that reaches the store can read it; empty with ``secret_file``."""
    problem: str = ""
    unreachable: str = ""
    """Which ranks cannot reach their node's agent, and why."""
    one_agent: bool = False
    """There is only one node, whatever the launcher says."""
    nonce: bytes = b""
    secret_file: str = ""
    """The file with the secret, which only this user can read, where all nodes are on one machine."""
    proof: bytes = b""
    """Where one is configured: of ``nonce`` and the nodes, and only who has the same secret can have made it."""


class _NodeHello(msgspec.Struct, frozen=True):
    """What the first rank of a node tells the first rank of all."""

    node: PeerNode | None
    version: int | None
    """Of the list of nodes it knows from an earlier world of the job; ``None``: it was in none."""
    problem: str = ""
    """Why it does not know its node."""
    machine: str = ""
    """The machine, as :func:`_machine` names it."""


class _Reporter(msgspec.Struct, frozen=True):
    """The first rank's choice of the rank that reports what its node knows of earlier worlds."""

    rank: int
    one_machine: bool = False
    """Whether all nodes are on one machine, so that secrets go through files."""


class _Report(msgspec.Struct, frozen=True):
    """What the reporter's node knows of earlier worlds."""

    known: KnownPeers
    secret_file: str = ""


_standby_nodes: Callable[[], tuple[PeerNode, ...]] = tuple


@contextlib.contextmanager
def use_standby_nodes(nodes: Callable[[], tuple[PeerNode, ...]]) -> Iterator[None]:
    """Use in this block ``nodes``, which returns the nodes outside the world that accept replicas."""
    global _standby_nodes  # noqa: PLW0603 - a process is in one world
    before, _standby_nodes = _standby_nodes, nodes
    try:
        yield
    finally:
        _standby_nodes = before


def join_peer_agents(session: Session, *, restoring: bool = False) -> bool:
    """Send this node's agent the list of the job's other agents; return whether there are replicas.

    Nodes of earlier worlds whose agents still run stay in the list. For a restore they are full members: if several
    nodes leave at once, a shard and all its replicas may be on them. The next save makes them standby nodes, like the
    nodes of :func:`use_standby_nodes`. Standby nodes get replicas only if there are too few nodes with ranks, and no
    quorum includes them.
    """
    peer = session.settings.peer
    if peer.discovery == DISCOVERY_OFF:
        return False
    session.standby_nodes = _standby_nodes()
    try:
        plan = (
            _plan_of_world(session, peer, restoring)
            if peer.discovery == DISCOVERY_WORLD
            else configured_peer_plan(peer)
        )
        if plan is not None:
            session.join_peers(plan)
            first = peer.discovery == DISCOVERY_WORLD and is_local_rank_zero()
            session.refresh_peer_plan = partial(_renewed, session) if first else None
        return plan is not None and not is_unreplicated(peer)
    except PeerStoreError as error:
        raise TierUnavailableError(f"{session.job}: its nodes cannot keep copies for each other: {error}") from error


def join_standby_nodes(session: Session) -> bool:
    """Add nodes that accept replicas since this world began; return whether there are such nodes.

    Rank 0 adds them for all. Nodes that have left need no change: they get no replicas once their agents are dead.
    """
    nodes = _standby_nodes()
    if nodes == session.standby_nodes:
        return False
    before, session.standby_nodes = session.standby_nodes, nodes
    peer = session.settings.peer
    if peer.discovery != DISCOVERY_WORLD or not _outside(session) or not dist.is_initialized():
        return False
    if dist.get_rank() == 0:
        try:
            _add_standby_nodes(session, peer)
        except (PeerStoreError, TierUnavailableError) as error:  # the next save tries again
            session.standby_nodes = before
            log.warning("%s: nodes outside the world get no replicas yet: %s", session.job, error)
    return True


def _add_standby_nodes(session: Session, peer: PeerSettings) -> None:
    plan, known, me = session.peer_plan, session.agent.known_peers(session.job), session.agent.this_node()
    members = plan.member_list if plan is not None else None
    if me is None or (members is not None and set(_outside(session)) <= set(members.nodes)):
        return
    voters = [me] if members is None else [node for node in members.nodes if node.id not in members.standby]
    secret = plan.secret if plan is not None else peer_secret(peer)
    nodes = _with_standby({node.id: node for node in voters}, known, _outside(session))
    session.join_peers(JobPeersConfig(secret, replication_settings(peer), member_list=nodes))


def _outside(session: Session) -> tuple[PeerNode, ...]:
    """Return the nodes outside the world that know the job's secret, if the ranks did not generate it."""
    peer = session.settings.peer
    return session.standby_nodes if peer.secret and not is_unreplicated(peer) else ()


def _plan_of_world(session: Session, peer: PeerSettings, restoring: bool) -> JobPeersConfig | None:
    """The nodes of all ranks, told through the store that the ranks met at; ``None`` on a single node."""
    local = local_world_size()
    if not dist.is_initialized() or local == 0:
        return None
    if local == dist.get_world_size():
        return _plan_of_last(session, peer, restoring)
    store = dist.distributed_c10d._get_default_store()
    prefix = f"tieredckpt/{session.job}/nodes/{'restoring' if restoring else 'saving'}"
    rank = dist.get_rank()
    prefix = f"{prefix}/{store.add(f'{prefix}/tries/{rank}', 1)}"  # not what an earlier attempt has said
    within = timedelta(seconds=_WITHIN_S + peer.unreachable_timeout_s)
    known, guest, error = None, None, None
    try:
        me = session.agent.this_node() if is_local_rank_zero() else None
        if me is not None:
            store.set(f"{prefix}/here/{me.id}", "1")
        known = _acquaintance(session, restoring, partial(_is_here, store, prefix)) if is_local_rank_zero() else None
        version = known.version if known is not None else None
        guest = None if me is None else _NodeHello(me, version, machine=_machine())
    except PeerStoreError as problem:  # the others wait for what this rank says
        error, guest = problem, _NodeHello(None, None, f"rank {rank}: {problem}")
    store.set(f"{prefix}/{rank}", _text(guest))
    if rank == 0:
        guests = _guests(store, prefix, within)
        lost = "; ".join(guest.problem for guest in guests.values() if guest.problem)
        reporter = _Reporter(-1 if lost else _teller(guests), _is_one_machine(guests.values()))
        store.set(f"{prefix}/teller", _text(reporter))
        if lost:
            store.set(f"{prefix}/all", _text(_PeerPlanOffer(None, b"", unreachable=lost)))
    if error is not None:
        raise error
    if known is not None and (chosen := from_json(_told(store, f"{prefix}/teller", within), _Reporter)).rank == rank:
        store.set(f"{prefix}/known", _text(_report(session, known, peer, one_machine=chosen.one_machine)))
    if rank == 0 and not lost:
        newest = None
        if reporter.rank >= 0:
            newest = _reported(from_json(_told(store, f"{prefix}/known", within), _Report))
        offer = _invite(
            list(guests.values()), newest, peer, session.job, restoring=restoring, outside=_outside(session)
        )
        if offer.secret and reporter.one_machine and (path := _write_secret(session, offer.secret)):
            offer = msgspec.structs.replace(offer, secret=b"", secret_file=path)
        store.set(f"{prefix}/all", _text(offer))
    invitation = from_json(_told(store, f"{prefix}/all", within), _PeerPlanOffer)
    if invitation.secret_file and not peer.secret:
        invitation = msgspec.structs.replace(invitation, secret=read_secret(Path(invitation.secret_file)))
    if not peer.secret:
        _forget(store, prefix, invitation.secret_file)
    if invitation.unreachable:
        raise TierUnavailableError(invitation.unreachable)
    if invitation.problem:
        raise SettingsError(invitation.problem)
    session.has_single_agent = invitation.one_agent
    if invitation.member_list is None:
        return None
    return JobPeersConfig(
        _agreed(invitation, peer, session.job), replication_settings(peer), member_list=invitation.member_list
    )


def _agreed(invitation: _PeerPlanOffer, peer: PeerSettings, job: str) -> bytes:
    """The secret, as it is configured here or as it was told."""
    mine = peer_secret(peer) if peer.secret else b""
    if not mine and invitation.proof:
        raise SettingsError(
            "peer.secret: the first rank's node has one, and this node has none: configure the same on all nodes"
        )
    if not mine:
        if dist.get_rank() == 0 and not invitation.secret_file:
            _warn_of_open_secret(job)
        return invitation.secret
    if not hmac.compare_digest(invitation.proof, _proof(mine, job, invitation)):
        raise SettingsError(
            "peer.secret: this node's is not the first rank's, or somebody else has changed the list of nodes on its "
            "way: configure the same secret on all nodes"
        )
    return mine


def _machine() -> str:
    """Name this machine, mount namespace and user: processes with the same name can share private files."""
    try:
        return f"{_BOOT.read_text().strip()}/{_NAMESPACE.stat().st_ino}/{os.getuid()}"
    except OSError:
        return ""


def _is_one_machine(guests: Iterable[_NodeHello]) -> bool:
    """Return whether all nodes are agents of one machine, as with two ``torchrun`` on it."""
    machines = {guest.machine for guest in guests}
    return len(machines) == 1 and "" not in machines


def _write_secret(session: Session, secret: bytes) -> str:
    """Write the secret for the other ranks of this machine; return the file, or "" if it cannot be written."""
    path = session.settings.agent_directory / f"{_FILE_PREFIX}{os.getpid()}"
    try:
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(secret)
    except OSError as error:
        log.warning("%s: the nodes' secret cannot be written to %s: %s", session.job, path, error)
        return ""
    return str(path)


def _delete_secret(path: str) -> None:
    """Delete a file of :func:`_write_secret`; any process may have written another name to the store."""
    if Path(path).name.startswith(_FILE_PREFIX):
        with contextlib.suppress(OSError):
            Path(path).unlink()


def _report(session: Session, known: KnownPeers, peer: PeerSettings, *, one_machine: bool) -> _Report:
    """Report what this node knows of earlier worlds, without the secret if it is configured or goes in a file."""
    path = _write_secret(session, known.secret) if one_machine and known.secret and not peer.secret else ""
    return _Report(msgspec.structs.replace(known, secret=b"") if peer.secret or path else known, path)


def _reported(report: _Report) -> KnownPeers:
    if not report.secret_file:
        return report.known
    secret = read_secret(Path(report.secret_file))
    _delete_secret(report.secret_file)
    return msgspec.structs.replace(report.known, secret=secret)


@functools.cache  # once is enough: ranks meet in every world
def _warn_of_open_secret(job: str) -> None:
    log.warning(
        "%s: peer.secret is not set, so its nodes share one through torch.distributed's store, which does not "
        "authenticate: whoever reaches that store while they meet can read and replace the copies that they keep for "
        "each other. On a shared network set peer.secret=file:/path (TIEREDCKPT_PEER_SECRET) on all nodes",
        job,
    )


def _proof(secret: bytes, job: str, invitation: _PeerPlanOffer) -> bytes:
    """That who made this list of nodes knows the secret; of another purpose than what the agents prove."""
    said = (b"tieredckpt invitation 1", job.encode(), invitation.nonce, _text(invitation.member_list).encode())
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "big") + part for part in said), "sha256")


def _forget(store: torch.distributed.Store, prefix: str, secret_file: str) -> None:
    """Delete the secret from the store, and its file, if this rank is the last one that has read it."""
    if store.add(f"{prefix}/read", 1) % dist.get_world_size() == 0:
        for key in ("all", "known"):
            with contextlib.suppress(RuntimeError, NotImplementedError):
                store.delete_key(f"{prefix}/{key}")
        if secret_file:
            _delete_secret(secret_file)


def _plan_of_last(session: Session, peer: PeerSettings, restoring: bool) -> JobPeersConfig | None:
    """Return a single node's plan if it knows other nodes; ``None`` otherwise, and during a restore.

    The first save makes them standby nodes. Then this node alone is the quorum, even if all others are dead.
    """
    known = _acquaintance(session, restoring)
    if restoring:
        return None
    members = _list_of_first_rank(session, known)
    if members is None:
        return None
    secret = known.secret if known is not None else peer_secret(peer)
    return JobPeersConfig(secret, replication_settings(peer), member_list=members)


def _list_of_first_rank(session: Session, known: KnownPeers | None) -> MemberList | None:
    """Return the node's list from its first rank; other ranks may see other nodes outside the world."""
    store = dist.distributed_c10d._get_default_store()
    prefix, rank = f"tieredckpt/{session.job}/nodes/single", dist.get_rank()
    prefix = f"{prefix}/{store.add(f'{prefix}/tries/{rank}', 1)}"
    if rank:
        return from_json(_told(store, f"{prefix}/list", timedelta(seconds=_WITHIN_S)), MemberList | None)
    members = None
    try:
        me = session.agent.this_node() if known is not None or _outside(session) else None
        members = None if me is None else _with_standby({me.id: me}, known, _outside(session))
    finally:
        store.set(f"{prefix}/list", _text(members))
    return members


def _with_standby(nodes: Mapping[str, PeerNode], known: KnownPeers | None, outside: Iterable[PeerNode]) -> MemberList:
    """Return the nodes with ranks, and as standby nodes those outside the world or of earlier worlds."""
    earlier = known.nodes if known is not None else ()
    standby = {node.id: node for node in (*earlier, *outside) if node.id not in nodes}
    return member_list(time.time_ns(), [*nodes.values(), *standby.values()], standby)


def _acquaintance(
    session: Session, restoring: bool, is_here: Callable[[str], bool] = lambda _node: False
) -> KnownPeers | None:
    """Return what this node knows of the job, after a wait for nodes that continued it without this one.

    If they do not answer in time, the job resumes here from an older step. ``is_here`` says of a node that it has a
    rank of this world: the two nodes meet here, and not before.
    """
    known = session.agent.known_peers(session.job)
    if not restoring or known is None:
        return known
    timeout_s = session.settings.peer.unreachable_timeout_s
    deadline = time.monotonic() + timeout_s
    waited_for = ""
    while known is not None and (silent := ", ".join(node for node in known.unreachable if not is_here(node))):
        if time.monotonic() >= deadline:
            log.error(
                "%s: the restore continues without %s, which did not answer within %g s (peer.unreachable_timeout_s). "
                "Steps that only it has become a branch that is left behind",
                *(session.job, silent, timeout_s),
            )
            return known
        if silent != waited_for:
            log.warning(
                "%s: the job continued without this node, on %s, which does not answer. Waiting up to %g s for it "
                "(peer.unreachable_timeout_s)",
                *(session.job, silent, timeout_s),
            )
            waited_for = silent
        time.sleep(_LOOK_AGAIN_S)
        known = session.agent.known_peers(session.job)
    return known


def _is_here(store: torch.distributed.Store, prefix: str, node: str) -> bool:
    return store.check([f"{prefix}/here/{node}"])


def _renewed(session: Session, plan: JobPeersConfig) -> JobPeersConfig:
    """This node's agent has begun again: say where it listens now, and hear where those of the other nodes do."""
    me = session.agent.this_node()
    if plan.member_list is None or me is None or not dist.is_initialized():
        return plan
    store, prefix = dist.distributed_c10d._get_default_store(), f"tieredckpt/{session.job}/nodes/at"
    try:
        store.set(f"{prefix}/{me.id}", _text(me))
        nodes = [
            from_json(store.get(f"{prefix}/{node.id}"), PeerNode) if store.check([f"{prefix}/{node.id}"]) else node
            for node in plan.member_list.nodes
        ]
    except RuntimeError as error:  # the next world says it anyway
        log.warning("%s: where this node's agent listens now was not told: %s", session.job, error)
        return plan
    if tuple(sorted(nodes)) == plan.member_list.nodes:
        return plan
    return msgspec.structs.replace(plan, member_list=member_list(time.time_ns(), nodes, plan.member_list.standby))


def _guests(store: torch.distributed.Store, prefix: str, within: timedelta) -> dict[int, _NodeHello]:
    """The nodes, by their first rank."""
    found = {
        rank: from_json(_told(store, f"{prefix}/{rank}", within), _NodeHello | None)
        for rank in range(dist.get_world_size())
    }
    return {rank: guest for rank, guest in found.items() if guest is not None}


def _teller(guests: Mapping[int, _NodeHello]) -> int:
    """Whose knowledge of earlier worlds counts: of the one with the newest list of nodes; -1: nobody has any."""
    knowing = {rank: guest.version for rank, guest in guests.items() if guest.version is not None}
    return max(knowing, key=lambda rank: (knowing[rank], -rank), default=-1)


def _told(store: torch.distributed.Store, key: str, within: timedelta) -> bytes:
    store.wait([key], within)
    return store.get(key)


def _text(message: object) -> str:
    return msgspec.json.encode(message).decode()


def _invite(
    guests: Sequence[_NodeHello],
    known: KnownPeers | None,
    peer: PeerSettings,
    job: str,
    *,
    restoring: bool,
    outside: Sequence[PeerNode],
) -> _PeerPlanOffer:
    """What the first rank makes of everybody's node."""
    nodes: dict[str, PeerNode] = {}
    for node in (guest.node for guest in guests if guest.node is not None):
        if node.id in nodes and nodes[node.id] != node:
            both = f"{nodes[node.id].address} and {node.address}"
            return _PeerPlanOffer(
                None, b"", f"agent.node: {both} are both called {node.id}: give each node its own name"
            )
        nodes[node.id] = node
    if restoring and known is not None:
        nodes = {**{node.id: node for node in known.nodes}, **nodes}
    if len(nodes) < 2 and (restoring or (known is None and not outside)):
        return _PeerPlanOffer(None, b"", one_agent=bool(nodes))
    members = _with_standby(nodes, known, outside)
    if not peer.secret:
        return _PeerPlanOffer(members, known.secret if known is not None and known.secret else generate_secret())
    try:
        secret = peer_secret(peer)
    except SettingsError as error:
        return _PeerPlanOffer(None, b"", str(error))
    told = _PeerPlanOffer(members, b"", nonce=secrets.token_bytes(16))
    return msgspec.structs.replace(told, proof=_proof(secret, job, told))
