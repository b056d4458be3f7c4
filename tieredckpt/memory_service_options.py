"""Options and reserved names of the memory service, for settings and command lines."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from peerstore.network_addresses import is_loopback_host
from peerstore.shard_records import JobStatus

AuthMode = Literal["token", "off", "open"]
AUTH_MODES: tuple[AuthMode, ...] = ("token", "off", "open")
MEMORY_SERVICE_TOKEN_FILE = "memory-service.token"  # noqa: S105 - a file's name
MEMORY_SERVICE_OFF = "off"
_FILE = "file:"


@dataclass(frozen=True)
class MemoryServiceOptions:
    """Options of the HTTP memory service of an agent."""

    address: str = MEMORY_SERVICE_OFF
    auth: AuthMode = "token"
    token: str = ""
    tls: str = ""
    nodes: str = ""
    secret: str = ""
    copies: int = 2

    @property
    def enabled(self) -> bool:
        return self.address != MEMORY_SERVICE_OFF

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Host and port of a valid address."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)

    def problems(self) -> list[tuple[str, str]]:
        """Return the invalid settings: name and reason."""
        if not self.enabled:
            return []
        _, colon, port = self.address.rpartition(":")
        if not colon or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            return [("memory_service", f"{self.address!r} is neither HOST:PORT nor off")]
        found = []
        if self.auth == "off" and not is_loopback_host(self.host_and_port[0]):
            text = (
                "without a token, any client of the address can read and delete all shards: listen on 127.0.0.1, "
                "or set memory_service_auth=open"
            )
            found.append(("memory_service_auth", text))
        if self.token and not self.token.startswith(_FILE):
            found.append(("memory_service_token", "write file:/path, so that the token is in no list of processes"))
        if self.nodes and not self.secret.startswith(_FILE):
            text = "the nodes of the memory service need a secret they all know: write file:/path of it"
            found.append(("memory_service_secret", text))
        return found


def add_memory_service_arguments(parser: argparse.ArgumentParser) -> None:
    options = MemoryServiceOptions()
    group = parser.add_argument_group("memory service", "HTTP API compatible with amzn-sagemaker-checkpointing")
    group.add_argument(
        "--memory-service",
        default=options.address,
        metavar="HOST:PORT",
        help="address to listen on, or off (default %(default)s)",
    )
    group.add_argument(
        "--memory-service-auth",
        default=options.auth,
        choices=AUTH_MODES,
        help="authentication of clients: token, off (none, on loopback addresses only) or open (none, on any address). "
        "With open, all clients can read and delete all shards (default %(default)s)",
    )
    group.add_argument(
        "--memory-service-token",
        default=options.token,
        metavar="file:PATH",
        help=f"file with the token (default a generated one, in {MEMORY_SERVICE_TOKEN_FILE} in --dir)",
    )
    group.add_argument(
        "--memory-service-tls",
        default=options.tls,
        metavar="DIR",
        help="directory with tls.crt and tls.key, to serve HTTPS; with ca.crt, clients must send certificates",
    )
    group.add_argument(
        "--memory-service-nodes",
        default=options.nodes,
        metavar="DISCOVERY",
        help="nodes that replicate to each other: static:NAME=HOST:PORT,..., file:PATH, dns:NAME:PORT, or the source of"
        " an installed plug-in (default only this node)",
    )
    group.add_argument(
        "--memory-service-secret",
        default=options.secret,
        metavar="file:PATH",
        help="file with the secret that these nodes share",
    )
    group.add_argument(
        "--memory-service-copies",
        type=int,
        default=options.copies,
        choices=(1, 2, 3),
        help="copies of every shard, including the first (default %(default)s)",
    )


def memory_service_options_of(args: argparse.Namespace) -> MemoryServiceOptions:
    return MemoryServiceOptions(
        args.memory_service,
        args.memory_service_auth,
        args.memory_service_token,
        args.memory_service_tls,
        args.memory_service_nodes,
        args.memory_service_secret,
        args.memory_service_copies,
    )


def memory_service_arguments(options: MemoryServiceOptions) -> list[str]:
    """Return the command-line arguments that yield ``options``."""
    if not options.enabled:
        return []
    words = ["--memory-service", options.address, "--memory-service-auth", options.auth]
    words += ["--memory-service-copies", str(options.copies)]
    for name in ("token", "tls", "nodes", "secret"):
        value = getattr(options, name)
        words += [f"--memory-service-{name}", value] if value else []
    return words


MEMORY_SERVICE_JOB = "memory-service"
"""Job that stores the shards of all namespaces, on every node. A training job must not use this name."""
MEMORY_SERVICE_EPOCH, MEMORY_SERVICE_INCARNATION = 1, "memory-service"
REGISTRY_BLOB_PREFIX = "registry."
"""Name prefix of the blob with one node's registry of all namespaces. The node's name follows."""


def jobs_in_use(jobs: Iterable[JobStatus]) -> list[JobStatus]:
    """Return the jobs with checkpoints or processes, without the memory service."""
    return [one for one in jobs if (one.versions or one.clients) and one.job != MEMORY_SERVICE_JOB]
