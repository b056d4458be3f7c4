"""``tieredckpt cluster``: show, enable, disable, node-health."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from integration.hyperpod.job_resource import NodeHealth
from tieredckpt.cli import LazyCommandGroup
from tieredckpt.cli.command_output import CommandOutput, format_age, text_table
from tieredckpt.cli.common_options import output_options, pass_output
from tieredckpt.cli.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from integration.hyperpod.cluster.node_health import NodeHealthLabels
    from integration.hyperpod.cluster.tiered_storage_config import (
        ClusterDescription,
        HyperPodClusterApi,
        TieredStorageConfig,
    )


@click.command("node-health", short_help="Show or set a node's health label.")
@click.argument("node", required=False)
@click.option("--set", "value", type=click.Choice([one.value for one in NodeHealth]), help="Set NODE's label.")
@click.option(
    "--event-log", "event_logs", multiple=True, metavar="DIR|JOB", help="Event log whose device faults are counted."
)
@click.option("--apply", "applies", is_flag=True, help="Set the labels that would get worse; needs --event-log.")
@click.option(
    "--node-name",
    "node_names",
    multiple=True,
    metavar="OURS=THEIRS",
    help="Name of a node in the event log, and in Kubernetes; may be repeated.",
)
@click.option("--context", metavar="NAME", help="kubeconfig context (default the current one).")
@click.option(
    "--kubeconfig", metavar="FILE", help="kubeconfig file (default the pod's service account, or $KUBECONFIG)."
)
@output_options
@pass_output
def cluster_node_health_command(
    screen: CommandOutput,
    /,
    *,
    node: str | None,
    value: str | None,
    event_logs: tuple[str, ...],
    applies: bool,
    node_names: tuple[str, ...],
    context: str | None,
    kubeconfig: str | None,
) -> int:
    """Show a node's health label and the label its faults suggest; --set changes it.

    HyperPod reboots and replaces nodes by this label. With --event-log, device faults within a day are counted. A lost
    device or damaged device memory suggests a reboot, the second one a replacement. A stuck device or failed links
    suggest a reboot after two faults, a replacement after four. Labels are only set to worse values; HyperPod resets
    them.
    """
    if bool(node) == bool(event_logs) or (value and not node) or ((applies or node_names) and not event_logs):
        text = "say either NODE, with --set or without, or --event-log, with --apply and --node-name or without"
        raise CommandError(text, code=ExitCode.USAGE)
    if node:
        return _one(screen, node, NodeHealth(value) if value else None, _labels(context, kubeconfig))
    names = dict(_pair(one) for one in node_names)
    return _health_from_event_logs(
        screen, event_logs, names, (lambda: _labels(context, kubeconfig)) if applies else None
    )


def _one(screen: CommandOutput, node: str, value: NodeHealth | None, labels: NodeHealthLabels) -> int:
    if value is None:
        health = labels.get(node)
        screen.result({"node": node, "health": health}, lambda out: out.print(f"{node} {health or 'has no label'}"))
        return ExitCode.OK
    was = labels.set_if(node, value, when=lambda now: now != value.value)
    summary = {"node": node, "health": value.value, "was": was}
    screen.result(summary, lambda out: out.print(f"{node} {value.value} (was: {was or 'no label'})"))
    return ExitCode.OK


def _health_from_event_logs(
    screen: CommandOutput,
    directories: Sequence[str],
    names: dict[str, str],
    connect: Callable[[], NodeHealthLabels] | None,
) -> int:
    from integration.hyperpod.cluster.node_health import (
        DeviceFault,
        device_faults,
        health_after_faults,
        is_worse_health,
    )
    from tieredckpt.event_log import read_event_log
    from tieredckpt.event_log.log_reader import find_event_log

    now = time.time()
    faults: dict[str, list[DeviceFault]] = {}
    for directory in directories:
        for fault in device_faults(read_event_log(find_event_log(directory)).events):
            faults.setdefault(names.get(fault.node, fault.node), []).append(fault)
    rows: list[dict[str, Any]] = []
    labels = connect() if connect is not None and faults else None
    for node, found in sorted(faults.items()):
        wanted = health_after_faults(found, now)
        last = max(found, key=lambda fault: fault.at)
        row: dict[str, Any] = {"node": node, "faults": len(found), "wanted": wanted.value, "last_at": last.at}
        row["last"] = f"{last.kind.value}: {last.words}"
        if labels is not None:
            was = labels.set_if(node, wanted, when=functools.partial(is_worse_health, wanted=wanted))
            row |= {"was": was, "set": is_worse_health(was, wanted)}
        rows.append(row)
    screen.result({"nodes": rows}, lambda out: _print_node_health(out, rows, now))
    return ExitCode.OK


def _print_node_health(out: Console, rows: Sequence[dict[str, Any]], now: float) -> None:
    if not rows:
        out.print("no device faults")
        return
    columns = ("NODE", "FAULTS", "LAST", "AGE", "TO BE", "")
    cells = [
        (
            row["node"],
            str(row["faults"]),
            row["last"][:60],
            format_age(now - row["last_at"]),
            row["wanted"],
            "set" if row.get("set") else "",
        )
        for row in rows
    ]
    out.print(text_table(columns, cells, right=("FAULTS",)))


def _labels(context: str | None, kubeconfig: str | None) -> NodeHealthLabels:
    from integration.hyperpod.cluster.node_health import connect_node_labels

    return connect_node_labels(context, kubeconfig)


def _pair(text: str) -> tuple[str, str]:
    event_name, separator, node_name = text.partition("=")
    if not (event_name and separator and node_name):
        raise CommandError(f"--node-name {text!r}: write OURS=THEIRS", code=ExitCode.USAGE)
    return event_name, node_name


F = TypeVar("F", bound=Callable[..., Any])
_COMMANDS = {
    "show": "integration.hyperpod.cluster.cluster_cli:cluster_show_command",
    "enable": "integration.hyperpod.cluster.cluster_cli:cluster_enable_command",
    "disable": "integration.hyperpod.cluster.cluster_cli:cluster_disable_command",
    "node-health": "integration.hyperpod.cluster.cluster_cli:cluster_node_health_command",
}


_EXITS = """\b
Exit codes:
  0  done, or so already
  1  failed; the message says why
  2  the command line, the flag or a name is wrong
  3  there is no such cluster, node or event log
  5  SageMaker or Kubernetes cannot be reached: the state of the cluster is unknown
  6  refused (credentials, permission)"""


@click.group(
    "cluster",
    cls=LazyCommandGroup,
    own=_COMMANDS,
    epilog=_EXITS,
    short_help="Show and change a HyperPod cluster's checkpoint memory.",
)
def cluster_group() -> None:
    """Show and change how a HyperPod cluster uses its nodes' memory, and the health of its nodes."""


def cluster_api_options(command: F) -> F:
    """Add the options of the connection to AWS."""
    for name, metavar, text in (
        ("--endpoint-url", "URL", "Endpoint to use instead of AWS's."),
        ("--profile", "NAME", "Profile of the AWS configuration."),
        ("--region", "REGION", "AWS region (default the ARN's, $AWS_REGION, the profile's)."),
    ):
        command = click.option(name, metavar=metavar, help=text)(command)
    return command


def cluster_change_options(command: F) -> F:
    """Add the options common to all changes."""
    command = cluster_api_options(output_options(command))
    for option in (
        click.option(
            "--timeout",
            "timeout_s",
            type=float,
            default=1800.0,
            show_default=True,
            metavar="S",
            help="Seconds that --wait waits.",
        ),
        click.option("--wait", "waits", is_flag=True, help="Wait until the cluster has applied the change."),
        click.option("--dry-run", is_flag=True, help="Print the request without sending it."),
        click.option(
            "--node-recovery",
            type=click.Choice(("Automatic", "None")),
            help="Value of NodeRecovery to send; the UpdateCluster API requires it (default the cluster's).",
        ),
        click.option("--cluster", "name", required=True, metavar="NAME|ARN", help="Cluster to change."),
    ):
        command = option(command)
    return command


@click.command("show", short_help="Show the memory reserved for checkpoints.")
@click.option("--cluster", "name", metavar="NAME|ARN", help="Cluster to describe through the API.")
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    help="File with the description, or directory of a mounted ConfigMap.",
)
@cluster_api_options
@output_options
@pass_output
def cluster_show_command(
    screen: CommandOutput,
    /,
    *,
    name: str | None,
    path: Path | None,
    region: str | None,
    profile: str | None,
    endpoint_url: str | None,
) -> int:
    """Show how much memory the cluster reserves for checkpoints, and the resulting settings.

    Agents and jobs read the output of --json: `--cluster-config hyperpod:FILE`, TIEREDCKPT_CLUSTER=hyperpod:FILE.
    """
    if (name is None) == (path is None):
        raise CommandError("name either --cluster or --file", code=ExitCode.USAGE)
    if path is not None:
        from integration.hyperpod.cluster.tiered_storage_config import read_tiered_storage_config

        found = read_tiered_storage_config(path)
        _print_cluster(screen, found, {"file": str(path)}, [str(path)])
    else:
        at = _clusters(region, profile, endpoint_url).describe(name or "")
        _print_cluster(screen, at.tiered_storage, _about(at), [f"cluster {at.name}, {at.status}"])
    return ExitCode.OK


@click.command("enable")
@click.option("--percent", type=click.IntRange(1, 100), help="Percent of each node's memory (default unchanged).")
@cluster_change_options
@pass_output
def cluster_enable_command(screen: CommandOutput, /, *, percent: int | None, name: str, **options: Any) -> int:
    """Reserve a share of the nodes' memory for checkpoints."""
    from integration.hyperpod.cluster.tiered_storage_config import MIN_ADVISED_PERCENT, enabled_config

    if percent is not None and percent < MIN_ADVISED_PERCENT:
        screen.info(f"AWS's guide asks for {MIN_ADVISED_PERCENT} percent or more; the API takes {percent}")
    return _change(screen, name, lambda found: enabled_config(found, percent), **options)


@click.command("disable")
@cluster_change_options
@pass_output
def cluster_disable_command(screen: CommandOutput, /, *, name: str, **options: Any) -> int:
    """Disable checkpoints in memory. Jobs that read the flag write directly to their durable tier."""
    from integration.hyperpod.cluster.tiered_storage_config import TIERED_STORAGE_DISABLED

    return _change(screen, name, lambda _: TIERED_STORAGE_DISABLED, **options)


def _change(
    screen: CommandOutput,
    name: str,
    want: Callable[[ClusterDescription], TieredStorageConfig],
    *,
    node_recovery: str | None,
    dry_run: bool,
    waits: bool,
    timeout_s: float,
    region: str | None,
    profile: str | None,
    endpoint_url: str | None,
) -> int:
    from integration.hyperpod.cluster.tiered_storage_config import has_config, update_request

    clusters = _clusters(region, profile, endpoint_url)
    found = clusters.describe(name)
    wanted = want(found)
    if has_config(found, wanted):
        _print_cluster(
            screen, found.tiered_storage, {**_about(found), "changed": False}, [f"cluster {found.name} has it already"]
        )
        return ExitCode.OK
    request = update_request(found, wanted, node_recovery)
    if dry_run:
        said = {**_about(found), "changed": False, "request": request}
        screen.result(said, lambda out: out.print_json(data={"UpdateCluster": request}))
        return ExitCode.OK
    clusters.update(name, request)
    lines = [f"cluster {found.name} was asked for it (`tieredckpt cluster show --cluster {found.name}` follows)"]
    if waits:
        with screen.spinner(f"cluster {found.name} is updating"):
            found = clusters.wait(name, wanted, timeout_s=timeout_s)
        lines = [f"cluster {found.name}, {found.status}"]
    _print_cluster(screen, wanted, {**_about(found), "changed": True, "request": request}, lines)
    return ExitCode.OK


def _clusters(region: str | None, profile: str | None, endpoint_url: str | None) -> HyperPodClusterApi:
    from integration.hyperpod.cluster.tiered_storage_config import HyperPodClusterApi

    return HyperPodClusterApi(region=region, profile=profile, endpoint_url=endpoint_url)


def _about(found: ClusterDescription) -> dict[str, Any]:
    return {"cluster": found.name, "arn": found.arn, "status": found.status, "node_recovery": found.node_recovery}


def _print_cluster(screen: CommandOutput, flag: TieredStorageConfig, about: dict[str, Any], lines: list[str]) -> None:
    import msgspec
    from rich.markup import escape

    from integration.hyperpod.cluster.tiered_storage_config import TIERED_STORAGE_KEY, tiered_storage_settings

    settings = tiered_storage_settings(flag)

    def print_text(out: Console) -> None:
        for line in lines:
            out.print(f"[bold]{escape(line)}[/]")
        out.print(f"memory for checkpoints {flag.describe()}")
        out.print(f"settings: {escape(_words(settings))}")

    screen.result({**about, TIERED_STORAGE_KEY: msgspec.to_builtins(flag), "settings": settings}, print_text)


def _words(settings: dict[str, Any]) -> str:
    flat = [f"enabled={str(settings['enabled']).lower()}"]
    return " ".join([*flat, *(f"agent.{key}={value}" for key, value in settings.get("agent", {}).items())])
