"""Commands ``peerstore serve`` and ``peerstore status``, and the options shared by node agents."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import msgspec

from peerstore.client.store_client import Client
from peerstore.errors import AgentUnreachableError, PeerStoreError, RequestError
from peerstore.server.store_server import daemonize, serve_store
from peerstore.settings import AgentPaths, StoreSettings, default_agent_paths
from peerstore.shard_records import StoreStatus
from peerstore.sizes_and_durations import show_seconds, show_size
from peerstore.suggestions import SuggestingParser
from peerstore.transport.unix import connect_to_agent

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE = 0, 1, 2, 5
"""The codes of the other commands, which this package does not import."""


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 refused or failed, 2 wrong arguments, 5 no agent answers."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as done:  # --help, or a wrong argument
        return int(done.code or EXIT_OK)
    place = AgentPaths(args.dir, explicit=True) if args.dir else default_agent_paths()
    try:
        return int(args.run(args, place))
    except RequestError as error:
        print(f"peerstore: {error}", file=sys.stderr)
        return EXIT_USAGE
    except PeerStoreError as error:
        print(f"peerstore: {error}", file=sys.stderr)
        return EXIT_FAILED


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every agent has."""
    settings = StoreSettings()
    parser.add_argument(
        "--budget",
        default=settings.budget,
        help="memory for checkpoints, 64GiB or 30%% of the node's (default %(default)s)",
    )
    parser.add_argument(
        "--slots-per-part",
        type=int,
        default=settings.slots_per_part,
        help="checkpoint buffers per rank (default %(default)s)",
    )
    parser.add_argument(
        "--burst-slots",
        type=int,
        default=settings.burst_slots,
        help="extra buffers allowed while older checkpoints are still being copied or read (default %(default)s)",
    )
    parser.add_argument(
        "--lease-grace-s",
        type=float,
        default=settings.lease_grace_s,
        help="seconds to wait for a rank that stopped responding during a save before its buffer is reclaimed "
        f"(default {settings.lease_grace_s:g})",
    )
    parser.add_argument(
        "--job-ttl-s",
        type=float,
        default=settings.job_ttl_s,
        help=f"seconds to keep the checkpoints of a job after its last process (default {settings.job_ttl_s:.0f})",
    )
    parser.add_argument(
        "--linger-s", type=float, default=None, help="exit after this many idle seconds (default never)"
    )
    parser.add_argument("--detach", action="store_true", help="run in the background")
    parser.add_argument(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="lowest level of messages (default %(default)s)",
    )


def store_settings_from_args(args: argparse.Namespace) -> StoreSettings:
    return StoreSettings(**{field.name: getattr(args, field.name) for field in fields(StoreSettings)})


def start_agent_process(args: argparse.Namespace) -> None:
    """Detach from the foreground if requested, and log to standard error."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads spin after the import, and an agent needs none
    if args.detach:
        daemonize()
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


def _parser() -> argparse.ArgumentParser:
    parser = SuggestingParser(prog="peerstore", description="Keep sealed shards in this machine's memory.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = SuggestingParser(add_help=False)
    shared.add_argument(
        "--dir", type=Path, help="the agent's directory (default: $PEERSTORE_DIR or /dev/shm/peerstore-UID)"
    )

    serving = commands.add_parser("serve", parents=[shared], help="run the store of this node")
    add_serve_arguments(serving)
    serving.set_defaults(run=_serve)

    asking = commands.add_parser("status", parents=[shared], help="print the state of this node's store")
    asking.add_argument("--json", action="store_true", help="print JSON")
    asking.set_defaults(run=_status)
    return parser


def _serve(args: argparse.Namespace, place: AgentPaths) -> int:
    start_agent_process(args)
    serve_store(place, store_settings_from_args(args), version=_version(), linger_s=args.linger_s)
    return EXIT_OK


def _status(args: argparse.Namespace, place: AgentPaths) -> int:
    try:
        with contextlib.closing(
            Client(lambda: connect_to_agent(place.socket, named=place.explicit), retry_s=0)
        ) as client:
            status = client.status()
    except AgentUnreachableError as error:
        print(f"peerstore: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    print(json.dumps(msgspec.to_builtins(status), indent=2) if args.json else format_store_status(status))
    return EXIT_OK


def format_store_status(status: StoreStatus) -> str:
    """Return the status as text."""
    arena = status.arena
    used = f"{show_size(arena.sealed_bytes)} sealed, {show_size(arena.allocated_bytes)} in {arena.slots} slots"
    state = f"{arena.free_slots} free, {arena.leases} being written"
    lines = [f"arena   {used} ({state}), budget {show_size(arena.budget_bytes)}"]
    for job in status.jobs:
        newest = "no whole version" if job.newest_committed is None else f"newest whole version {job.newest_committed}"
        left = "" if job.expires_in_s is None else f", forgotten in {show_seconds(max(0.0, job.expires_in_s))}"
        lines.append(
            f"job     {job.job}: {newest}, {job.versions} versions, epoch {job.epoch}, {job.clients} processes{left}"
        )
    lines += [f"damage  {damage.what}: {damage.reason}" for damage in status.damage_reports]
    lines += [f"aside   {one.name} ({show_size(one.size_bytes)}): {one.reason}" for one in status.unrecognized]
    if status.verifying:
        lines.append(f"        still verifying {status.verifying} shards of the last agent")
    return "\n".join(lines)


def _version() -> str:
    try:
        return metadata.version("tieredckpt")
    except metadata.PackageNotFoundError:
        return "0+unknown"


if __name__ == "__main__":
    sys.exit(main())
