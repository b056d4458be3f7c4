"""``tieredckpt ls``: jobs, and their steps by tier with completeness and copies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from peerstore.shard_records import VersionId
from peerstore.sizes_and_durations import show_size
from tieredckpt.agent.agent_api import DrainStatus
from tieredckpt.agent.local_agents import other_agents_with_jobs
from tieredckpt.cli.cluster_tables import STATES
from tieredckpt.cli.command_output import CommandOutput, format_age, iso_time, literal, text_table
from tieredckpt.cli.common_options import ANY_JOB, pass_output, settings_from_options, tier_options, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.job_list import show_jobs
from tieredckpt.cli.tier_client import TierClient, open_tier_client
from tieredckpt.errors import (
    CheckpointDamagedError,
    DurableRefusedError,
    FormatVersionError,
    TieredCheckpointError,
    TierUnavailableError,
)
from tieredckpt.format.manifest import UNKNOWN_PART_COUNT, Manifest
from tieredckpt.location import Location, parse_location
from tieredckpt.resolve_step import IncarnationBranches, LeftBehind, Tier, incomplete_state
from tieredckpt.step_inventory import StepInventory, StepStatus

_READERS = 8


@dataclass(frozen=True)
class StepRow:
    """A listed attempt at a step."""

    version_id: VersionId
    parts: int
    in_memory: int
    """Number of parts in this node's memory."""
    durable: bool
    complete: bool
    copies: int
    """Copies of the part with the fewest. Own memory, other nodes and the durable tier count one each."""
    on_peers: bool
    """Whether other nodes have parts of it, and so may have more copies."""
    size_bytes: int
    saved_ns: int
    quarantined: str
    damaged: str
    crashed_loads: int
    """Recent loads of it that crashed on this node."""
    kept: bool
    drain: DrainStatus | None
    incomplete_state: str = "torn"
    """State if parts are missing."""
    left_behind: LeftBehind | None = None
    """Later incarnation that continued from before this step. ``None``: the step is current."""
    unsupported: str = ""
    """Reason why this release cannot read the step's metadata. Empty: it can."""

    @property
    def tiers(self) -> list[str]:
        return (["memory"] if self.in_memory else []) + (["durable"] if self.durable else [])

    @property
    def state(self) -> str:
        if self.quarantined:
            return "quarantined"
        if self.unsupported:
            return "unsupported"
        if self.damaged:
            return "damaged"
        return "complete" if self.complete else self.incomplete_state

    def as_json(self, now_ns: int) -> dict[str, Any]:
        draining = self.drain is not None and self.drain.state in ("waiting", "running", "failed")
        return {
            "step": self.version_id.version,
            "epoch": self.version_id.epoch,
            "attempt": self.version_id.attempt,
            "incarnation": self.version_id.incarnation,
            "state": self.state,
            "complete": self.complete,
            "tiers": self.tiers,
            "parts": self.parts,
            "parts_in_memory": self.in_memory,
            "copies": self.copies,
            "size_bytes": self.size_bytes,
            "saved": iso_time(self.saved_ns),
            "age_s": round((now_ns - self.saved_ns) / 1e9, 1) if self.saved_ns else None,
            "quarantined": self.quarantined or None,
            "damaged": self.damaged or None,
            "unsupported": self.unsupported or None,
            "crashed_loads": self.crashed_loads,
            "kept": self.kept,
            "left_behind": None
            if self.left_behind is None
            else {"epoch": self.left_behind.epoch, "continued_from": self.left_behind.base_step},
            "drain": _drain_json(self.drain) if draining and self.drain is not None else None,
        }


def step_row(
    view: StepStatus,
    manifest: Manifest | None,
    damaged: str,
    drain: DrainStatus | None,
) -> StepRow:
    """Return the row of an attempt.

    ``manifest``: that of a durable step. ``damaged``: why it cannot be read.
    """
    parts = view.parts or (manifest.parts if manifest else 0)
    durable = {shard.key.part for shard in manifest.shards} if manifest else set()
    if parts == UNKNOWN_PART_COUNT:
        parts = len(durable | view.found.keys())
    held = [
        len({*view.found.get(part, ()), *((Tier.DURABLE,) if part in durable else ())})
        for part in durable | view.found.keys()
    ]
    missing = len(held) < parts and not view.covered
    if not damaged and view.damaged and not view.candidate.is_complete:
        damaged = "; ".join(f"part {part}: {reason}" for part, reason in sorted(view.damaged.items()))
    saved = max((shard.meta.saved_ns for shard in manifest.shards), default=0) if manifest else 0
    return StepRow(
        version_id=view.version_id,
        parts=parts,
        in_memory=sum(Tier.MEMORY in where for where in view.found.values()),
        durable=view.durable,
        # An unreadable manifest does not make a step complete, but its parts in memory can.
        complete=(view.covered or len(view.found) >= parts > 0) if damaged else view.candidate.is_complete,
        copies=0 if missing else min(held, default=0),
        on_peers=any(Tier.PEER in where for where in view.found.values()),
        size_bytes=sum(shard.size_bytes for shard in manifest.shards) if manifest else view.size_bytes,
        saved_ns=saved or view.saved_ns,
        quarantined=view.quarantined,
        damaged=damaged,
        crashed_loads=view.crashed_loads,
        kept=view.kept,
        drain=drain,
    )


@with_exit_code_help
@click.command("ls", short_help="Steps of a job by tier, or all jobs.")
@click.argument("job", required=False)
@tier_options
@pass_output
def ls_command(screen: CommandOutput, job: str | None, agent_dir: Path | None, durable: str | None) -> ExitCode:
    """List the steps of JOB with their tiers, completeness and number of copies.

    Without JOB, lists the jobs in memory of this machine's agents, and with --durable also the jobs in that store.
    """
    with open_tier_client(settings_from_options(agent_dir, durable, job or ANY_JOB)) as client:
        if job is None:
            is_named = bool(settings_from_options(agent_dir, durable).agent.directory)
            return show_jobs(screen, client, durable, [] if is_named else other_agents_with_jobs(client.settings))
        return _steps(screen, client, parse_location(job))


def _steps(screen: CommandOutput, client: TierClient, location: Location) -> ExitCode:
    with screen.spinner(f"looking for steps of {location.job}"):
        survey = client.survey(location.job)
        lines = step_rows(client, location, survey)
    plain, incomplete = survey.plain_at(location), survey.plain_at(location, incomplete=True)
    if not (lines or plain or incomplete):
        raise client.not_found_error(location, survey)
    now = time.time_ns()
    url = survey.durable.url if survey.durable else ""
    screen.result(
        {
            "job": location.job,
            "durable": url or None,
            "unreachable": {tier.value: text for tier, text in survey.unreachable.items()},
            "steps": [line.as_json(now) for line in lines],
            "plain_steps": plain,
            "incomplete_plain_steps": incomplete,
        },
        lambda out: _show(out, location, survey, lines),
    )
    return ExitCode.UNAVAILABLE if survey.is_partial else ExitCode.OK


def step_rows(client: TierClient, location: Location, survey: StepInventory) -> list[StepRow]:
    """Return the rows of all attempts at all steps of ``location``, the newest last."""
    views = [view for view in survey.views if location.includes(view.version_id)]
    drains = {view.version_id: view for view in client.agent.drain_status(location.job)} if client.agent else {}
    wanted = [view.version_id for view in views if view.durable]
    manifests: dict[VersionId, Manifest] = {}
    damaged: dict[VersionId, str] = {}
    unsupported: dict[VersionId, str] = {}

    def read(group: VersionId) -> None:
        try:
            manifests[group] = client.catalog(location.job).manifest(group)
        except CheckpointDamagedError as error:
            damaged[group] = str(error)
        except FormatVersionError as error:
            unsupported[group] = str(error)
        except (TierUnavailableError, DurableRefusedError):
            # The agent may have credentials that this process lacks; without it sizes and copies stay unknown.
            with contextlib.suppress(TieredCheckpointError):
                if client.agent is not None:
                    manifests[group] = client.agent.steps.describe(location.job, group).manifest

    with ThreadPoolExecutor(_READERS, thread_name_prefix="tieredckpt-ls") as readers:
        list(readers.map(read, wanted))
        views = list(readers.map(lambda view: client.with_quarantine_reason(location.job, view), views))
    for slot in survey.unrecognized:
        if slot.key is not None and location.includes(slot.key.version_id):
            unsupported.setdefault(slot.key.version_id, slot.reason)
            if all(view.version_id != slot.key.version_id for view in views):
                views.append(StepStatus(slot.key.version_id, 0, {}))
    lines = [
        step_row(view, manifests.get(view.version_id), damaged.get(view.version_id, ""), drains.get(view.version_id))
        for view in views
    ]
    quarantined = {view.version_id for view in survey.views if view.quarantined}
    branches = IncarnationBranches((view.candidate for view in survey.views), quarantined)
    lines = [
        replace(
            line,
            unsupported=unsupported.get(line.version_id, ""),
            incomplete_state=_incomplete_state(line, survey),
            left_behind=branches.left_behind_by(line.version_id),
        )
        for line in lines
    ]
    return sorted(lines, key=lambda line: (line.version_id.version, *line.version_id))


def _incomplete_state(line: StepRow, survey: StepInventory) -> str:
    return incomplete_state(
        line.version_id,
        newest_complete=survey.newest_complete,
        once_complete=survey.once_complete,
        aborted=survey.torn,
        unsure=bool(survey.unreachable),
        needed=line.kept or (line.drain is not None and line.drain.state not in ("done", "skipped")),
    )


def _show(
    out: Console,
    location: Location,
    survey: StepInventory,
    lines: Sequence[StepRow],
) -> None:
    url = survey.durable.url if survey.durable else ""
    out.print(f"[bold]{literal(location.job)}[/]" + (f"  durable tier {literal(url)}" if url else "  no durable tier"))
    _show_block(out, lines, _plain_cells(location, survey))
    for tier, text in survey.unreachable.items():
        out.print(f"[yellow]{tier.value} tier unavailable:[/] {literal(text)}")


def _plain_cells(location: Location, survey: StepInventory) -> dict[int, list[str]]:
    """Return the cells of each plain checkpoint, beginning with its state."""
    complete, incomplete = survey.plain_at(location), survey.plain_at(location, incomplete=True)
    torn = [_coloured("torn"), "-", "-", "-", "-", "-", "DCP's own files, unfinished: no .metadata"]
    return dict.fromkeys(incomplete, torn) | {
        step: ["plain", "-", "yes", "1", "-", "-", "DCP's own files"] for step in complete
    }


def _show_block(out: Console, lines: Sequence[StepRow], plain: Mapping[int, Sequence[str]]) -> None:
    steps = [line.version_id.version for line in lines]
    # Commands such as `pin` and `export` need the epoch to select one of several branches.
    twice = len(set(steps)) < len(steps) or any(line.left_behind is not None for line in lines)
    columns = [
        "STEP",
        *(["EPOCH", "ATTEMPT"] if twice else []),
        "STATE",
        "MEMORY",
        "DURABLE",
        "COPIES",
        "SIZE",
        "AGE",
        "NOTE",
    ]
    rows = []
    now = time.time_ns()
    for line in lines:
        attempt = (
            [str(line.version_id.epoch), f"{line.version_id.attempt} {line.version_id.incarnation[:6]}"]
            if twice
            else []
        )
        rows.append(
            [
                str(line.version_id.version),
                *attempt,
                _coloured(line.state),
                f"{line.in_memory} of {line.parts}" if line.in_memory else "-",
                _durable_cell(line),
                f"{line.copies}{'+' * line.on_peers}" if line.copies else "-",
                show_size(line.size_bytes) if line.size_bytes else "-",
                format_age((now - line.saved_ns) / 1e9) if line.saved_ns else "-",
                literal(_note(line)),
            ]
        )
    rows += [[str(step), *(["", ""] if twice else []), *cells] for step, cells in sorted(plain.items())]
    out.print(text_table(columns, rows, right=("STEP", "COPIES", "SIZE", "AGE")))


def _durable_cell(line: StepRow) -> str:
    if line.durable:
        return "yes"
    if line.drain is None or line.drain.state == "done":
        return "-"
    if line.drain.state == "running" and line.drain.bytes_total:
        return f"{100 * line.drain.bytes_done // line.drain.bytes_total} %"
    return line.drain.state


def _note(line: StepRow) -> str:
    if line.quarantined or line.unsupported or line.damaged:
        return line.quarantined or line.unsupported or line.damaged
    if line.drain is not None and line.drain.error and not line.durable:
        return line.drain.error
    if not line.complete:
        if line.state == "superseded":
            return "a newer step replaced it"
        where = "in the tiers that answered" if line.state == "unknown" else "here"
        return f"{line.parts - line.in_memory} of {line.parts} parts are not {where}"
    if line.crashed_loads > 1:
        return f"{line.crashed_loads} loads of it ended their process here"
    notes = [str(line.left_behind)] if line.left_behind is not None else []
    return "; ".join([*notes, *(["kept until it is unpinned"] if line.kept else [])])


def _coloured(state: str) -> str:
    return f"[{STATES[state]}]{state}[/]"


def _drain_json(view: DrainStatus) -> dict[str, Any]:
    return {
        "state": view.state,
        "bytes_done": view.bytes_done,
        "bytes_total": view.bytes_total,
        "error": view.error or None,
    }
