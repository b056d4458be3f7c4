"""``tieredckpt agent`` with ``agent ls``, ``stop`` and ``restart``, and ``tieredckpt demo``."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from peerstore.client.agent_launcher import connect_or_launch_agent, replace_hung_agent, silence_of_agent, stop_agent
from peerstore.client.store_client import Client
from peerstore.daemon_process import peer_credentials, process_start_time
from peerstore.errors import PeerStoreError
from peerstore.server.store_server import hold_agent_lock
from peerstore.settings import AgentPaths
from peerstore.shard_records import StoreStatus
from peerstore.sizes_and_durations import show_count, show_size
from peerstore.store.arena import TmpfsArena
from peerstore.store.slot_metadata import EXPIRED_JOB_METADATA
from peerstore.transport.unix import connect_to_agent
from tieredckpt.agent.local_agents import agent_directories
from tieredckpt.cli.command_output import CommandOutput, format_age, literal, text_table
from tieredckpt.cli.common_options import confirm_deletion, output_options, pass_output, with_exit_code_help
from tieredckpt.cli.exit_codes import CommandError, ExitCode
from tieredckpt.cli.help_format import SuggestingGroup, with_help_format
from tieredckpt.errors import UsageError
from tieredckpt.memory_service_options import jobs_in_use
from tieredckpt.settings import load_settings, override_settings

_STOP_S = 60.0
_LISTENS = "0A"
"""State of a listening socket in ``/proc/net/tcp``."""
_HANGS_S = 1.0
"""Seconds without a greeting, and without running, after which an agent hangs."""


class AgentGroup(SuggestingGroup):
    """Command group that runs the agent if the first word is an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and not args[0].startswith("-") else ["run", *args])


@click.group("agent", cls=AgentGroup, add_help_option=False, short_help="Run, list, stop or restart node agents.")
def agent_group() -> None:
    """Run this node's agent: memory tier, drain, metrics."""


@agent_group.command("run", hidden=True, context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def start_agent_command(options: tuple[str, ...]) -> int:
    """Run this node's agent: memory tier, drain, metrics."""
    from tieredckpt.agent.__main__ import agent_parser, run_agent_command

    if not {"-h", "--help"}.isdisjoint(options):
        click.echo(_agent_help(agent_parser()))
        return ExitCode.OK
    try:
        if "--detach" in options:
            _start_in_background(list(options))
        else:
            run_agent_command(list(options))
    except SystemExit as done:  # argparse: a wrong option
        return done.code if isinstance(done.code, int) else ExitCode.USAGE
    return ExitCode.OK


def _start_in_background(options: list[str]) -> None:
    """Start an agent that logs to a file, and wait until it answers."""
    from tieredckpt.agent.__main__ import parse_agent_arguments
    from tieredckpt.agent.agent_client import agent_environment

    args = parse_agent_arguments(options)
    if args is None:
        return
    directory = args.dir.absolute()
    paths = AgentPaths(directory, explicit=True)
    if found := _running_agent(directory).process:
        raise CommandError(
            f"an agent runs in {directory} already, as process {found}",
            code=ExitCode.USAGE,
            advice=f"`tieredckpt agent restart --dir {shlex.quote(str(directory))} OPTIONS` gives it other options",
        )
    command = [sys.executable, "-m", "tieredckpt.agent", *options, "--dir", str(directory)]
    connect_or_launch_agent(paths, command, environ=agent_environment()).close()
    process = _running_agent(directory).process
    click.echo(f"the agent in {directory} runs as process {process} and logs to {paths.log}")


def _agent_help(parser: argparse.ArgumentParser) -> str:
    """Return the help of an agent's options in the layout of all commands."""
    options: list[click.Parameter] = []
    for action in parser._actions:  # argparse has no public list of them
        if isinstance(action, argparse._HelpAction):
            continue
        text = (action.help or "") % {"default": action.default}
        kind = click.Choice(list(action.choices)) if action.choices else action.type
        options.append(
            click.Option(
                list(action.option_strings),
                type=click.Path() if kind is Path else kind,
                is_flag=action.nargs == 0,
                required=action.required,
                metavar=action.metavar if isinstance(action.metavar, str) else None,
                help=f"{text[:1].upper()}{text[1:]}.",
            )
        )
    command = with_help_format(click.Command("agent", params=options, help=parser.description, epilog=parser.epilog))
    return command.get_help(command.context_class(command, info_name=parser.prog, help_option_names=["-h", "--help"]))


@dataclass(frozen=True)
class RunningAgent:
    """An agent that listens on this machine, or the reason why it does not answer."""

    directory: Path
    process: int = 0
    status: StoreStatus | None = None
    problem: str = ""
    ports: tuple[int, ...] = ()
    """TCP ports that it listens on."""
    age_s: float | None = None
    """Seconds since the process started; ``None`` if unknown."""

    @property
    def jobs(self) -> dict[str, int]:
        """Jobs with checkpoints or processes here, with their numbers of processes."""
        known = self.status.jobs if self.status is not None else ()
        return {one.job: one.clients for one in jobs_in_use(known)}

    def as_json(self) -> dict[str, Any]:
        arena = self.status.arena if self.status is not None else None
        return {
            "directory": str(self.directory),
            "process": self.process or None,
            "ports": list(self.ports),
            "age_s": self.age_s,
            "jobs": sorted(self.jobs),
            "processes": sum(self.jobs.values()),
            "allocated_bytes": arena.allocated_bytes if arena is not None else None,
            "budget_bytes": arena.budget_bytes if arena is not None else None,
            "problem": self.problem or None,
        }


def _running_agent(directory: Path) -> RunningAgent:
    paths = AgentPaths(directory, explicit=True)
    process = 0
    try:
        with contextlib.closing(connect_to_agent(paths.socket, named=True)) as sock:
            process = peer_credentials(sock)[0]
        ports, age_s = _listening_ports(process), _process_age_s(process)
        if silence := silence_of_agent(paths):
            return RunningAgent(directory, process, problem=silence, ports=ports, age_s=age_s)
        connect = lambda: connect_to_agent(paths.socket, named=True)  # noqa: E731 - a client wants a connector
        with contextlib.closing(Client(connect, retry_s=0.0)) as client:
            return RunningAgent(directory, process, client.status(), ports=ports, age_s=age_s)
    except (PeerStoreError, OSError) as error:
        return RunningAgent(directory, process, problem=str(error))


def _listening_ports(process: int) -> tuple[int, ...]:
    """Return the TCP ports that a process listens on. Empty for a process that this user may not inspect."""
    proc = Path(f"/proc/{process}")
    own, ports = set(), set()
    with contextlib.suppress(OSError):
        for entry in (proc / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed in the meantime
                own.add(str(entry.readlink()))
        for table in ("tcp", "tcp6"):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in own:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return tuple(sorted(ports))


def _process_age_s(process: int) -> float | None:
    try:
        started = process_start_time(process)
    except OSError:
        return None
    if started < 0:
        return None
    return round(max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")), 1)


_directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Directory of the agent (default agent.directory, or /dev/shm/tieredckpt-UID).",
)


def _agent_in(directory: Path | None) -> RunningAgent:
    return _running_agent(load_settings().agent_directory if directory is None else directory.resolve())


def _require_running(found: RunningAgent, *, force: bool) -> None:
    if found.status is None and found.process:
        raise CommandError(
            found.problem,
            code=ExitCode.UNAVAILABLE,
            advice=f"`kill -9 {found.process}` ends it; its checkpoints stay in memory for the next agent",
        )
    if found.status is None:
        raise CommandError(
            f"no agent runs in {found.directory}: {found.problem}",
            code=ExitCode.NOT_FOUND,
            advice="`tieredckpt agent ls` lists the agents of this machine",
        )
    for job, count in found.jobs.items():
        if count and not force:
            processes = "1 process that uses" if count == 1 else f"{count} processes that use"
            raise UsageError(
                f"job {job!r} has {processes} the agent in {found.directory}: stop the job first, or use --force"
            )


@with_exit_code_help
@agent_group.command("ls", short_help="List the agents of this machine.")
@output_options
@pass_output
def list_agents_command(screen: CommandOutput) -> ExitCode:
    """List the agents of this machine: directory, process, ports, age, jobs and memory."""
    own = load_settings().agent_directory
    places = sorted(agent_directories() | ({own} if own.exists() else set()))
    with ThreadPoolExecutor(max(1, len(places))) as lookers:
        found = list(lookers.map(_running_agent, places))
    found = [one for one in found if one.process or one.directory != own]
    screen.result({"agents": [one.as_json() for one in found]}, lambda out: _show_agents(out, found))
    return ExitCode.OK


def _show_agents(out: Console, agents: list[RunningAgent]) -> None:
    if not agents:
        out.print("no agent runs on this machine")
        return
    rows = []
    for one in agents:
        ports = ", ".join(map(str, one.ports)) or "-"
        age = "?" if one.age_s is None else format_age(one.age_s)
        jobs, memory = "?", f"[yellow]{literal(one.problem)}[/]"
        if one.status is not None:
            arena = one.status.arena
            jobs = literal(", ".join(sorted(one.jobs)) or "-")
            memory = f"{show_size(arena.allocated_bytes)} of {show_size(arena.budget_bytes)}"
        rows.append([literal(str(one.directory)), str(one.process or "?"), ports, age, jobs, memory])
    columns = ["DIRECTORY", "PROCESS", "PORTS", "AGE", "JOBS", "MEMORY"]
    out.print(text_table(columns, rows, right=("PROCESS", "AGE")))


@with_exit_code_help
@agent_group.command("stop", short_help="Stop an agent; its checkpoints stay in memory.")
@_directory_option
@click.option("--force", is_flag=True, help="Stop the agent even if processes use it. They start another one.")
@click.option("--discard", is_flag=True, help="Delete its checkpoints from memory as well, after confirmation.")
@click.option("--yes", "-y", is_flag=True, help="Discard without confirmation.")
@output_options
@pass_output
def stop_agent_command(
    screen: CommandOutput, *, directory: Path | None, force: bool, discard: bool, yes: bool
) -> ExitCode:
    """Stop an agent and wait until it has exited.

    Its checkpoints stay in memory. The next agent of the directory takes them over. With --discard they are deleted:
    steps without copies on other nodes or in the durable tier are lost.
    """
    if discard and force:
        raise UsageError("--discard and --force exclude each other: stop the jobs of the agent first")
    found = _agent_in(directory)
    _require_running(found, force=force)
    paths = AgentPaths(found.directory, explicit=True)
    if discard and not yes:
        jobs = f"{show_count(len(found.jobs), 'job')} ({', '.join(map(repr, sorted(found.jobs)))})"
        confirm_deletion(screen, f"delete the checkpoints of {jobs} from the memory of the agent in {paths.directory}?")
    stop_agent(paths, timeout_s=_STOP_S)
    discarded = _discard_memory(paths) if discard else 0
    ending = f"{show_size(discarded)} of its memory are deleted" if discard else "its checkpoints stay in memory"
    text = f"the agent in {found.directory} (process {found.process}) has exited; {ending}"
    value = {"directory": str(found.directory), "process": found.process, "discarded_bytes": discarded}
    screen.result(value, lambda out: out.print(literal(text)))
    return ExitCode.OK


def _discard_memory(paths: AgentPaths) -> int:
    """Delete the memory of a stopped agent and return its size in bytes."""
    with hold_agent_lock(paths):  # prevents a new agent from adopting it
        size = sum(path.stat().st_blocks * 512 for path in (paths.directory / "slots").iterdir())
        TmpfsArena(paths.directory).purge(keep=EXPIRED_JOB_METADATA)
    return size


@with_exit_code_help
@agent_group.command(
    "restart", short_help="Restart an agent, with other options.", context_settings={"ignore_unknown_options": True}
)
@_directory_option
@click.option("--force", is_flag=True, help="Restart the agent even if processes use it.")
@output_options
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@pass_output
def restart_agent_command(
    screen: CommandOutput, *, directory: Path | None, force: bool, options: tuple[str, ...]
) -> ExitCode:
    """Restart an agent in the background, with its command line and OPTIONS of `tieredckpt agent`.

    For example, `tieredckpt agent restart --budget 64GiB`. Checkpoints in memory are kept. An agent that hangs or was
    stopped is killed.
    """
    from tieredckpt.agent.agent_client import agent_command, agent_environment

    found = _agent_in(directory)
    paths = AgentPaths(found.directory, explicit=True)
    command: list[str] = []
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{found.process}/cmdline").read_bytes().decode().split("\0")[:-1]
    if "--dir" not in command:  # not started by `tieredckpt agent`
        command = agent_command(override_settings(load_settings(), agent={"directory": str(found.directory)}))
    if found.status is not None or not replace_hung_agent(paths, within_s=_HANGS_S):
        _require_running(found, force=force)
        stop_agent(paths, timeout_s=_STOP_S)
    words = [*command, *options, "--dir", str(found.directory), "--detach"]
    connect_or_launch_agent(paths, words, environ=agent_environment()).close()
    process = _running_agent(found.directory).process
    value = {"directory": str(found.directory), "process": process, "before": found.process}
    text = f"the agent in {found.directory} runs again as process {process}, with its checkpoints"
    screen.result(value, lambda out: out.print(literal(text)))
    return ExitCode.OK


@click.command("demo", short_help="Train, kill, restore, lose the node, restore: equal bit for bit.")
@click.option("--keep", type=click.Path(path_type=Path), help="Folder to keep the bucket's files in.")
@output_options
@pass_output
def demo_command(screen: CommandOutput, keep: Path | None) -> int:
    """Train, kill a trainer, restore, lose the node, restore again, and compare all losses bit for bit.

    Needs no other program and leaves no process running. Exit code 0 if all losses are equal.
    """
    from tieredckpt.demo import main

    return main(as_json=screen.as_json, keep=keep)
