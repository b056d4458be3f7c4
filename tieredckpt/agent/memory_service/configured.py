"""The memory service as an agent is told of it."""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path

from peerstore.cluster.nodes import node_id
from peerstore.errors import RequestError
from peerstore.peers.neighbourhood import Neighbourhood
from peerstore.peers.plan import TeamPlan, TeamSettings
from peerstore.peers.team import Team
from peerstore.store import NodeStore
from peerstore.transport.certificates import check_key
from peerstore.transport.secret import read_secret
from tieredckpt.agent.memory_service.access import access_for
from tieredckpt.agent.memory_service.front import serving
from tieredckpt.agent.memory_service.names import JOB
from tieredckpt.agent.memory_service.options import MemoryServiceOptions
from tieredckpt.agent.memory_service.reporting import Reporting
from tieredckpt.agent.memory_service.service import MemoryService
from tieredckpt.errors import UsageError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def memory_service(
    store: NodeStore, options: MemoryServiceOptions, node: str, directory: Path, neighbourhood: Neighbourhood | None
) -> Iterator[Reporting]:
    """Serve the memory service while the block runs."""
    problems = [f"agent.{name}: {text}" for name, text in options.problems()]
    if problems:
        raise UsageError("; ".join(problems))
    host, port = options.place
    access = access_for(options.auth, options.token, directory)
    tls = _tls(options.tls)
    plan = _plan(options)
    with contextlib.ExitStack() as cleanup:
        service = MemoryService(store, node_id(node))
        cleanup.callback(service.close)
        service.start(_join(plan, neighbourhood))
        address = cleanup.enter_context(serving(service, host, port, access, tls))
        asks = "for a token" if access.asks else "nobody who they are"
        log.info("memory service on %s, over %s, asks %s", address, "TLS" if tls is not None else "plain HTTP", asks)
        (directory / JOB).write_text(address)
        yield Reporting(service, address)


def _join(plan: TeamPlan | None, neighbourhood: Neighbourhood | None) -> Team | None:
    if plan is None:
        if neighbourhood is not None:
            neighbourhood.leave(JOB)
        return None
    if neighbourhood is None:
        raise UsageError("agent.memory_service_nodes: other nodes cannot reach this one while agent.peers is off")
    return neighbourhood.join(JOB, plan)


def _plan(options: MemoryServiceOptions) -> TeamPlan | None:
    if not options.nodes:
        return None
    try:
        settings = TeamSettings(copies=options.copies, settles=False)
        return TeamPlan(read_secret(options.secret), settings, discovery=options.nodes)
    except RequestError as error:
        raise UsageError(f"agent.memory_service_secret: {error}") from error


def _tls(directory: str) -> ssl.SSLContext | None:
    if not directory:
        return None
    folder = Path(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        check_key(folder / "tls.key")
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        if (folder / "ca.crt").exists():
            context.load_verify_locations(folder / "ca.crt")
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError, RequestError) as error:
        raise UsageError(f"agent.memory_service_tls: what is in {folder} cannot be used: {error}") from error
    return context
