"""Registration of a job with its agent: settings, list of nodes, layouts and tables."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from peerstore.membership.topology import PeerNode
from peerstore.settings import JobPeersConfig
from peerstore.shard_records import MAX_BLOB_BYTES
from peerstore.sizes_and_durations import show_size
from tieredckpt.agent.agent_api import NodeAgentAPI
from tieredckpt.agent.peer_config import configured_peer_plan
from tieredckpt.errors import SaveFailedError
from tieredckpt.format.manifest import pack_blob
from tieredckpt.session.durable_tier import DurableTier
from tieredckpt.settings import Settings, local_world_size


class AgentRegistration:
    """Registration of one job with the agent. An agent that lost it receives it again."""

    def __init__(self, job: str, node: NodeAgentAPI, durable: DurableTier, settings: Callable[[], Settings]) -> None:
        self._job = job
        self._agent = node
        self._durable = durable
        self._settings = settings
        self.peer_plan: JobPeersConfig | None = None
        """Plan that this process last sent to its agent."""
        self.refresh_peer_plan: Callable[[JobPeersConfig], JobPeersConfig] | None = None
        """Function that updates a plan with the current addresses of the job's nodes."""
        self.standby_nodes: tuple[PeerNode, ...] = ()
        """Nodes outside the world that accept replicas, as last seen by this process."""
        self.has_single_agent = False
        """Whether all ranks use this node's agent, even if the launcher reports several nodes."""
        self._known_blobs: set[str] = set()
        self._arena_id, self._agent_start = node.store.arena_id, node.store.start_id
        self._lock = threading.RLock()

    @property
    def agents_are_isolated(self) -> bool:
        """Whether ranks are on several nodes whose agents do not know each other.

        The ranks then report committed versions and aborted parts to their agents at each save.
        """
        if self.peer_plan is not None or self.has_single_agent or not dist.is_initialized():
            return False
        return local_world_size() not in (0, dist.get_world_size())

    def configure(self) -> None:
        """Send the settings to the agent."""
        self._durable.configure()
        plan = configured_peer_plan(self._settings().peer)
        if plan is not None:
            self.join_peers(plan)

    def join_peers(self, plan: JobPeersConfig) -> None:
        """Send the plan of the job's nodes to the agent, which then replicates shards to them."""
        if plan != self.peer_plan:
            self._agent.join_peers(self._job, plan)
            self.peer_plan = plan

    def put_blob(self, name: str, encode: Callable[[], bytes]) -> None:
        """Store a packed blob with the agent, unless it has this blob."""
        if name not in self._known_blobs:
            data = pack_blob(encode())
            if len(data) > MAX_BLOB_BYTES:
                raise SaveFailedError(
                    f"The description of this rank's part has {show_size(len(data))} after compression. An agent keeps "
                    f"at most {show_size(MAX_BLOB_BYTES)}, enough for millions of tensors in one rank. Save fewer and "
                    "larger tensors, or save from more ranks"
                )
            self._agent.store.blobs.put(self._job, name, data)
            self._known_blobs.add(name)

    def renew(self) -> None:
        """Send everything again to an agent that has forgotten the job. Blobs follow with the next seal."""
        with self._lock:
            self._known_blobs.clear()
            self.configure()
            if self.peer_plan is not None:
                self._agent.join_peers(self._job, self.peer_plan)

    def follow_restart(self) -> None:
        """Send the plan of the nodes, and after a lost arena everything else, to a restarted agent.

        An agent that lost its arena has no layouts and no peers. An agent that kept it may listen on another address,
        as may its peers.
        """
        with self._lock:
            store = self._agent.store
            if (store.arena_id, store.start_id) == (self._arena_id, self._agent_start):
                return
            lost, self._arena_id, self._agent_start = store.arena_id != self._arena_id, store.arena_id, store.start_id
            if lost:
                self._known_blobs.clear()
                self.configure()
            if self.peer_plan is not None and self.refresh_peer_plan is not None:
                self.peer_plan = self.refresh_peer_plan(self.peer_plan)
            elif not lost:
                return
            if self.peer_plan is not None:
                self._agent.join_peers(self._job, self.peer_plan)
