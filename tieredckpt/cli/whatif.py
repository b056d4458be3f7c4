"""``tieredckpt whatif``: the step that a job would resume from after losing nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from peerstore.errors import PeerStoreError
from peerstore.shard_records import VersionId
from peerstore.sizes_and_durations import show_count
from tieredckpt.agent.agent_api import ClusterStatus
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.cli.command_output import CommandOutput, format_age, format_ranges, literal, print_fields, text_table
from tieredckpt.cli.common_options import ANY_JOB, pass_output, settings_from_options, tier_options, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode, worst_exit_code
from tieredckpt.cli.tier_client import TierClient, open_tier_client, require_agent, resolve_job_name
from tieredckpt.errors import CheckpointNotFoundError, TieredCheckpointError, UsageError
from tieredckpt.format.manifest import StateTable, decode_table, missing_entries
from tieredckpt.format.shard_layout import Layout
from tieredckpt.whatif.node_loss import LossAnalysis
from tieredckpt.whatif.redundancy import (
    LossOutcome,
    LostStep,
    ReadSource,
    ResumeOutlook,
    cluster_failure_domains,
    find_failure_domain,
    worst_first,
)

_EXITS = {
    ResumeOutlook.RESUMES: ExitCode.OK,
    ResumeOutlook.UNKNOWN: ExitCode.UNAVAILABLE,
    ResumeOutlook.NOTHING: ExitCode.NOT_FOUND,
}
_SHOWN = 40
_READS_SHOWN = 12


@with_exit_code_help
@click.command("whatif", short_help="Show the step that a job would resume from after losing nodes.")
@click.argument("job", required=False)
@click.option(
    "--lose",
    "lost",
    multiple=True,
    metavar="LEVEL:NAME",
    help="Node or failure domain to lose: node:n3, rack:r1, zone:a; may be repeated.",
)
@click.option("--each", is_flag=True, help="Check the loss of each node and failure domain, the worst first.")
@tier_options
@pass_output
def whatif_command(
    screen: CommandOutput,
    *,
    job: str | None,
    lost: tuple[str, ...],
    each: bool,
    agent_dir: Path | None,
    durable: str | None,
) -> ExitCode:
    """Show the step that JOB would resume from, and from where, if these nodes were lost at once.

    Changes nothing. Exit code 0: a step would remain (with --each: after every single loss). 3: no step would remain.
    5: no known step would remain, but some nodes or the store did not answer.
    """
    if each == bool(lost):
        raise UsageError("name a loss with --lose node:NAME or --lose rack:NAME, or use --each")
    with open_tier_client(settings_from_options(agent_dir, durable, job or ANY_JOB)) as client:
        name = resolve_job_name(client, job)
        with screen.spinner(f"looking at the nodes of {name}"):
            view, loss_analysis = open_loss_analysis(client, name)
        known = cluster_failure_domains(view)
        if each:
            return _each(screen, view, worst_first([loss_analysis.outcome_without([one]) for one in known]))
        wanted = list(dict.fromkeys(find_failure_domain(text, known) for text in lost))
        outcome = loss_analysis.outcome_without(wanted)
        reads = loss_analysis.read_sources(outcome)
        screen.result(outcome_json(view, outcome, reads), lambda out: _show(out, view, outcome, reads))
        return _EXITS[outcome.outlook]


def open_loss_analysis(client: TierClient, job: str) -> tuple[ClusterStatus, LossAnalysis]:
    """Return the cluster status of a job and its loss analysis.

    Raise if no complete step is known or possible.
    """
    agent = require_agent(client)
    view = agent.cluster_status(job)
    survey = client.survey(job)
    limit = client.settings.memory.avoid_after_crashed_loads
    loss_analysis = LossAnalysis(view, survey, ReplicaCoverage(agent, job).covers_state, worn_after=limit)
    if loss_analysis.resumable_step is None and not loss_analysis.is_incomplete:
        raise CheckpointNotFoundError(f"job {job} has no complete step yet")
    return view, loss_analysis


class ReplicaCoverage:
    """Check whether the remaining parts of a step hold its whole state, thanks to replicas."""

    def __init__(self, agent: NodeAgentClient, job: str) -> None:
        self._agent = agent
        self._job = job
        self._known: dict[VersionId, tuple[StateTable, dict[int, Layout]] | None] = {}

    def covers_state(self, group: VersionId, parts: Collection[int]) -> bool:
        if group not in self._known:
            self._known[group] = self._read_layouts(group)
        known = self._known[group]
        if known is None:
            return False
        table_, layouts = known
        return not missing_entries(
            table_, {id(layouts[part]): layouts[part] for part in parts if part in layouts}.values()
        )

    def _read_layouts(self, group: VersionId) -> tuple[StateTable, dict[int, Layout]] | None:
        try:
            manifest = self._agent.steps.describe(self._job, group).manifest
            names = [shard.meta.table for shard in manifest.shards if shard.meta.table in manifest.tables]
            if not names:
                return None
            layouts: dict[str, Layout] = {}
            for shard in manifest.shards:
                if shard.meta.layout not in layouts:
                    layouts[shard.meta.layout] = manifest.layout_of(shard)
            by_part = {shard.key.part: layouts[shard.meta.layout] for shard in manifest.shards}
            return decode_table(manifest.tables[names[0]]), by_part
        except (PeerStoreError, TieredCheckpointError):  # as in a load: without an answer, coverage is unknown
            return None


def outcome_json(view: ClusterStatus, outcome: LossOutcome, reads: Sequence[ReadSource] = ()) -> dict[str, Any]:
    chosen = outcome.resolution.chosen
    quorum = outcome.quorum
    return {
        "job": view.job,
        "seen_from": view.this_node,
        "lost": [str(one) for one in outcome.lost],
        "nodes_lost": list(outcome.nodes),
        "nodes_left": [one.node.id for one in view.nodes if one.node.id not in outcome.nodes],
        "fate": outcome.outlook.value,
        "step": outcome.step,
        "epoch": chosen.version_id.epoch if chosen is not None and outcome.plain_step is None else None,
        "plain": outcome.plain_step is not None,
        "step_now": outcome.step_before_loss,
        "lost_s": outcome.lost_s,
        "from_memory": outcome.from_memory,
        "from_durable": outcome.from_durable,
        "reads": [{"parts": list(one.parts) or None, "nodes": list(one.nodes) or None} for one in reads],
        "gone": [
            {
                "step": one.version_id.version,
                "epoch": one.version_id.epoch,
                "parts": list(one.parts),
                "nodes": list(one.nodes),
            }
            for one in outcome.lost_steps
        ],
        "quorum": None if quorum is None else {"enough": quorum.enough, "alive": quorum.alive, "of": quorum.of},
        "unknown": dict(outcome.unknown),
        "perhaps": [group.version for group in outcome.uncertain_steps],
        "steps": [
            {"step": group.version, "epoch": group.epoch, "attempt": group.attempt, "verdict": verdict.value}
            for group, verdict in sorted(outcome.resolution.verdicts.items(), key=lambda item: item[0].version)
        ],
    }


def _show(out: Console, view: ClusterStatus, outcome: LossOutcome, reads: Sequence[ReadSource]) -> None:
    what = " and ".join(map(str, outcome.lost))
    nodes = "" if all(one.level == "node" for one in outcome.lost) else f" ({_names(outcome.nodes)})"
    out.print(
        f"[bold]{literal(view.job)}[/]  without {literal(what)}{literal(nodes)}, as {literal(view.this_node)} sees it"
    )
    out.print()
    lines = [("resumes from", _resumes(outcome))]
    lines += _read_lines(reads)
    lines += [("lost", _lost(outcome))]
    lines += [("", _lost_step_line(one)) for one in outcome.lost_steps]
    if outcome.quorum is not None:
        colour = "" if outcome.quorum.enough else "yellow"
        text = literal(outcome.quorum.explain())
        lines.append(("quorum", f"[{colour}]{text}[/]" if colour else text))
    for number, (name, why) in enumerate(outcome.unknown.items()):
        lines.append(("not known" if not number else "", f"[yellow]{literal(name)}:[/] {literal(why)}"))
    if outcome.unknown:
        lines.append(("", _unknown(outcome)))
    torn = sorted(
        {group.version for group in outcome.resolution.torn}
        - {one.version_id.version for one in outcome.lost_steps}
        - {group.version for group in outcome.uncertain_steps}
    )
    if torn:
        lines.append(("not complete", f"{_steps(torn)}, with or without this loss"))
    print_fields(out, lines)


def _resumes(outcome: LossOutcome) -> str:
    if outcome.outlook is ResumeOutlook.NOTHING:
        return "[bold red]nothing[/]: no complete step would remain in any tier"
    if outcome.outlook is ResumeOutlook.UNKNOWN:
        return "[bold yellow]not known[/]: no known step would remain"
    far = ", as far as is known" if outcome.uncertain_steps else ""
    plain = ", a plain checkpoint" if outcome.plain_step is not None else ""
    colour = "green" if outcome.step == outcome.step_before_loss else "yellow"
    return f"[bold {colour}]step {outcome.step}[/]{plain}{far}"


def _read_lines(reads: Sequence[ReadSource]) -> list[tuple[str, str]]:
    lines = []
    width = max((len(_parts(one.parts)) for one in reads), default=0)
    for number, one in enumerate(reads[:_READS_SHOWN]):
        where = f"memory of {_names(one.nodes, 'or')}" if one.nodes else "durable tier"
        lines.append(("read from" if not number else "", f"{_parts(one.parts):<{width}}  {literal(where)}"))
    if len(reads) > _READS_SHOWN:
        lines.append(("", f"and {show_count(len(reads) - _READS_SHOWN, 'more group')} of parts; --json has all"))
    return lines


def _parts(parts: Sequence[int]) -> str:
    if not parts:
        return "all parts"
    return f"part {parts[0]}" if len(parts) == 1 else f"parts {format_ranges(parts)}"


def _lost(outcome: LossOutcome) -> str:
    if outcome.step_before_loss is None:
        return "not known"
    if outcome.step is None:
        return f"all training up to step {outcome.step_before_loss}" + (
            ", as far as is known" if outcome.unknown else ""
        )
    if not outcome.lost_steps:
        return "no training that is saved by now"
    back = outcome.step_before_loss - outcome.step
    if back <= 0:  # without a lost step, an older branch is current again
        return f"the newest attempt, at step {outcome.step_before_loss}: an older one is left"
    span = f", {format_age(outcome.lost_s)} of training" if outcome.lost_s and outcome.lost_s >= 1 else ""
    return f"{show_count(back, 'step')}{span}: from {outcome.step_before_loss} back to {outcome.step}"


def _lost_step_line(one: LostStep) -> str:
    return f"step {one.version_id.version}: {_parts(one.parts)} only on {literal(_names(one.nodes))}"


def _unknown(outcome: LossOutcome) -> str:
    text = "its shards count neither as available nor as lost"
    if not outcome.uncertain_steps:
        return text
    return f"{text}; {_steps([group.version for group in outcome.uncertain_steps])} may be complete with them"


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {format_ranges(sorted(set(steps)))}"


def _names(names: Sequence[str], word: str = "and") -> str:
    if len(names) > 8:
        return f"{', '.join(names[:6])} {word} {len(names) - 6} more"
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


def _each(screen: CommandOutput, view: ClusterStatus, outcomes: Sequence[LossOutcome]) -> ExitCode:
    value = {"job": view.job, "seen_from": view.this_node, "losses": [outcome_json(view, one) for one in outcomes]}
    screen.result(value, lambda out: _show_each(out, view, outcomes))
    return worst_exit_code([_EXITS[one.outlook] for one in outcomes])


def _show_each(out: Console, view: ClusterStatus, outcomes: Sequence[LossOutcome]) -> None:
    before = outcomes[0].step_before_loss
    now = f"step {before}" if before is not None else "nothing that is known"
    out.print(f"[bold]{literal(view.job)}[/]  would now resume from {now}, as {literal(view.this_node)} sees it")
    out.print()
    rows = [
        [
            literal(str(one.lost[0])),
            str(len(one.nodes)),
            _cell(one),
            "-" if one.step is None or one.step_before_loss is None else str(max(0, one.step_before_loss - one.step)),
            " + ".join((["memory"] if one.from_memory else []) + (["durable"] if one.from_durable else [])) or "-",
            _quorum_cell(one),
        ]
        for one in outcomes[:_SHOWN]
    ]
    columns = ["IF LOST", "NODES", "RESUMES FROM", "STEPS BACK", "READ FROM", "QUORUM"]
    out.print(text_table(columns, rows, right=("NODES", "STEPS BACK")))
    more = outcomes[_SHOWN:]
    if more:
        out.print(f"and {len(more)} more, none of them worse than the last one here; --json has all")
    names = sorted({name for one in outcomes for name in one.unknown})
    for name in names:
        why = next(one.unknown[name] for one in outcomes if name in one.unknown)
        out.print(f"[yellow]{literal(name)} is unavailable:[/] {literal(why)}")
    if names:
        out.print("Their shards count neither as available nor as lost.")


def _cell(one: LossOutcome) -> str:
    if one.outlook is ResumeOutlook.NOTHING:
        return "[red]nothing[/]"
    if one.outlook is ResumeOutlook.UNKNOWN:
        return "[yellow]not known[/]"
    colour = "green" if one.step == one.step_before_loss else "yellow"
    return f"[{colour}]step {one.step}[/]" + (" or newer" if one.uncertain_steps else "")


def _quorum_cell(one: LossOutcome) -> str:
    if one.quorum is None:
        return "-"
    text = f"{one.quorum.alive} of {one.quorum.of}"
    return text if one.quorum.enough else f"[yellow]none: {text}[/]"
