"""The installed ``hyperpodrun`` with any torch version, also outside of pods.

Newer versions of torch have their own option ``--shutdown-timeout``, with which the agent's parser fails; here the
agent's option replaces it. Further options support machines that are not pods. ``--loopback`` restricts the agent's
server, which trusts every client, to this machine. ``--resource-config-dir`` sets the folder of
``pod_resourceconfig.json``. ``--local-port`` and ``--local-dir`` separate several agents on one machine and override
the job's command. For all other options see ``hyperpodrun --help``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peerstore.optional_packages import missing_package_error

_SHUTDOWN_TIMEOUT_S = 15
"""Default of the agent."""
_LOOPBACK = "127.0.0.1"
_DIRECTORY = "resource_config_dir"
_AGENT = "hyperpod_elastic_agent"
AGENT_INSTALL = "--no-deps hyperpod-elastic-agent"
"""Arguments of ``pip install``. The agent's dependencies would install another torch."""
_NEEDS = 'fastapi==0.131.0 "uvicorn[standard]" psutil'


def main(args: Sequence[str] | None = None) -> None:
    """Run an agent until its operator shuts it down."""
    try:
        agent: Any = importlib.import_module(f"{_AGENT}.run")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        install = AGENT_INSTALL if package == _AGENT else _NEEDS
        print(missing_package_error("hyperpodrun", package, install), file=sys.stderr)
        raise SystemExit(2) from None
    with _patched_agent(agent):
        agent.main(list(sys.argv[1:] if args is None else args))


@contextlib.contextmanager
def _patched_agent(agent: Any) -> Iterator[None]:
    """Patch the agent's module while one agent runs."""
    make, run = agent.get_args_parser, agent.run
    agent.get_args_parser = lambda: _parser(make)
    agent.run = lambda args: run(resolved_arguments(args))
    try:
        yield
    finally:
        agent.get_args_parser, agent.run = make, run


def _parser(make: Callable[[], argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = make()
    parser.conflict_handler = parser._optionals.conflict_handler = "resolve"
    parser.set_defaults(shutdown_timeout=_SHUTDOWN_TIMEOUT_S)  # torchrun's option of that name has no default
    group = parser.add_argument_group("this machine")
    group.add_argument("--loopback", action="store_true", help=f"Serve on {_LOOPBACK} and nowhere else.")
    group.add_argument(
        "--resource-config-dir",
        metavar="DIR",
        help="Directory to write pod_resourceconfig.json to. [/opt/ml/input/config]",
    )
    group.add_argument("--local-port", type=int, metavar="PORT", help="Port to serve on; overrides --server-port.")
    group.add_argument("--local-dir", metavar="DIR", help="Directory of the ranks' output and pod_resourceconfig.json.")
    return parser


def resolved_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """Translate this project's options into the agent's, and set its environment."""
    if args.loopback:
        args.server_host = _LOOPBACK
    if args.local_port is not None:
        args.server_port = args.local_port
    if args.local_dir:
        args.resource_config_dir = args.resource_config_dir or str(Path(args.local_dir) / "config")
        args.log_dir = str(Path(args.local_dir) / "logs")
        if args.redirects == args.tee == "0":
            args.redirects = "3"  # log rules read files
    if args.resource_config_dir:
        if "," in args.resource_config_dir or "=" in args.resource_config_dir:
            raise SystemExit(f"--resource-config-dir {args.resource_config_dir}: commas and equals signs are invalid")
        others = [args.rdzv_conf] if args.rdzv_conf else []
        args.rdzv_conf = ",".join([*others, f"{_DIRECTORY}={args.resource_config_dir}"])
    os.environ.setdefault("NNODES", str(args.nnodes).rpartition(":")[2])
    return args


if __name__ == "__main__":
    main()
