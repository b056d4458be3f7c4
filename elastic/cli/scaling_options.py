"""Options for the size and the timeouts of a job, and its policy file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import msgspec
import yaml

from elastic import settings
from elastic.control.control_messages import MAX_NODES
from elastic.errors import PolicyError
from elastic.schedulers.allocation import node_range
from elastic.world.scaling_policy import PolicyFields, ScalingPolicy
from tieredckpt.bounded_yaml import load_yaml

POLICY_READER_ENTRY_POINTS = "elastic.policy_readers"
"""Entry points of packages that read policies in other formats, named by a top-level key of the file."""
PolicyReader = Callable[[Mapping[str, Any]], PolicyFields]


def load_scaling_policy(nnodes: str, file: Path | None, **options: Any) -> ScalingPolicy:
    """Return the policy of the file. Options that are not ``None`` replace its fields."""
    policy = _build_policy(nnodes, file, **options)
    if policy.max_replicas > MAX_NODES:
        raise PolicyError(f"{policy.max_replicas} nodes at the most: a job has {MAX_NODES} or fewer; write less")
    return policy


def _build_policy(nnodes: str, file: Path | None, **options: Any) -> ScalingPolicy:
    least, most = node_range(nnodes)
    ends = {"min_replicas": least, "max_replicas": most}
    chosen = {name: value for name, value in options.items() if value is not None}
    tree = _read(file) if file is not None else {}
    reader = _policy_reader(tree)
    if reader is not None:
        read = reader(tree)
        return ScalingPolicy.from_fields(read._replace(fields=ends | read.fields), **chosen)
    try:
        return msgspec.convert(ends | tree | chosen, ScalingPolicy)
    except msgspec.ValidationError as error:
        raise PolicyError(f"{file or 'the policy'}: {error}") from error


def _policy_reader(tree: dict[str, Any]) -> PolicyReader | None:
    """Return the installed reader for one of the file's keys; ``None`` for a file in our own format."""
    for entry in sorted(entry_points(group=POLICY_READER_ENTRY_POINTS), key=lambda one: one.name):
        if entry.name in tree:
            try:
                reader: PolicyReader = entry.load()
            except (ImportError, AttributeError) as error:
                raise PolicyError(f"{entry.value}, which reads {entry.name}, cannot be loaded: {error}") from error
            return reader
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise PolicyError(f"the policy cannot be read from {file}: {error}") from error
    if not isinstance(tree, dict):
        raise PolicyError(f"{file} is not a policy: write names and values, for example min_replicas: 2")
    return tree


def scaling_options(command: Any) -> Any:
    """Add the options for the size and the timeouts of a job."""
    for option in reversed(
        (
            click.option("--nnodes", metavar="MIN[:MAX]", help="Number of nodes. [default: the scheduler's, or 1]"),
            click.option(
                "--nproc",
                type=click.IntRange(1, 1024),
                help="Ranks per node. [default: the GPUs that the scheduler allocated, or 1]",
            ),
            click.option(
                "--policy",
                type=click.Path(path_type=Path, dir_okay=False),
                help="YAML file with fields of the scaling policy, or in the format of an installed package.",
            ),
            click.option(
                "--grow-after",
                type=float,
                metavar="S",
                help="Wait this long for more new nodes before adding them. [default: 60]",
            ),
            click.option(
                "--shrink-after",
                type=float,
                metavar="S",
                help="Wait this long for a replacement before the job shrinks. [default: 30]",
            ),
            click.option(
                "--pause-timeout",
                type=float,
                metavar="S",
                help="Seconds that ranks get to reach a common step and save it. [default: 600]",
            ),
            click.option(
                "--abort-timeout",
                type=float,
                envvar=settings.ABORT,
                metavar="S",
                help="Seconds that a process gets to leave the world after a fault; then it logs its stacks and is "
                "replaced. After a hang at most 4. [default: 10] [$ELASTIC_ABORT_TIMEOUT]",
            ),
            click.option("--max-restarts", type=int, metavar="N", help="Stop the job after N restarts."),
            click.option(
                "--hang-timeout",
                default="auto",
                envvar=settings.HANG,
                metavar="S|auto|off",
                help="Treat the job as hung if no rank finishes a step for this long; auto: 10 times the longest step, "
                "at least 600 s. [$ELASTIC_HANG_TIMEOUT]",
            ),
            click.option(
                "--first-step-timeout",
                default="auto",
                envvar=settings.FIRST_STEP,
                metavar="S|auto|off",
                help="Hang timeout for the first step after a (re)start; auto: 10 times the longest seen, initially "
                "3600 s. [$ELASTIC_FIRST_STEP_TIMEOUT]",
            ),
            click.option(
                "--store",
                default="",
                metavar="single|rootless|HOST:PORT",
                help="Rendezvous store of the ranks: on one node, on every node, or an existing one. "
                "[default: single, or rootless with $ELASTIC_ROOTLESS=1]",
            ),
        )
    ):
        command = option(command)
    return command


def scaling_policy(options: dict[str, Any]) -> ScalingPolicy:
    """Return the policy of the file with the options of the command line."""
    return load_scaling_policy(
        options["nnodes"] or "1",
        options["policy"],
        scaling_timeout_s=options["grow_after"],
        faulty_scale_down_timeout_s=options["shrink_after"],
        graceful_shutdown_timeout_s=options["pause_timeout"],
        abort_timeout_s=options["abort_timeout"],
        job_max_retry_count=options["max_restarts"],
    )
