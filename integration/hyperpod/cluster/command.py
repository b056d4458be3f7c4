"""``tieredckpt cluster``: a HyperPod cluster's memory flag, and the health labels of its nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tieredckpt.cli.exits import CommandError, Exit
from tieredckpt.cli.groups import Commands
from tieredckpt.cli.options import pass_screen, printing
from tieredckpt.cli.screen import Screen

if TYPE_CHECKING:
    from integration.hyperpod.cluster.api import Clusters
    from integration.hyperpod.cluster.flag import TieredStorageConfig
    from integration.hyperpod.cluster.updating import Cluster

F = TypeVar("F", bound=Callable[..., Any])
_OWN = {
    "show": "integration.hyperpod.cluster.command:show",
    "enable": "integration.hyperpod.cluster.command:enable",
    "disable": "integration.hyperpod.cluster.command:disable",
    "node-health": "integration.hyperpod.cluster.marking:node_health",
}


_EXITS = """\b
Exit codes:
  0  done, or so already
  1  failed; the message says why
  2  the command line, the flag or a name is wrong
  3  there is no such cluster, node or ledger
  5  SageMaker or Kubernetes could not be asked: how the cluster is, is unknown
  6  refused (credentials, permission)"""


@click.group("cluster", cls=Commands, own=_OWN, epilog=_EXITS)
def cluster() -> None:
    """A HyperPod cluster: how much of its nodes' memory is for checkpoints, and how its nodes are."""


def asking(command: F) -> F:
    """How the cluster is reached."""
    for name, metavar, text in (
        ("--endpoint-url", "URL", "Another endpoint than AWS's."),
        ("--profile", "NAME", "A profile of the AWS configuration."),
        ("--region", "REGION", "[default: the ARN's, $AWS_REGION, the profile's]"),
    ):
        command = click.option(name, metavar=metavar, help=text)(command)
    return command


def changing(command: F) -> F:
    """What all changes have."""
    command = asking(printing(command))
    for option in (
        click.option(
            "--timeout", "timeout_s", type=float, default=1800.0, show_default=True, metavar="S", help="Of --wait."
        ),
        click.option("--wait", "waits", is_flag=True, help="Return when the cluster has it."),
        click.option("--dry-run", is_flag=True, help="Show the request and send nothing."),
        click.option(
            "--node-recovery",
            type=click.Choice(("Automatic", "None")),
            help="UpdateCluster wants it beside the flag. [default: as the cluster has it]",
        ),
        click.option("--cluster", "name", required=True, metavar="NAME|ARN"),
    ):
        command = option(command)
    return command


@click.command("show")
@click.option("--cluster", "name", metavar="NAME|ARN", help="Ask the API.")
@click.option("--file", "path", type=click.Path(path_type=Path), help="A file, or a directory with a ConfigMap.")
@asking
@printing
@pass_screen
def show(
    screen: Screen,
    /,
    *,
    name: str | None,
    path: Path | None,
    region: str | None,
    profile: str | None,
    endpoint_url: str | None,
) -> int:
    """How much memory the cluster gives to checkpoints, and which settings that makes.

    What --json prints is what agents and jobs read: `--cluster-config hyperpod:FILE`, TIEREDCKPT_CLUSTER=hyperpod:FILE.
    """
    if (name is None) == (path is None):
        raise CommandError("name either --cluster or --file", code=Exit.USAGE)
    if path is not None:
        from integration.hyperpod.cluster.flag import flag_at

        found = flag_at(path)
        _show(screen, found, {"file": str(path)}, [str(path)])
    else:
        at = _clusters(region, profile, endpoint_url).describe(name or "")
        _show(screen, at.flag, _about(at), [f"cluster {at.name}, {at.status}"])
    return Exit.OK


@click.command("enable")
@click.option("--percent", type=click.IntRange(1, 100), help="Of each node's memory. [default: as it was]")
@changing
@pass_screen
def enable(screen: Screen, /, *, percent: int | None, name: str, **options: Any) -> int:
    """Give a share of the nodes' memory to checkpoints."""
    from integration.hyperpod.cluster.flag import LEAST_ADVISED_PERCENT
    from integration.hyperpod.cluster.updating import enabling

    if percent is not None and percent < LEAST_ADVISED_PERCENT:
        screen.note(f"AWS's guide asks for {LEAST_ADVISED_PERCENT} percent or more; the API takes {percent}")
    return _change(screen, name, lambda found: enabling(found, percent), **options)


@click.command("disable")
@changing
@pass_screen
def disable(screen: Screen, /, *, name: str, **options: Any) -> int:
    """Keep no checkpoints in the nodes' memory. Jobs that read the flag write to their durable tier directly."""
    from integration.hyperpod.cluster.flag import DISABLED

    return _change(screen, name, lambda _: DISABLED, **options)


def _change(
    screen: Screen,
    name: str,
    want: Callable[[Cluster], TieredStorageConfig],
    *,
    node_recovery: str | None,
    dry_run: bool,
    waits: bool,
    timeout_s: float,
    region: str | None,
    profile: str | None,
    endpoint_url: str | None,
) -> int:
    from integration.hyperpod.cluster.updating import has, update_request

    clusters = _clusters(region, profile, endpoint_url)
    found = clusters.describe(name)
    wanted = want(found)
    if has(found, wanted):
        _show(screen, found.flag, {**_about(found), "changed": False}, [f"cluster {found.name} has it already"])
        return Exit.OK
    request = update_request(found, wanted, node_recovery)
    if dry_run:
        said = {**_about(found), "changed": False, "request": request}
        screen.result(said, lambda out: out.print_json(data={"UpdateCluster": request}))
        return Exit.OK
    clusters.update(name, request)
    lines = [f"cluster {found.name} was asked for it (`tieredckpt cluster show --cluster {found.name}` follows)"]
    if waits:
        with screen.waiting(f"cluster {found.name} is updating"):
            found = clusters.wait(name, wanted, timeout_s=timeout_s)
        lines = [f"cluster {found.name}, {found.status}"]
    _show(screen, wanted, {**_about(found), "changed": True, "request": request}, lines)
    return Exit.OK


def _clusters(region: str | None, profile: str | None, endpoint_url: str | None) -> Clusters:
    from integration.hyperpod.cluster.api import Clusters

    return Clusters(region=region, profile=profile, endpoint_url=endpoint_url)


def _about(found: Cluster) -> dict[str, Any]:
    return {"cluster": found.name, "arn": found.arn, "status": found.status, "node_recovery": found.node_recovery}


def _show(screen: Screen, flag: TieredStorageConfig, about: dict[str, Any], lines: list[str]) -> None:
    import msgspec
    from rich.console import Console
    from rich.markup import escape

    from integration.hyperpod.cluster.flag import KEY, settings_of

    settings = settings_of(flag)

    def tell(out: Console) -> None:
        for line in lines:
            out.print(f"[bold]{escape(line)}[/]")
        out.print(f"memory for checkpoints {flag.described()}")
        out.print(f"settings: {escape(_words(settings))}")

    screen.result({**about, KEY: msgspec.to_builtins(flag), "settings": settings}, tell)


def _words(settings: dict[str, Any]) -> str:
    flat = [f"enabled={str(settings['enabled']).lower()}"]
    return " ".join([*flat, *(f"agent.{key}={value}" for key, value in settings.get("agent", {}).items())])
