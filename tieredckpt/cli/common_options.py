"""Options that several commands share, and the settings they select."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tieredckpt.agent.local_agents import find_agent_directory
from tieredckpt.cli.command_output import CommandOutput
from tieredckpt.cli.exit_codes import EXIT_CODES_HELP
from tieredckpt.errors import UsageError
from tieredckpt.location import Location, parse_location, parse_step
from tieredckpt.settings import Settings, load_settings, override_settings

F = TypeVar("F", bound=Callable[..., Any])

pass_output = click.make_pass_decorator(CommandOutput)


def _flag_setter(name: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def set_flag(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            setattr(context.ensure_object(CommandOutput), name, True)

    return set_flag


def output_options(command: F) -> F:
    """Add the options ``--json`` and ``--debug``."""
    debug = click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=_flag_setter("debug"),
        help="Show where an error came from.",
    )
    as_json = click.option(
        "--json", is_flag=True, expose_value=False, is_eager=True, callback=_flag_setter("as_json"), help="Print JSON."
    )
    return as_json(debug(command))


def tier_options(command: F) -> F:
    """Add the options for the agent and the durable tier, and those of :func:`output_options`."""
    directory = click.option(
        "--agent-dir",
        type=click.Path(path_type=Path),
        help="Directory of the agent (default agent.directory, /dev/shm/tieredckpt-UID, or that of an agent with JOB).",
    )
    durable = click.option(
        "--durable",
        metavar="URL",
        help="Durable tier, s3://bucket/prefix or /path (default the one that the agent knows, or durable.url).",
    )
    return directory(durable(output_options(command)))


ANY_JOB = ""


def settings_from_options(agent_dir: Path | None, durable: str | None, target: str | None = None) -> Settings:
    """Return the settings of the environment, overridden by the command line.

    If neither names an agent, an agent of this machine that has the job of ``target`` is used (``ANY_JOB``: any job).
    """
    changes: dict[str, dict[str, Any]] = {}
    if agent_dir is not None:
        changes["agent"] = {"directory": str(agent_dir.resolve())}
    if durable is not None:
        changes["durable"] = {"url": durable}
    settings = override_settings(load_settings(), **changes)
    if target is None or settings.agent.directory:
        return settings
    found = find_agent_directory(settings, str(parse_location(target).job) if target else None)
    if found == settings.agent_directory:
        return settings
    context = click.get_current_context(silent=True)
    if target == ANY_JOB and context is not None:
        context.ensure_object(CommandOutput).info(
            f"no agent with a job answers in {settings.agent_directory}, the usual place; using the one in {found}"
        )
    return override_settings(settings, agent={"directory": str(found)})


def with_exit_code_help(command: click.Command) -> click.Command:
    """List the exit codes at the end of the command's help."""
    command.epilog = EXIT_CODES_HELP
    return command


def parse_step_target(target: str) -> Location:
    """Return the location of ``target``, or raise :class:`UsageError` if it names no step."""
    location = parse_location(target)
    if location.step is None:
        raise UsageError(f"{target!r} names no step: write {location.job}/step-N (`tieredckpt ls {location.job}`)")
    return location


def parse_job_and_step(target: str, step: str | None, epoch: int | None = None) -> Location:
    """Return the location that ``JOB STEP[@EPOCH]`` or ``JOB/step-N[@EPOCH]`` and ``--epoch`` name."""
    location = parse_location(target)
    number, branch = (location.step, None) if step is None else parse_step(step)
    if number is None:
        raise UsageError(f"{target!r} names no step: write {location.job} N (`tieredckpt ls {location.job}`)")
    if location.step not in (None, number):
        raise UsageError(f"{target} and {step} are different steps")
    epochs = {one for one in (location.epoch, branch, epoch) if one is not None}
    if len(epochs) > 1:
        raise UsageError(f"{' and '.join(map(str, sorted(epochs)))} are different epochs: name one")
    return Location(location.job, number, next(iter(epochs), None))


def step_argument(command: F) -> F:
    """Add the arguments for one step of a job: JOB, STEP and ``--epoch``."""
    epoch = click.option(
        "--epoch", type=click.IntRange(min=0), metavar="E", help="The step that this epoch saved; as STEP@E."
    )
    return click.argument("target", metavar="JOB")(
        click.argument("step", metavar="STEP[@EPOCH]", required=False)(epoch(command))
    )


def confirm_deletion(screen: CommandOutput, question: str) -> None:
    """Ask for confirmation on a terminal; raise ``UsageError`` without one."""
    if screen.as_json or not sys.stdin.isatty():
        raise UsageError(f"{question} Add --yes: without a terminal there is no confirmation")
    click.confirm(question, abort=True, err=True)
