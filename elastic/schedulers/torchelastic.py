"""``PET_*``: torchrun's options as variables, as Kubeflow's training operators set them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.errors import PolicyError
from elastic.schedulers.allocation import SchedulerAllocation, node_range
from peerstore.network_addresses import split_address

_PORT = 29400
"""Torch's default port of an endpoint."""
_OWN_ENDPOINT_BACKENDS = ("", "c10d", "static")
"""Rendezvous backends whose endpoint is one of the job's machines."""


def torchelastic_allocation(
    environ: Mapping[str, str], *, host: str, accelerators: int, processors: int
) -> SchedulerAllocation | None:
    """Return the allocation in the variables; ``None`` if they are not set.

    ``host`` is this machine's name, and the counts are those of this machine.
    """
    nnodes, nproc = environ.get("PET_NNODES", ""), _nproc(environ, accelerators, processors)
    if not nnodes and nproc is None:
        return None
    least, most = _range(nnodes or "1")
    said = f"$PET_NNODES={nnodes}" if nnodes else f"$PET_NPROC_PER_NODE={environ['PET_NPROC_PER_NODE']}"
    if most == 1:
        return SchedulerAllocation(said, 1, 1, nproc, counts_nodes=bool(nnodes))
    endpoint_host, port = _endpoint(environ)
    rank = _rank(environ, most)
    is_here = bool(endpoint_host) and endpoint_host.partition(".")[0] == host.partition(".")[0]
    leads = is_here if rank is None else rank == 0
    return SchedulerAllocation(said, least, most, nproc, host=endpoint_host, port=port, leads=leads)


def _range(text: str) -> tuple[int, int]:
    try:
        return node_range(text)
    except PolicyError:
        raise PolicyError(f"$PET_NNODES={text}: expected a number of nodes, or MIN:MAX") from None


def _nproc(environ: Mapping[str, str], accelerators: int, processors: int) -> int | None:
    said = environ.get("PET_NPROC_PER_NODE", "")
    if not said:
        return None
    if said == "gpu" and not accelerators:
        raise PolicyError(f"$PET_NPROC_PER_NODE={said}, and no GPU is seen here: write --nproc")
    counted = {"auto": accelerators or processors, "gpu": accelerators, "cpu": processors}.get(said)
    if counted is not None:
        return counted
    if not (said.isascii() and said.isdigit() and 1 <= int(said[:6]) <= 1024):
        raise PolicyError(f"$PET_NPROC_PER_NODE={said}: expected a number from 1 to 1024, auto, gpu or cpu")
    return int(said)


def _rank(environ: Mapping[str, str], most: int) -> int | None:
    said = environ.get("PET_NODE_RANK", "")
    if not said:
        return None
    if not (said.isascii() and said.isdigit() and int(said[:9]) < most):
        raise PolicyError(f"$PET_NODE_RANK={said} and $PET_NNODES={environ['PET_NNODES']}: expected 0 to {most - 1}")
    return int(said)


def _endpoint(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the rendezvous endpoint; the host is "" if not set."""
    backend = environ.get("PET_RDZV_BACKEND", "")
    if backend not in _OWN_ENDPOINT_BACKENDS:
        raise PolicyError(
            f"$PET_RDZV_BACKEND={backend}: its endpoint is a server of its own, and the coordinator of `elastic run` "
            "is on one of the job's machines. Unset it, or write --coordinator HOST:PORT"
        )
    master, port = environ.get("PET_MASTER_ADDR", ""), environ.get("PET_MASTER_PORT", "")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port[:9]) <= 65535):
        raise PolicyError(f"$PET_MASTER_PORT={port}: expected a port")
    endpoint = environ.get("PET_RDZV_ENDPOINT", "")
    if not endpoint:
        return master, int(port or _PORT)
    host, endpoint_port = split_address(endpoint if endpoint.rpartition(":")[2].isdigit() else f"{endpoint}:{_PORT}")
    if (master and master != host) or (port and int(port) != endpoint_port):
        raise PolicyError(
            f"$PET_RDZV_ENDPOINT={endpoint} and $PET_MASTER_ADDR={master} $PET_MASTER_PORT={port} are different places"
        )
    return host, endpoint_port
