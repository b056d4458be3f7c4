"""Detection of this process's control plane: elastic run, a platform, torchrun, or one process alone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from elastic.control.control_plane import ControlPlane, RankAssignment, platform_control_plane
from elastic.control.hang_detector import HangTimeouts
from elastic.control.supervisor_client import SupervisorClient
from elastic.errors import PolicyError
from elastic.rendezvous.rootless_tcpstore import RootlessStore
from elastic.rendezvous.store_server_client import StoreTimeouts
from elastic.settings import abort_timeout_in, hang_limits_in, is_supervised, supervisor_endpoint
from elastic.workers.native_connections import close_store_connections
from elastic.workers.store_control_plane import StoreControlPlane

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_STORE_TIMEOUT = timedelta(minutes=5)
_CONNECT_S = 5.0
_RETRY_S = 0.2


def detect_control_plane(environ: Mapping[str, str] = os.environ) -> ControlPlane:
    """Return the control plane of this process.

    That is the plane of ``elastic run``, of a platform plugin, or of a launcher with torchrun's variables. A process
    without a launcher is a world of one rank.

    Raises :class:`~elastic.errors.PolicyError` if only some of the launcher's variables are set.
    """
    if is_supervised(environ):
        return SupervisorClient(supervisor_endpoint(environ))
    platform_plane = platform_control_plane(environ)
    if platform_plane is not None:
        return platform_plane
    found = [name for name in _RANK_VARIABLES if name in environ]
    if not found:
        return single_process_control_plane()
    if len(found) < len(_RANK_VARIABLES):
        missing = ", ".join(name for name in _RANK_VARIABLES if name not in environ)
        raise PolicyError(f"{', '.join(found)} are set and {missing} are not: a launcher sets all of them, or none")
    return launcher_control_plane(environ)


def launcher_control_plane(environ: Mapping[str, str]) -> StoreControlPlane:
    """Return the control plane of the ranks in ``environ``.

    The launcher or rank 0 serves its store.
    """
    assignment = assignment_from_environ(environ)
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    made = (
        [start_store_server(host, port)]
        if assignment.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        else []
    )
    return _plane_with_servers(
        host, port, assignment, made, limits=hang_limits_in(environ), leave_s=abort_timeout_in(environ)
    )


def assignment_from_environ(environ: Mapping[str, str], *, epoch: int = 0) -> RankAssignment:
    """Return this process's rank from torchrun's variables.

    The variables for nodes are used only if they can describe this world: some launchers count other things there.
    """
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    local = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    node, nodes = rank // local, -(-size // local)
    group_rank, group_count = int(environ.get("GROUP_RANK", node)), int(environ.get("GROUP_WORLD_SIZE", nodes))
    if 0 <= group_rank < group_count <= size - local + 1 and (group_count > 1 or local == size):
        node, nodes = group_rank, group_count
    return RankAssignment(
        epoch=epoch,
        rank=rank,
        world_size=size,
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        local_world_size=local,
        node_rank=node,
        node_count=nodes,
        store=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        reason="started",
    )


def single_process_control_plane() -> StoreControlPlane:
    """Return the control plane of a world with one rank.

    No other process uses its store, and no launcher restarts it.
    """
    server = start_store_server("127.0.0.1", 0)
    assignment = RankAssignment(0, 0, 1, 0, 1, 0, 1, f"127.0.0.1:{server.port}", reason="started alone")
    return _plane_with_servers("127.0.0.1", server.port, assignment, [server])


def _plane_with_servers(
    host: str,
    port: int,
    assignment: RankAssignment,
    servers: list[dist.TCPStore],
    *,
    limits: HangTimeouts | None = None,
    leave_s: float | None = None,
) -> StoreControlPlane:
    """Return a control plane that holds ``servers``, so that they live as long as it."""

    def connect(_servers: list[dist.TCPStore] = servers) -> RootlessStore:
        return connect_store(host, port)

    return StoreControlPlane(connect, assignment, limits=limits, leave_s=leave_s)


def start_store_server(host: str, port: int) -> dist.TCPStore:
    """Return a store server, which runs as long as the caller holds it."""
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)


def connect_store(host: str, port: int, *, timeouts: StoreTimeouts | None = None) -> RootlessStore:
    """Return a ``TCPStore`` client with time limits.

    Calls of torch's client never return if the server is stopped.

    The caller closes it. Raises :class:`torch.distributed.DistNetworkError` if no server listens there within five
    minutes.
    """
    until = time.monotonic() + _STORE_TIMEOUT.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                raise dist.DistNetworkError(f"no store answers at {host}:{port}: {error}") from error
            time.sleep(_RETRY_S)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return RootlessStore(
        (address,), close_connections=close_store_connections, copies=1, timeout=_STORE_TIMEOUT, timeouts=timeouts
    )
