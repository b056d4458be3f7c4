"""``python -m tieredckpt.agent``: the arguments and services of a node agent."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from peerstore.cli import add_serve_arguments, start_agent_process, store_settings_from_args
from peerstore.errors import PeerStoreError
from peerstore.membership.topology import load_node_labels, validate_node_id
from peerstore.server.node_peers import NodeIdentity, NodePeers
from peerstore.server.store_server import AgentExtension, serve_store
from peerstore.settings import AgentPaths, parse_budget
from peerstore.store.node_store import NodeStore
from peerstore.suggestions import SuggestingParser
from tieredckpt.agent.agent_http import StatusSource, serve_metrics
from tieredckpt.agent.agent_operations import agent_operations
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.agent.cluster_settings import ASKED_S, FILE_S, ClusterSettingsWatcher
from tieredckpt.agent.peer_config import peer_transport
from tieredckpt.agent.peer_tier import SHARED_BLOBS, blobs_needed
from tieredckpt.errors import PluginError, TieredCheckpointError
from tieredckpt.memory_service_options import (
    MEMORY_SERVICE_EPOCH,
    MEMORY_SERVICE_INCARNATION,
    MEMORY_SERVICE_JOB,
    MemoryServiceOptions,
    memory_service_options_of,
)
from tieredckpt.memory_service_options import add_memory_service_arguments as add_memory_service
from tieredckpt.settings import (
    CLUSTER_CONFIG_ENV,
    AgentSettings,
    cluster_config_source,
    platform_settings,
    settings_from_mapping,
)

SERVICES = "tieredckpt.agent_services"
"""Entry-point group of the services that other packages add to the node agent."""
_CLUSTER_HELP = (
    "read the memory budget from the cluster, PLATFORM:/path; command-line options override it "
    f"(default ${CLUSTER_CONFIG_ENV})"
)
_ARGUMENTS = {"slots_per_rank": "slots_per_part", "directory": "dir"}
"""Settings with another name on the command line."""


@functools.cache  # each call parses the distribution's metadata
def installed_version() -> str:
    try:
        return metadata.version("tieredckpt")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def run_agent(place: AgentPaths, args: argparse.Namespace) -> None:
    """Run the node agent of ``place`` until a signal stops it or it is no longer needed."""

    @contextlib.contextmanager
    def extend(store: NodeStore) -> Iterator[AgentExtension]:
        for address_file in ("http", MEMORY_SERVICE_JOB):  # a killed agent leaves its addresses behind
            (place.directory / address_file).unlink(missing_ok=True)
        with contextlib.ExitStack() as cleanup:
            node_peers = _node_peers(store, args)
            options = memory_service_options_of(args)
            node = NodeAgentService(store, writer=f"tieredckpt {installed_version()}", node_peers=node_peers)
            if options.enabled:
                store.jobs.incarnations.manage(
                    MEMORY_SERVICE_JOB, MEMORY_SERVICE_EPOCH, MEMORY_SERVICE_INCARNATION
                )  # before other nodes can send replicas of it
            if node_peers is not None:
                cleanup.callback(node_peers.close)
                node_peers.start()
            cleanup.callback(node.close)
            node_name = args.node or socket.gethostname()
            memory_service_context = _memory_service(store, options, node_name, place.directory, node_peers)
            memory_service = cleanup.enter_context(memory_service_context)
            watcher = _cluster_settings_watcher(store, args)
            if watcher is not None:
                cleanup.callback(watcher.close)
                watcher.start()
                node.cluster_settings = watcher
            address = cleanup.enter_context(serve_metrics(node, args.http, memory_service, directory=place.directory))
            (place.directory / "http").write_text(address)
            yield AgentExtension(
                agent_operations(node), (TieredCheckpointError,), lambda: options.enabled or node.drain.busy
            )

    os.nice(args.nice)
    serve_store(
        place, store_settings_from_args(args), version=installed_version(), linger_s=args.linger_s, extend=extend
    )


def _cluster_settings_watcher(store: NodeStore, args: argparse.Namespace) -> ClusterSettingsWatcher | None:
    if not args.cluster_config:
        return None
    return ClusterSettingsWatcher(
        args.cluster_config,
        platform_settings,
        args.cluster_said,
        store.set_budget,
        budget=args.budget,
        default=args.defaults["budget"],
        fixed=args.given,
        every_s=args.cluster_every_s,
    )


def _memory_service(
    store: NodeStore, options: MemoryServiceOptions, node: str, directory: Path, node_peers: NodePeers | None
) -> contextlib.AbstractContextManager[StatusSource | None]:
    """Load the memory service by its entry point, only where the settings turn it on."""
    if not options.enabled:
        return contextlib.nullcontext()
    found = list(metadata.entry_points(group=SERVICES, name="memory-service"))
    if not found:
        raise PluginError(
            f"agent.memory_service is set, but no installed package provides 'memory-service' in {SERVICES!r}. "
            "Reinstall tieredckpt, or unset agent.memory_service."
        )
    service: contextlib.AbstractContextManager[StatusSource | None] = found[0].load()(
        store, options, node, directory, node_peers
    )
    return service


def _node_peers(store: NodeStore, args: argparse.Namespace) -> NodePeers | None:
    if args.peers == "off":
        return None
    identity = NodeIdentity(
        node=validate_node_id(args.node or socket.gethostname()),
        listen=args.peers,
        labels=load_node_labels(args.labels),
        memory_bytes=parse_budget(args.budget),
        port_file=args.dir / "peers.port",
    )
    transport = peer_transport(args.interface, args.tls, args.transport)
    return NodePeers(
        store, identity, transport, version=installed_version(), blobs_of=blobs_needed, shared=SHARED_BLOBS
    )


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    add_serve_arguments(parser)
    parser.add_argument(
        "--dir", type=Path, required=True, help="directory for checkpoints, socket and log; must be on tmpfs"
    )
    parser.add_argument(
        "--http",
        default="socket",
        help="address of the status page, /metrics and /status: socket (a file in --dir), HOST:PORT, or off "
        "(default %(default)s)",
    )
    parser.add_argument("--node", default="", help="name of this node within a job (default the host name)")
    parser.add_argument(
        "--peers",
        default=":0",
        help="HOST:PORT that the agents of other nodes connect to, or off (default %(default)s)",
    )
    parser.add_argument("--interface", default="", help="network interface for traffic between nodes")
    parser.add_argument(
        "--tls", default="", help="directory with tls.crt, tls.key and ca.crt to encrypt traffic between nodes"
    )
    parser.add_argument(
        "--labels", default="", help="failure domains of this node, e.g. rack=r1,zone=a, or file:PATH with them"
    )
    parser.add_argument(
        "--transport", default="tcp", help="transport between nodes: tcp, nixl or nixl:BACKEND (default %(default)s)"
    )
    add_memory_service(parser)
    parser.add_argument(
        "--nice",
        type=int,
        default=5,
        help="niceness of the agent process, so that training has priority (default %(default)s)",
    )
    parser.add_argument("--cluster-config", default=cluster_config_source(), metavar="SOURCE", help=_CLUSTER_HELP)
    parser.add_argument(
        "--cluster-every-s",
        type=float,
        metavar="S",
        help=f"seconds between two reads of --cluster-config (default {FILE_S:g} for a file, else {ASKED_S:g})",
    )


def parse_agent_arguments(argv: list[str] | None = None) -> argparse.Namespace | None:
    """Return the arguments, with the platform's settings as defaults.

    Return ``None`` if the platform disables the memory tier.
    """
    parser = agent_parser()
    args = parser.parse_args(argv)
    if not args.cluster_config:
        return args
    defaults = {name: parser.get_default(option) for name, option in _options().items()}
    cluster = platform_settings(args.cluster_config)
    if cluster.get("enabled") is False:
        print(
            f"tieredckpt agent: not started: {args.cluster_config} disables the memory tier. Jobs with this "
            f"configuration (${CLUSTER_CONFIG_ENV}) write to their durable tier directly",
            file=sys.stderr,
        )
        return None
    agent = settings_from_mapping({"agent": cluster.get("agent", {})}).agent
    parser.set_defaults(**{_ARGUMENTS.get(key, key): getattr(agent, key) for key in cluster.get("agent", {})})
    parsed = parser.parse_args(argv)
    parsed.cluster_said, parsed.defaults, parsed.given = cluster, defaults, _settings_on_command_line(parser, argv)
    return parsed


def _options() -> dict[str, str]:
    """Return the name of each agent setting on the command line."""
    return {field.name: _ARGUMENTS.get(field.name, field.name) for field in dataclasses.fields(AgentSettings)}


def _settings_on_command_line(parser: argparse.ArgumentParser, argv: list[str] | None) -> frozenset[str]:
    """Return the settings that the command line names, including values equal to the default."""
    missing = object()
    bare = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(_options().values(), missing)))
    return frozenset(name for name, option in _options().items() if getattr(bare, option) is not missing)


def agent_parser() -> argparse.ArgumentParser:
    """Return the parser of the agent's command line."""
    parser = SuggestingParser(
        prog="tieredckpt agent",
        description="Run this node's agent: memory tier, drain, metrics.",
        epilog="Other commands: `tieredckpt agent ls`, `stop` and `restart`; each has --help.",
    )
    add_agent_arguments(parser)
    return parser


def run_agent_command(argv: list[str] | None = None) -> None:
    """Run an agent with these arguments until it is stopped. Return at once if the platform disables it."""
    args = parse_agent_arguments(argv)
    if args is not None:
        start_agent_process(args)
        run_agent(AgentPaths(args.dir), args)


def main(argv: list[str] | None = None) -> int:
    try:
        run_agent_command(argv)
    except (PeerStoreError, TieredCheckpointError) as error:
        print(f"tieredckpt agent: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
