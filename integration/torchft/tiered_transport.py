"""``TieredTransport``: torchft's checkpoint transport over the node agents."""

from __future__ import annotations

import logging
import secrets
import socket
import time
import warnings
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgspec
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchft.checkpointing.transport import CheckpointTransport

from integration.torchft.transport_state import flatten_for_transport, unflatten_from_transport
from peerstore import deadlines
from peerstore.errors import PeerStoreError
from peerstore.membership.topology import PeerNode, member_list
from peerstore.message_codec import from_json
from peerstore.settings import JobPeersConfig
from peerstore.shard_records import validate_job_name
from tieredckpt.agent.peer_config import peer_secret, replication_settings
from tieredckpt.dcp.load_save import load
from tieredckpt.dcp.rank_group import unwrap_save_error
from tieredckpt.dcp.tiered_writer import TieredWriter, WriterOptions
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.location import Location
from tieredckpt.session.session import Session, open_session
from tieredckpt.settings import Settings, load_settings, override_settings

log = logging.getLogger(__name__)

T = TypeVar("T")
_PAUSES_S = 0.005, 0.25
"""First and longest pause in seconds between two queries for the sender's step."""


class _Source(msgspec.Struct, frozen=True):
    """Sender of a checkpoint."""

    job: str
    node_name: str
    node: PeerNode | None
    """Its node with the agent's address, for receivers on other nodes; ``None`` without a secret."""


class TieredTransport(CheckpointTransport[T]):
    """Transport for ``torchft.Manager(checkpoint_transport=...)`` through shared memory and peer agents.

    The sender stages its state into the memory of its node's agent, as one sealed and checksummed shard. A receiver on
    the same node reads it from shared memory, another one from the sender's agent. Nodes need the same ``peer.secret``.
    The received tensors are on the CPU and equal bit for bit.

    ``job``: prefix of the job name under which the agent lists the state. The rest is random.
    """

    def __init__(self, job: str = "torchft", *, settings: Settings | None = None) -> None:
        # The state is needed for one step only, and only on this node.
        peer = {"copies": 1, "mode": "mirror", "discovery": "world"}
        self._settings = override_settings(settings or load_settings(), durable={"url": ""}, peer=peer)
        self.job = f"{job}-{secrets.token_hex(8)}"
        self._session = open_session(self.job, self._settings)
        self._session.durable.warns_memory_only = False
        self._node: PeerNode | None = None
        self._source_addresses: dict[str, str] = {}
        """Addresses of the senders' agents that this node's agent knows, by job."""
        self._newest_step = -1
        self._is_staged = False
        if self._settings.peer.secret:
            self._node = self._session.agent.this_node()
            if self._node is not None:
                self._join_peers(self._session, self._node)

    def metadata(self) -> str:
        """Return this sender's job and node as JSON, for ``recv_checkpoint`` of other replicas."""
        if self._settings.peer.secret:
            try:
                self._node = self._session.agent.this_node()
            except PeerStoreError as error:  # a quorum without recovery must not fail for it
                log.warning("%s: the address of this node's agent may be old: %s", self.job, error)
        return msgspec.json.encode(_Source(self.job, _node_name(self._session), self._node)).decode()

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Stage the state as ``step`` for all receivers. The caller may change it as soon as this returns.

        Raise :class:`~tieredckpt.errors.UntrustedObjectError` for a value that is more than data, or the errors of a
        save.
        """
        self.disallow_checkpoint()
        trust = self._settings.memory.trust_objects
        flat = flatten_for_transport(state_dict, step, trust_objects=trust)
        if step < self._newest_step:  # torchft went back, and the writer refuses lower steps of one branch
            self._session.loads.rewind_to(step - 1)
        timeout_s = timeout.total_seconds()
        writer = TieredWriter(self.job, step, settings=self._settings, options=WriterOptions(wait_s=timeout_s))
        self._is_staged = True
        try:
            with deadlines.timeout_scope(timeout_s), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
                dcp.save(flat, storage_writer=writer, no_dist=True)
        except CheckpointException as failure:
            raise unwrap_save_error(failure) from failure
        self._newest_step = step

    def disallow_checkpoint(self) -> None:
        """Delete the staged state from the agent's memory. Later receivers do not find it."""
        if not self._is_staged:
            return
        try:
            self._session.agent.store.versions.delete(self.job)
            self._is_staged = False
        except PeerStoreError as error:  # the next call deletes it
            log.warning("%s: the sent state still uses memory: %s", self.job, error)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return the state of ``step`` from the sender, verified, as soon as the sender has staged it.

        The errors after ``timeout`` are :class:`~tieredckpt.errors.CheckpointNotFoundError` if the sender's agent does
        not have the step, and :class:`~tieredckpt.errors.TierUnavailableError` if it does not answer. Damaged bytes
        raise :class:`~tieredckpt.errors.CheckpointDamagedError` at once.
        """
        try:
            source = from_json(metadata.encode(), _Source)
        except msgspec.DecodeError as error:
            raise UsageError(f"rank {src_rank} does not send with a TieredTransport: {metadata!r:.200}") from error
        name = f"step {step} of rank {src_rank} ({source.job})"
        late = f"{name}: timed out after {timeout.total_seconds():g} s"
        with deadlines.timeout_scope(timeout.total_seconds()):
            flat = deadlines.run_within_deadline(
                lambda: self._receive(source, step, name, late),
                lambda: TierUnavailableError(f"{late}: the agents did not answer in time"),
            )
        return cast(T, unflatten_from_transport(flat, step))

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT002 - torchft's signature
        """Delete the staged state. The node agent continues for other jobs."""
        self.disallow_checkpoint()

    def _receive(self, source: _Source, step: int, name: str, late: str) -> dict[str, Any]:
        pause, longest = _PAUSES_S
        while True:
            try:
                session = open_session(source.job, self._settings)
                self._join_source(session, source)
                if self._is_offered(session, step, name):
                    return load(source.job, step=step, settings=self._settings)
                problem: TieredCheckpointError = CheckpointNotFoundError(
                    f"{late}: the sender's agent does not have it. It was not sent, or disallow_checkpoint deleted it"
                )
            except (TierUnavailableError, PeerStoreError) as error:
                problem = TierUnavailableError(f"{late}: the sender's agent is unreachable: {error}")
            except CheckpointNotFoundError as error:
                problem = CheckpointNotFoundError(f"{late}: {error}")
            if deadlines.remaining_s() <= pause:
                raise problem
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _is_offered(self, session: Session, step: int, name: str) -> bool:
        """Return whether the sender has sealed the step; raise if it is damaged or the sender does not answer."""
        choice = session.choose_step(session.list_steps(fresh=True), step)
        if choice.version_id is not None:
            return True
        problem = choice.error(Location(validate_job_name(session.job), step), advice="")
        if isinstance(problem, CheckpointDamagedError):
            raise CheckpointDamagedError(f"{name} is damaged: {problem}")
        if isinstance(problem, TierUnavailableError):
            raise problem
        return False

    def _join_source(self, session: Session, source: _Source) -> None:
        """Connect this node's agent with the sender's, if they are different nodes."""
        if source.node_name == _node_name(session):
            return
        node = source.node
        if node is None or not self._settings.peer.secret:
            raise UsageError(
                f"The sender is on node {source.node_name}, and this node is {_node_name(session)}. To read from other "
                "nodes, set the same peer.secret (TIEREDCKPT_PEER_SECRET) on all nodes"
            )
        if self._source_addresses.get(source.job) == node.address:
            return
        me = session.agent.this_node()
        if me is None:
            raise UsageError("agent.peers is off, so this node's agent cannot read from other nodes")
        self._join_peers(session, me, node)
        self._source_addresses[source.job] = node.address

    def _join_peers(self, session: Session, *nodes: PeerNode) -> None:
        peer = self._settings.peer
        members = member_list(time.time_ns(), nodes)
        session.registration.join_peers(
            JobPeersConfig(peer_secret(peer), replication_settings(peer), member_list=members)
        )


def _node_name(session: Session) -> str:
    return session.settings.agent.node or socket.gethostname()
