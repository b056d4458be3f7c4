"""List of all jobs, for ``tieredckpt ls`` without a job."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

from peerstore.errors import PeerStoreError
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.agent.local_agents import AgentJobs
from tieredckpt.cli.command_output import CommandOutput, format_age, literal, text_table
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import TierClient
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import TieredCheckpointError, TierUnavailableError, UsageError
from tieredckpt.memory_service_options import jobs_in_use
from tieredckpt.resolve_step import Tier
from tieredckpt.settings import override_settings
from tieredckpt.step_inventory import StepInventory

_READERS = 8
_MANIFEST = re.compile(r"([A-Za-z0-9._-]{1,128})/manifests/([0-9]{12,19})\..*\.manifest")


def show_jobs(screen: CommandOutput, client: TierClient, durable: str | None, others: Sequence[AgentJobs]) -> ExitCode:
    """Print the jobs of the client's agent, of other agents and of the store ``durable``."""
    if client.agent is None and durable is None and all(one.silence for one in others):
        advice = f"; {client.agent_advice}" if client.agent_advice else ""
        raise TierUnavailableError(
            f"{client.agent_error}, so the contents of this node's memory are unknown; --durable URL lists the jobs of "
            f"a store{advice}"
        )
    found: dict[str, dict[str, Any]] = {}
    silent = {str(one.directory): _silence(one.silence, one.jobs) for one in others if one.silence}
    own = str(client.settings.agent_directory)
    if client.agent is None and durable is None:
        silent[own] = _silence(client.agent_error, ())
    with screen.spinner("looking at the jobs of this machine"):
        if client.agent is not None:
            try:
                _add_jobs_of_agent(client.agent, found, with_durable=durable is None)
            except (PeerStoreError, TieredCheckpointError, OSError) as error:  # it may end meanwhile
                if all(one.silence for one in others):
                    raise
                silent[own] = _silence(str(error), ())
        for one in others:
            if one.silence:
                continue
            named = override_settings(client.settings, agent={"directory": str(one.directory), "embedded": False})
            try:
                with contextlib.closing(NodeAgentClient(named, "")) as agent:
                    _add_jobs_of_agent(agent, found, with_durable=durable is None)
            except (PeerStoreError, TieredCheckpointError, OSError) as error:  # it may end meanwhile
                silent[str(one.directory)] = _silence(str(error), one.jobs)
    if durable is not None:
        _add_durable_jobs(screen, client, found)
    rows = [found[job] for job in sorted(found)]
    screen.result(
        {"jobs": rows, "agent": client.agent is not None, "unreachable_agents": silent},
        lambda out: _show_jobs(out, client, rows, silent),
    )
    is_partial = silent or any(row["durable_unreachable"] for row in rows)
    return ExitCode.UNAVAILABLE if is_partial else ExitCode.OK


def _silence(reason: str, jobs: Iterable[str]) -> dict[str, Any]:
    return {"reason": reason, "jobs": sorted(jobs)}


def _add_jobs_of_agent(agent: NodeAgentClient, found: dict[str, dict[str, Any]], *, with_durable: bool) -> None:
    # A job ".JOB" holds files that are being written for JOB.
    jobs = [one for one in jobs_in_use(agent.store.status().jobs) if one.versions or not one.job.startswith(".")]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="tieredckpt-ls") as readers:
        known = list(readers.map(lambda one: agent.list_steps(one.job, fresh=True) if with_durable else None, jobs))
    for state, survey in zip(jobs, known, strict=True):
        row = job_row(state.job) | {
            "steps_in_memory": state.versions,
            "newest_in_memory": state.newest_committed,
            "epoch": state.epoch,
            "processes": state.clients,
            "forgotten_in_s": state.expires_in_s,
            **(_durable_counts(survey) if survey is not None else {}),
        }
        found[state.job] = _merged(found[state.job], row) if state.job in found else row


def _durable_counts(survey: StepInventory) -> dict[str, Any]:
    if Tier.DURABLE in survey.unreachable:
        return {"durable_unreachable": survey.unreachable[Tier.DURABLE]}
    if survey.durable is None:
        return {}
    steps = {view.version_id.version for view in survey.views if view.durable}
    return {"durable_steps": len(steps), "newest_durable": max(steps, default=None)}


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row of a job that two agents have: they hold parts of the same steps."""
    largest = {
        key: max((row[key] for row in (one, other) if row[key] is not None), default=None)
        for key in ("steps_in_memory", "newest_in_memory", "durable_steps", "newest_durable", "epoch")
    }
    left = [row["forgotten_in_s"] for row in (one, other)]
    return {
        **one,
        **largest,
        "durable_unreachable": one["durable_unreachable"] or other["durable_unreachable"],
        "processes": one["processes"] + other["processes"],
        "forgotten_in_s": None if None in left else max(left),
    }


def job_row(name: str) -> dict[str, Any]:
    return {
        "job": name,
        "steps_in_memory": 0,
        "newest_in_memory": None,
        "durable_steps": None,
        "newest_durable": None,
        "durable_unreachable": None,
        "epoch": None,
        "processes": 0,
        "forgotten_in_s": None,
    }


def _add_durable_jobs(screen: CommandOutput, client: TierClient, found: dict[str, dict[str, Any]]) -> None:
    settings = client.settings.durable
    if not settings.url:
        raise UsageError("--durable is empty: write s3://bucket/prefix or /path")
    store = open_store(settings.url, settings)
    try:
        with screen.spinner(f"listing {settings.url}"):
            matches = [_MANIFEST.fullmatch(info.name) for info in store.list("")]
    finally:
        store.close()
    steps: dict[str, set[int]] = {}
    for match in matches:
        if match is not None:
            steps.setdefault(match[1], set()).add(int(match[2]))
    for job, numbers in steps.items():
        row = found.setdefault(job, job_row(job))
        row["durable_steps"], row["newest_durable"] = len(numbers), max(numbers)


def _show_jobs(
    out: Console, client: TierClient, rows: Sequence[dict[str, Any]], silent: Mapping[str, dict[str, Any]]
) -> None:
    if client.agent is None:
        out.print(f"[yellow]memory tier unavailable:[/] {literal(client.agent_error)}")
    if rows:
        out.print(_jobs_table(rows))
    elif not silent:
        out.print("no jobs")
    for row in rows:
        if row["durable_unreachable"]:
            reason = literal(row["durable_unreachable"])
            out.print(f"[yellow]{literal(row['job'])}'s durable tier unavailable:[/] {reason}")
    for one in silent.values():
        out.print(f"[yellow]steps of {literal(', '.join(one['jobs']))} are unknown:[/] {literal(one['reason'])}")


def _jobs_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = ["JOB", "IN MEMORY", "NEWEST IN MEMORY", "DURABLE", "NEWEST DURABLE", "PROCESSES", "FORGOTTEN IN"]
    cells = []
    for row in rows:
        left = row["forgotten_in_s"]
        cells.append(
            [
                literal(row["job"]),
                str(row["steps_in_memory"]),
                _or_dash(row["newest_in_memory"]),
                "?" if row["durable_unreachable"] else _or_dash(row["durable_steps"]),
                _or_dash(row["newest_durable"]),
                str(row["processes"]),
                "-" if left is None else format_age(left),
            ]
        )
    return text_table(columns, cells, right=columns[1:])


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
