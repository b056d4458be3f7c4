"""Exchange of the agents' addresses between a job's nodes, through the ranks' store."""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import os
import secrets
import time
import weakref
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

_TIMEOUT_S = 120.0
"""Seconds that a rank waits for the messages of the other ranks."""
_POLL_S = 0.5
_FILE_PREFIX = "peer-secret."
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/mnt")


class _PeerPlanOffer(msgspec.Struct, frozen=True):
    """List of nodes that rank 0 sends to all ranks."""

    member_list: MemberList | None
    secret: bytes
    """Generated secret if none is configured, readable by the store's clients; empty with ``secret_file``."""
    problem: str = ""
    unreachable: str = ""
    """Ranks that cannot reach their node's agent, with the reasons."""
    one_agent: bool = False
    """Whether all ranks use one agent, even if the launcher reports several nodes."""
    nonce: bytes = b""
    secret_file: str = ""
    """File with the secret, readable only by this user, if all nodes are on one machine."""
    proof: bytes = b""
    """MAC of ``nonce`` and the nodes with the configured secret, if any."""


class _NodeHello(msgspec.Struct, frozen=True):
    """Message from the first rank of a node to rank 0."""

    node: PeerNode | None
    version: int | None
    """Version of the node's list of nodes from an earlier world; ``None`` without one."""
    problem: str = ""
    """Reason why the rank does not know its node, or an empty string."""
    machine: str = ""
    """The machine, as :func:`_machine` names it."""


class _Reporter(msgspec.Struct, frozen=True):
    """Rank 0's choice of the rank that reports its node's knowledge of earlier worlds."""

    rank: int
    one_machine: bool = False
    """Whether all nodes are on one machine, so that secrets go through files."""


class _Report(msgspec.Struct, frozen=True):
    """Knowledge of earlier worlds on the reporter's node."""

    known: KnownPeers
    secret_file: str = ""


_standby_nodes: Callable[[], tuple[PeerNode, ...]] = tuple
_joined: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[str, bool]]] = weakref.WeakKeyDictionary()
"""Jobs whose agents have joined, each for a restore (``True``) or a save, by the default group."""


@contextlib.contextmanager
def use_standby_nodes(nodes: Callable[[], tuple[PeerNode, ...]]) -> Iterator[None]:
    """Use in this block ``nodes``, which returns the nodes outside the world that accept replicas."""
    global _standby_nodes  # noqa: PLW0603 - a process is in one world
    before, _standby_nodes = _standby_nodes, nodes
    try:
        yield
    finally:
        _standby_nodes = before


def have_agents_joined(job: str, *, restoring: bool) -> bool:
    """Return whether the agents of all ranks have joined in this world. All ranks get the same."""
    world = dist.group.WORLD
    return world is not None and (job, restoring) in _joined.get(world, ())


def record_joined_agents(job: str, *, restoring: bool) -> None:
    """Record that the agents of all ranks have joined. All ranks call this after the last one has."""
    world = dist.group.WORLD
    if world is not None:
        _joined.setdefault(world, set()).add((job, restoring))


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
    session.registration.standby_nodes = _standby_nodes()
    try:
        plan = (
            _exchange_plan(session, peer, restoring)
            if peer.discovery == DISCOVERY_WORLD
            else configured_peer_plan(peer)
        )
        if plan is not None:
            session.registration.join_peers(plan)
            first = peer.discovery == DISCOVERY_WORLD and is_local_rank_zero()
            session.registration.refresh_peer_plan = partial(_refresh_plan, session) if first else None
        return plan is not None and not is_unreplicated(peer)
    except PeerStoreError as error:
        raise TierUnavailableError(f"{session.job}: its nodes cannot keep copies for each other: {error}") from error


def join_standby_nodes(session: Session) -> bool:
    """Add nodes that accept replicas since this world began; return whether there are such nodes.

    Rank 0 adds them for all. Nodes that have left need no change: they get no replicas once their agents are dead.
    """
    nodes = _standby_nodes()
    if nodes == session.registration.standby_nodes:
        return False
    before, session.registration.standby_nodes = session.registration.standby_nodes, nodes
    peer = session.settings.peer
    if peer.discovery != DISCOVERY_WORLD or not _outside(session) or not dist.is_initialized():
        return False
    if dist.get_rank() == 0:
        try:
            _add_standby_nodes(session, peer)
        except (PeerStoreError, TierUnavailableError) as error:  # the next save tries again
            session.registration.standby_nodes = before
            log.warning("%s: nodes outside the world get no replicas yet: %s", session.job, error)
    return True


def _add_standby_nodes(session: Session, peer: PeerSettings) -> None:
    plan, known, me = session.registration.peer_plan, session.agent.known_peers(session.job), session.agent.this_node()
    members = plan.member_list if plan is not None else None
    if me is None or (members is not None and set(_outside(session)) <= set(members.nodes)):
        return
    voters = [me] if members is None else [node for node in members.nodes if node.id not in members.standby]
    secret = plan.secret if plan is not None else peer_secret(peer)
    nodes = _with_standby({node.id: node for node in voters}, known, _outside(session))
    session.registration.join_peers(JobPeersConfig(secret, replication_settings(peer), member_list=nodes))


def _outside(session: Session) -> tuple[PeerNode, ...]:
    """Return the nodes outside the world that know the job's secret, if the ranks did not generate it."""
    peer = session.settings.peer
    return session.registration.standby_nodes if peer.secret and not is_unreplicated(peer) else ()


def _exchange_plan(session: Session, peer: PeerSettings, restoring: bool) -> JobPeersConfig | None:
    """Exchange the nodes of all ranks through their store; return their plan, or ``None`` for one node."""
    local = local_world_size()
    if not dist.is_initialized() or local == 0:
        return None
    if local == dist.get_world_size():
        return _plan_of_single_node(session, peer, restoring)
    store = dist.distributed_c10d._get_default_store()
    prefix = f"tieredckpt/{session.job}/nodes/{'restoring' if restoring else 'saving'}"
    rank = dist.get_rank()
    prefix = f"{prefix}/{store.add(f'{prefix}/tries/{rank}', 1)}"  # do not read messages of an earlier attempt
    timeout = timedelta(seconds=_TIMEOUT_S + peer.unreachable_timeout_s)
    known, hello, error = None, None, None
    try:
        me = session.agent.this_node() if is_local_rank_zero() else None
        if me is not None:
            store.set(f"{prefix}/here/{me.id}", "1")
        known = (
            _wait_for_known_peers(session, restoring, partial(_is_here, store, prefix))
            if is_local_rank_zero()
            else None
        )
        version = known.version if known is not None else None
        hello = None if me is None else _NodeHello(me, version, machine=_machine())
    except PeerStoreError as problem:  # the other ranks wait for a message from this rank
        error, hello = problem, _NodeHello(None, None, f"rank {rank}: {problem}")
    store.set(f"{prefix}/{rank}", _text(hello))
    if rank == 0:
        hellos = _receive_hellos(store, prefix, timeout)
        problems = "; ".join(hello.problem for hello in hellos.values() if hello.problem)
        reporter = _Reporter(-1 if problems else _choose_reporter(hellos), _is_one_machine(hellos.values()))
        store.set(f"{prefix}/teller", _text(reporter))
        if problems:
            store.set(f"{prefix}/all", _text(_PeerPlanOffer(None, b"", unreachable=problems)))
    if error is not None:
        raise error
    if (
        known is not None
        and (chosen := from_json(_receive(store, f"{prefix}/teller", timeout), _Reporter)).rank == rank
    ):
        store.set(f"{prefix}/known", _text(_report(session, known, peer, one_machine=chosen.one_machine)))
    if rank == 0 and not problems:
        newest = None
        if reporter.rank >= 0:
            newest = _read_report(from_json(_receive(store, f"{prefix}/known", timeout), _Report))
        offer = _make_offer(
            list(hellos.values()), newest, peer, session.job, restoring=restoring, outside=_outside(session)
        )
        if offer.secret and reporter.one_machine and (path := _write_secret(session, offer.secret)):
            offer = msgspec.structs.replace(offer, secret=b"", secret_file=path)
        store.set(f"{prefix}/all", _text(offer))
    offer = from_json(_receive(store, f"{prefix}/all", timeout), _PeerPlanOffer)
    if offer.secret_file and not peer.secret:
        offer = msgspec.structs.replace(offer, secret=read_secret(Path(offer.secret_file)))
    if not peer.secret:
        _delete_read_secret(store, prefix, offer.secret_file)
    if offer.unreachable:
        raise TierUnavailableError(offer.unreachable)
    if offer.problem:
        raise SettingsError(offer.problem)
    session.registration.has_single_agent = offer.one_agent
    if offer.member_list is None:
        return None
    return JobPeersConfig(
        _agreed_secret(offer, peer, session.job), replication_settings(peer), member_list=offer.member_list
    )


def _agreed_secret(offer: _PeerPlanOffer, peer: PeerSettings, job: str) -> bytes:
    """Return the secret: the configured one if its MAC matches the offer, otherwise the offered one."""
    mine = peer_secret(peer) if peer.secret else b""
    if not mine and offer.proof:
        raise SettingsError(
            "peer.secret: the first rank's node has one, and this node has none: configure the same on all nodes"
        )
    if not mine:
        if dist.get_rank() == 0 and not offer.secret_file:
            _warn_of_open_secret(job)
        return offer.secret
    if not hmac.compare_digest(offer.proof, _proof(mine, job, offer)):
        raise SettingsError(
            "peer.secret: this node's secret differs from rank 0's, or the list of nodes was changed in transit. "
            "Configure the same secret on all nodes"
        )
    return mine


def _machine() -> str:
    """Name this machine, mount namespace and user: processes with the same name can share private files."""
    try:
        return f"{_BOOT.read_text().strip()}/{_NAMESPACE.stat().st_ino}/{os.getuid()}"
    except OSError:
        return ""


def _is_one_machine(hellos: Iterable[_NodeHello]) -> bool:
    """Return whether all nodes are agents of one machine, as with two ``torchrun`` on it."""
    machines = {hello.machine for hello in hellos}
    return len(machines) == 1 and "" not in machines


def _write_secret(session: Session, secret: bytes) -> str:
    """Write the secret for the other ranks of this machine; return the file, or "" on an error."""
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
    """Return this node's knowledge of earlier worlds, without a secret that is configured or in a file."""
    path = _write_secret(session, known.secret) if one_machine and known.secret and not peer.secret else ""
    return _Report(msgspec.structs.replace(known, secret=b"") if peer.secret or path else known, path)


def _read_report(report: _Report) -> KnownPeers:
    if not report.secret_file:
        return report.known
    secret = read_secret(Path(report.secret_file))
    _delete_secret(report.secret_file)
    return msgspec.structs.replace(report.known, secret=secret)


@functools.cache  # warn once, not in every world
def _warn_of_open_secret(job: str) -> None:
    log.warning(
        "%s: peer.secret is not set, so its nodes share one through torch.distributed's store, which does not "
        "authenticate its clients. A client that reads that exchange can read and replace the copies on all nodes. On "
        "a shared network set peer.secret=file:/path (TIEREDCKPT_PEER_SECRET) on all nodes",
        job,
    )


def _proof(secret: bytes, job: str, offer: _PeerPlanOffer) -> bytes:
    """Return a MAC of the list of nodes; its prefix separates it from the MACs between agents."""
    parts = (b"tieredckpt invitation 1", job.encode(), offer.nonce, _text(offer.member_list).encode())
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


def _delete_read_secret(store: torch.distributed.Store, prefix: str, secret_file: str) -> None:
    """Delete the secret from the store, and its file, if this rank is the last one that has read it."""
    if store.add(f"{prefix}/read", 1) % dist.get_world_size() == 0:
        for key in ("all", "known"):
            with contextlib.suppress(RuntimeError, NotImplementedError):
                store.delete_key(f"{prefix}/{key}")
        if secret_file:
            _delete_secret(secret_file)


def _plan_of_single_node(session: Session, peer: PeerSettings, restoring: bool) -> JobPeersConfig | None:
    """Return a single node's plan if it knows other nodes; ``None`` otherwise, and during a restore.

    The first save makes them standby nodes. Then this node alone is the quorum, even if all others are dead.
    """
    known = _wait_for_known_peers(session, restoring)
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
        return from_json(_receive(store, f"{prefix}/list", timedelta(seconds=_TIMEOUT_S)), MemberList | None)
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


def _wait_for_known_peers(
    session: Session, restoring: bool, is_here: Callable[[str], bool] = lambda _node: False
) -> KnownPeers | None:
    """Return what this node knows of the job, after a wait for nodes that continued it without this one.

    If they do not answer in time, the job resumes here from an older step. ``is_here`` returns whether a node has a
    rank in this world. Such a node needs no wait, because the agents connect only after this exchange.
    """
    known = session.agent.known_peers(session.job)
    if not restoring or known is None:
        return known
    timeout_s = session.settings.peer.unreachable_timeout_s
    deadline = time.monotonic() + timeout_s
    announced = ""
    while known is not None and (silent := ", ".join(node for node in known.unreachable if not is_here(node))):
        if time.monotonic() >= deadline:
            log.error(
                "%s: the restore continues without %s, which did not answer within %g s (peer.unreachable_timeout_s). "
                "Steps that only it has become a branch that is left behind",
                *(session.job, silent, timeout_s),
            )
            return known
        if silent != announced:
            log.warning(
                "%s: the job continued without this node, on %s, which does not answer. Waiting up to %g s for it "
                "(peer.unreachable_timeout_s)",
                *(session.job, silent, timeout_s),
            )
            announced = silent
        time.sleep(_POLL_S)
        known = session.agent.known_peers(session.job)
    return known


def _is_here(store: torch.distributed.Store, prefix: str, node: str) -> bool:
    return store.check([f"{prefix}/here/{node}"])


def _refresh_plan(session: Session, plan: JobPeersConfig) -> JobPeersConfig:
    """Publish the address of this node's restarted agent; return the plan with all current addresses."""
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
    except RuntimeError as error:  # the next world exchanges the addresses anyway
        log.warning("%s: the new address of this node's agent was not published: %s", session.job, error)
        return plan
    if tuple(sorted(nodes)) == plan.member_list.nodes:
        return plan
    return msgspec.structs.replace(plan, member_list=member_list(time.time_ns(), nodes, plan.member_list.standby))


def _receive_hellos(store: torch.distributed.Store, prefix: str, timeout: timedelta) -> dict[int, _NodeHello]:
    """Return the messages of all nodes, by the first rank of each node."""
    found = {
        rank: from_json(_receive(store, f"{prefix}/{rank}", timeout), _NodeHello | None)
        for rank in range(dist.get_world_size())
    }
    return {rank: hello for rank, hello in found.items() if hello is not None}


def _choose_reporter(hellos: Mapping[int, _NodeHello]) -> int:
    """Return the rank with the newest list of nodes of earlier worlds, or -1 if no node has one."""
    knowing = {rank: hello.version for rank, hello in hellos.items() if hello.version is not None}
    return max(knowing, key=lambda rank: (knowing[rank], -rank), default=-1)


def _receive(store: torch.distributed.Store, key: str, timeout: timedelta) -> bytes:
    store.wait([key], timeout)
    return store.get(key)


def _text(message: object) -> str:
    return msgspec.json.encode(message).decode()


def _make_offer(
    hellos: Sequence[_NodeHello],
    known: KnownPeers | None,
    peer: PeerSettings,
    job: str,
    *,
    restoring: bool,
    outside: Sequence[PeerNode],
) -> _PeerPlanOffer:
    """Return rank 0's offer from the messages of all nodes."""
    nodes: dict[str, PeerNode] = {}
    for node in (hello.node for hello in hellos if hello.node is not None):
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
    offer = _PeerPlanOffer(members, b"", nonce=secrets.token_bytes(16))
    return msgspec.structs.replace(offer, proof=_proof(secret, job, offer))
