"""``tieredckpt gc``: delete expired durable steps, orphaned shards and abandoned uploads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from peerstore.shard_records import VersionId
from peerstore.sizes_and_durations import show_count, show_size
from tieredckpt.agent.durable_catalog import (
    DurableCatalog,
    OrphanedStep,
    delete_orphaned_step,
    delete_step,
    find_orphaned_steps,
    orphaned_parts,
)
from tieredckpt.agent.retention import expired_steps
from tieredckpt.agent.shard_uploads import journaled_uploads
from tieredckpt.cli.command_output import CommandOutput, format_age, literal, text_table
from tieredckpt.cli.common_options import pass_output, settings_from_options, tier_options, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import TierClient, open_tier_client, require_agent
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, UsageError
from tieredckpt.location import parse_location
from tieredckpt.resolve_step import Tier

_HOUR_S = 3600.0


@with_exit_code_help
@click.command("gc", short_help="Delete expired durable steps and orphaned objects.")
@click.argument("job")
@click.option("--keep-last", type=click.IntRange(min=1), help="Keep the newest N steps (default the job's policy).")
@click.option("--keep-every", type=click.IntRange(min=0), help="Keep older steps that are divisible by N.")
@click.option(
    "--abandoned-after",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="Delete unfinished uploads and shards of incomplete steps older than this.",
)
@click.option(
    "--unrecognized-slots",
    is_flag=True,
    help="Drop the job's slots that this node's agent cannot read, and nothing durable.",
)
@click.option("--dry-run", "-n", is_flag=True, help="Print which steps would be deleted.")
@tier_options
@pass_output
def gc_command(
    screen: CommandOutput,
    *,
    job: str,
    keep_last: int | None,
    keep_every: int | None,
    abandoned_after: float,
    unrecognized_slots: bool,
    dry_run: bool,
    agent_dir: Path | None,
    durable: str | None,
) -> ExitCode:
    """Delete old steps of JOB and the remains of interrupted uploads from its durable tier.

    Without --keep-last, the job's own policy applies (durable.keep_last, durable.keep_every; 0 keeps all steps). The
    newest complete step that is not quarantined is never deleted. Steps in memory are not deleted. Plain
    checkpoints are not deleted, complete or not: use `tieredckpt rm`.

    A step without a manifest is deleted if the last write to it is --abandoned-after hours old by this machine's clock.
    It is kept if a node has it in memory. It is also kept if all of its parts exist and the policy would keep it:
    `tieredckpt rebuild` writes its manifest.

    With --unrecognized-slots, nothing durable is deleted. The command drops slots in this node's memory that an agent
    of another release left and this one cannot read.
    """
    location = parse_location(job)
    if location.step is not None:
        raise UsageError(f"{job!r} names a step; gc is for a whole job: {location.job}")
    if keep_every and keep_last is None:
        raise UsageError("--keep-every has no effect without --keep-last")
    with open_tier_client(settings_from_options(agent_dir, durable, job)) as client:
        if unrecognized_slots:
            return _drop_unrecognized(screen, client, location.job, dry_run=dry_run)
        catalog = client.catalog(location.job)
        policy = client.durable_settings(location.job)
        last = policy.keep_last if keep_last is None else keep_last
        every = policy.keep_every if keep_last is None else keep_every or 0
        listing = catalog.listing(fresh=True)
        orphans = find_orphaned_steps(catalog, location.job, spread=policy.hashed_keys)
        if not listing.manifests and not orphans:
            raise CheckpointNotFoundError(f"job {location.job} has no step in {catalog.store.url}")
        bases = {group: entry.base for group, entry in listing.manifests.items()}
        expired = expired_steps(
            bases, keep_last=last, keep_every=every, quarantined=listing.quarantined, kept=listing.kept
        )
        sizes = [stored_size_bytes(catalog, group) for group in expired]
        good = sorted({*listing.manifests} - {*expired} - listing.quarantined)
        enough = sorted({group.version for group in good})[-last:][0] if last and good else -1
        decisions = _orphan_decisions(
            client, catalog, location.job, orphans, abandoned_after * _HOUR_S, every=every, enough=enough
        )
        uploads = 0
        if not dry_run:
            with screen.progress_bar(f"deleting {show_count(len(expired), 'step')}", sum(sizes)) as advance:
                for group, size in zip(expired, sizes, strict=True):
                    delete_step(catalog, location.job, group)
                    advance(size)
            for orphan, _, delete in decisions:
                if delete:
                    delete_orphaned_step(catalog, location.job, orphan)
            uploads = _abort_stale_uploads(client, catalog, location.job, abandoned_after * _HOUR_S)
    value = {
        "job": location.job,
        "durable": catalog.store.url,
        "keep_last": last,
        "keep_every": every,
        "dry_run": dry_run,
        "deleted": [
            {**_json(group, size), "quarantined": group in listing.quarantined}
            for group, size in zip(expired, sizes, strict=True)
        ],
        "deleted_bytes": sum(sizes),
        "without_manifest": [
            {**_json(one.version_id, one.size_bytes), "objects": len(one.objects), "deleted": delete, "reason": why}
            for one, why, delete in decisions
        ],
        "kept": sorted(group.version for group in listing.manifests if group not in expired),
        "discarded_uploads": None if dry_run else uploads,
    }
    screen.result(value, lambda out: _show(out, value))
    return ExitCode.OK


def _drop_unrecognized(screen: CommandOutput, client: TierClient, job: str, *, dry_run: bool) -> ExitCode:
    store = require_agent(client).store
    found = [one for one in store.status().unrecognized if one.job == job]
    if not dry_run:
        store.drop_unrecognized([one.name for one in found])
    value = {
        "job": job,
        "dry_run": dry_run,
        "dropped": [{"name": one.name, "size_bytes": one.size_bytes, "reason": one.reason} for one in found],
    }
    size = show_size(sum(one.size_bytes for one in found))
    text = f"{show_count(len(found), 'slot')} with {size} {'would be' if dry_run else 'were'} dropped"
    screen.result(value, lambda out: out.print(text))
    return ExitCode.OK


def stored_size_bytes(catalog: DurableCatalog, group: VersionId) -> int:
    """Return the size of a step's shards in the store; 0 if its manifest is damaged."""
    try:
        shards = catalog.manifest(group).shards
    except CheckpointDamagedError:
        return 0
    return sum(sum(shard.frames) if shard.encoding == "zstd" else shard.size_bytes for shard in shards)


def _abort_stale_uploads(client: TierClient, catalog: DurableCatalog, job: str, older_than_s: float) -> int:
    """Abort stale uploads, except those that this node's agent will resume. Return their number."""
    keep = journaled_uploads(client.agent.store.blobs.list_names(job)) if client.agent is not None else []
    return catalog.store.abort_stale_uploads(f"{job}/", older_than_s=older_than_s, keep=keep)


def _orphan_decisions(
    client: TierClient,
    catalog: DurableCatalog,
    job: str,
    orphans: Sequence[OrphanedStep],
    older_than_s: float,
    *,
    every: int,
    enough: int,
) -> list[tuple[OrphanedStep, str, bool]]:
    """Return for each step without a manifest the reason of the decision, and whether to delete it.

    ``enough``: oldest step that the policy retains. -1: it retains all.
    """
    if not orphans:
        return []
    survey = client.survey(job)
    in_memory = {view.version_id for view in survey.views if view.found}
    silent = survey.unreachable.get(Tier.PEER)
    now, found = time.time(), []
    for one in orphans:
        step, age_s = one.version_id.version, now - one.written_s
        if one.version_id in in_memory:
            why, delete = "a node has it in memory, and may still make it durable", False
        elif silent is not None:
            why, delete = f"nodes that may have it in memory are unavailable: {silent}", False
        elif age_s < older_than_s:
            why, delete = f"some of it was written {format_age(age_s)} ago", False
        else:
            count_, parts, is_complete = orphaned_parts(catalog, job, one)
            delete = not is_complete or (step < enough and not (every and step % every == 0))
            why = f"{count_} of {parts or 'its'} parts, and no manifest"
            if not delete:
                why += f": `tieredckpt rebuild {job}/step-{step}` makes it a step"
        found.append((one, why, delete))
    return found


def _json(group: VersionId, size_bytes: int) -> dict[str, Any]:
    return {
        "step": group.version,
        "epoch": group.epoch,
        "attempt": group.attempt,
        "incarnation": group.incarnation,
        "size_bytes": size_bytes,
    }


def _show(out: Console, value: dict[str, Any]) -> None:
    deleted: Sequence[dict[str, Any]] = value["deleted"]
    if deleted:
        rows = [
            [str(one["step"]), show_size(one["size_bytes"]), "quarantined" if one["quarantined"] else ""]
            for one in deleted
        ]
        out.print(text_table(["STEP", "SIZE", ""], rows, right=("STEP", "SIZE")))
    policy = f"keeping the newest {value['keep_last']}" if value["keep_last"] else "the policy keeps all steps"
    policy += f" and those divisible by {value['keep_every']}" if value["keep_every"] else ""
    verb = "would be deleted" if value["dry_run"] else "deleted"
    out.print(
        f"{show_count(len(deleted), 'step')} {verb} from {literal(value['durable'])} "
        f"({show_size(value['deleted_bytes'])}), "
        f"{len(value['kept'])} kept: {policy}"
    )
    orphans: Sequence[dict[str, Any]] = value["without_manifest"]
    if orphans:
        out.print(f"shards of {show_count(len(orphans), 'step')} without a manifest:")
        for one in orphans:
            verdict = "stays" if not one["deleted"] else "would be deleted" if value["dry_run"] else "deleted"
            out.print(f"  step {one['step']}, {show_size(one['size_bytes'])}: {verdict} ({literal(one['reason'])})")
    if value["discarded_uploads"]:
        out.print(f"{show_count(value['discarded_uploads'], 'unfinished upload')} discarded")
