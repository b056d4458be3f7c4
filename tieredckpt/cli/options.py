"""Options that several commands have, and how a command finds its screen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tieredckpt.cli.exits import EXIT_HELP
from tieredckpt.cli.screen import Screen
from tieredckpt.cli.sight import agent_place_of
from tieredckpt.location import parse_location
from tieredckpt.settings import Settings, load_settings, override

F = TypeVar("F", bound=Callable[..., Any])

pass_screen = click.make_pass_decorator(Screen)


def _set(name: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def keep(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            setattr(context.ensure_object(Screen), name, True)

    return keep


def printing(command: F) -> F:
    """``--json`` and ``--debug``."""
    debug = click.option(
        "--debug", is_flag=True, expose_value=False, callback=_set("debug"), help="Show where an error came from."
    )
    as_json = click.option(
        "--json", is_flag=True, expose_value=False, is_eager=True, callback=_set("as_json"), help="Print JSON."
    )
    return as_json(debug(command))


def looking(command: F) -> F:
    """Where to look: this node's agent and a durable tier."""
    directory = click.option(
        "--agent-dir",
        type=click.Path(path_type=Path),
        help="The node agent's directory. [default: agent.directory, /dev/shm/tieredckpt-UID, an agent here with JOB]",
    )
    durable = click.option(
        "--durable",
        metavar="URL",
        help="The durable tier, s3://bucket/prefix or /path. [default: what the agent knows, durable.url]",
    )
    return directory(durable(printing(command)))


ANY_JOB = ""


def settings_for(agent_dir: Path | None, durable: str | None, target: str | None = None) -> Settings:
    """Settings of the environment, with what the command line says on top.

    Where neither says which agent is meant, it is one that has the job that ``target`` names (``ANY_JOB``: any job).
    """
    changes: dict[str, dict[str, Any]] = {}
    if agent_dir is not None:
        changes["agent"] = {"directory": str(agent_dir.resolve())}
    if durable is not None:
        changes["durable"] = {"url": durable}
    settings = override(load_settings(), **changes)
    if target is None or settings.agent.directory:
        return settings
    found = agent_place_of(settings, str(parse_location(target).job) if target else None)
    return settings if found == settings.agent_directory else override(settings, agent={"directory": str(found)})


def with_exits(command: F) -> F:
    """Exit codes at the end of the command's help."""
    command.__doc__ = f"{command.__doc__}\n\n    {EXIT_HELP.replace(chr(10), chr(10) + '    ')}"
    return command
