"""The control plane of this process, detected from its environment: elastic run, a platform, torchrun, or alone."""

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
from elastic.rendezvous.rootless_tcpstore import RootlessStore, StoreTimeouts
from elastic.settings import abort_timeout_in, hang_limits_in, is_supervised, supervisor_endpoint
from elastic.workers.process_groups import close_store_connections
from elastic.workers.store_control_plane import StoreControlPlane

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = timedelta(minutes=5)
_REACH_S = 5.0
_AGAIN_S = 0.2


def detect_control_plane(environ: Mapping[str, str] = os.environ) -> ControlPlane:
    """Of ``elastic run``, of a platform that brings one, of ``torchrun`` and what is like it, or of this process alone
    where nobody started it.
    """
    if is_supervised(environ):
        return SupervisorClient(supervisor_endpoint(environ))
    brought = platform_control_plane(environ)
    if brought is not None:
        return brought
    found = [name for name in _NEEDED if name in environ]
    if not found:
        return single_process_control_plane()
    if len(found) < len(_NEEDED):
        missing = ", ".join(name for name in _NEEDED if name not in environ)
        raise PolicyError(f"{', '.join(found)} are set and {missing} are not: a launcher sets all of them, or none")
    return launcher_control_plane(environ)


def launcher_control_plane(environ: Mapping[str, str]) -> StoreControlPlane:
    """The ranks that ``environ`` speaks of meet at its store, which the launcher keeps or the first rank makes."""
    place = assignment_from_environ(environ)
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    made = (
        [start_store_server(host, port)]
        if place.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        else []
    )
    return _kept(host, port, place, made, limits=hang_limits_in(environ), leave_s=abort_timeout_in(environ))


def assignment_from_environ(environ: Mapping[str, str], *, epoch: int = 0) -> RankAssignment:
    """The rank that ``environ`` speaks of, in torchrun's words.

    What it says of nodes is taken where ranks can be so: some launchers count other things there.
    """
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    local = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    node, nodes = rank // local, -(-size // local)
    told, of = int(environ.get("GROUP_RANK", node)), int(environ.get("GROUP_WORLD_SIZE", nodes))
    if 0 <= told < of <= size - local + 1 and (of > 1 or local == size):
        node, nodes = told, of
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
    """A world of one, which nobody else can see, and which nobody would start again."""
    server = start_store_server("127.0.0.1", 0)
    place = RankAssignment(0, 0, 1, 0, 1, 0, 1, f"127.0.0.1:{server.port}", reason="started alone")
    return _kept("127.0.0.1", server.port, place, [server])


def _kept(
    host: str,
    port: int,
    place: RankAssignment,
    servers: list[dist.TCPStore],
    *,
    limits: HangTimeouts | None = None,
    leave_s: float | None = None,
) -> StoreControlPlane:
    """The plane holds on to the servers that were made for it."""

    def connect(_servers: list[dist.TCPStore] = servers) -> RootlessStore:
        return connect_store(host, port)

    return StoreControlPlane(connect, place, limits=limits, leave_s=leave_s)


def start_store_server(host: str, port: int) -> dist.TCPStore:
    """A store of this process's own, for as long as it is held."""
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_PATIENCE)


def connect_store(host: str, port: int, *, timeouts: StoreTimeouts | None = None) -> RootlessStore:
    """A client of a ``TCPStore`` whose calls end: torch's own waits for ever where the server is stopped.

    To be closed. :class:`torch.distributed.DistNetworkError` where nobody comes to listen there.
    """
    until = time.monotonic() + _PATIENCE.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), _REACH_S).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                raise dist.DistNetworkError(f"no store answers at {host}:{port}: {error}") from error
            time.sleep(_AGAIN_S)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return RootlessStore(
        (address,), close_connections=close_store_connections, copies=1, timeout=_PATIENCE, timeouts=timeouts
    )
