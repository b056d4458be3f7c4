"""``tieredckpt rebuild``: rewrite a lost manifest from the indexes of the shards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from peerstore.shard_records import VersionId
from peerstore.sizes_and_durations import show_count, show_size
from tieredckpt.agent.durable_catalog import DurableCatalog, manifest_from_shard_files
from tieredckpt.cli.command_output import CommandOutput, literal
from tieredckpt.cli.common_options import (
    parse_step_target,
    pass_output,
    settings_from_options,
    tier_options,
    with_exit_code_help,
)
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import open_tier_client
from tieredckpt.durable.object_store import ObjectNotFoundError
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError
from tieredckpt.format import object_keys
from tieredckpt.format.manifest import Manifest, decode_table, missing_entries
from tieredckpt.location import Location
from tieredckpt.restore.verified_reads import damaged_chunks

_SHOWN = 5


@with_exit_code_help
@click.command("rebuild", short_help="Write a lost manifest again from its shards.")
@click.argument("target", metavar="JOB/step-N")
@click.option("--dry-run", "-n", is_flag=True, help="Check whether a rebuild is possible, and write nothing.")
@tier_options
@pass_output
def rebuild_command(
    screen: CommandOutput, target: str, dry_run: bool, agent_dir: Path | None, durable: str | None
) -> ExitCode:
    """Write a step's manifest again from the indexes of its shards in the durable tier.

    Use it if a manifest was lost or damaged. Reads all shards, compares them with their checksums, and checks that they
    hold the complete state. Of several attempts at the step, the latest that can be rebuilt is used.
    """
    with open_tier_client(settings_from_options(agent_dir, durable, target)) as client:
        location = parse_step_target(target)
        catalog = client.catalog(location.job)
        manifest = _newest_good_attempt(screen, catalog, location)
        name = object_keys.manifest_key(location.job, manifest.group, _base(manifest))
        if not dry_run:
            _replace(catalog, manifest)
    value = {
        "job": location.job,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "attempt": manifest.attempt,
        "incarnation": manifest.incarnation,
        "parts": manifest.parts,
        "found": len(manifest.shards),
        "size_bytes": sum(shard.size_bytes for shard in manifest.shards),
        "manifest": name,
        "dry_run": dry_run,
    }
    screen.result(value, lambda out: _show(out, location, value))
    return ExitCode.OK


def _newest_good_attempt(screen: CommandOutput, catalog: DurableCatalog, location: Location) -> Manifest:
    """Return the newest attempt with good shards. Without one, raise the error of the newest attempt."""
    found = _attempts(catalog, location)
    if not found:
        raise CheckpointNotFoundError(f"{location}: no shard of it is in {catalog.store.url}")
    first: CheckpointDamagedError | None = None
    for group in sorted(found, reverse=True):
        try:
            return _rebuild(screen, catalog, group)
        except CheckpointDamagedError as error:
            first = first or error
    raise first or CheckpointNotFoundError(str(location))


def _attempts(catalog: DurableCatalog, location: Location) -> set[VersionId]:
    prefix = f"{object_keys.shards_prefix(location.job)}{location.step:012d}/"
    places = (object_keys.parse_shard_object_key(info.name, location.job) for info in catalog.store.list(prefix))
    return {place[0] for place in places if place is not None and place[2] == "index" and location.includes(place[0])}


def _rebuild(screen: CommandOutput, catalog: DurableCatalog, group: VersionId) -> Manifest:
    files = catalog.shard_files(group)
    manifest = manifest_from_shard_files(list(files.values()), created_ns=time.time_ns(), writer="tieredckpt rebuild")
    missing = manifest.parts - len(manifest.shards)
    if missing:
        absent = _missing_names(manifest)
        if absent is None or absent:
            names_of = f", and with them {', '.join(absent[:_SHOWN])}" if absent else ""
            raise CheckpointDamagedError(
                f"step {group.version} ({object_keys.group_stem(group)}) lacks {missing} of {manifest.parts} "
                f"parts{names_of}"
            )
    _check_bytes(screen, catalog, manifest)
    return manifest


def _missing_names(manifest: Manifest) -> list[str] | None:
    """Return the names that the existing shards do not hold.

    ``None``: the names of the whole state are unknown.
    """
    if not manifest.tables:
        return None
    table = decode_table(next(iter(manifest.tables.values())))
    return missing_entries(table, [manifest.layout_of(shard) for shard in manifest.shards])


def _check_bytes(screen: CommandOutput, catalog: DurableCatalog, manifest: Manifest) -> None:
    total = sum(shard.size_bytes for shard in manifest.shards)
    with screen.progress_bar(f"verifying step {manifest.step}", total) as advance:
        for shard in manifest.shards:
            try:
                bad = damaged_chunks(catalog.store, shard, advance)
            except ObjectNotFoundError as error:
                raise CheckpointDamagedError(f"{shard.key}: {error}") from error
            if bad:
                raise CheckpointDamagedError(f"{shard.key}: {show_count(len(bad), 'chunk')} of {shard.object} differ")


def _base(manifest: Manifest) -> int | None:
    return next((shard.meta.base for shard in manifest.shards if shard.meta.base is not None), None)


def _replace(catalog: DurableCatalog, manifest: Manifest) -> None:
    """Write the manifest, replacing an existing one of the same version."""
    entry = catalog.listing(fresh=True).manifests.get(manifest.group)
    base = entry.base if entry is not None else _base(manifest)
    if entry is not None:
        catalog.store.delete([object_keys.manifest_key(manifest.job, manifest.group, entry.base)])
    catalog.commit(manifest, base)


def _show(out: Console, location: Location, value: dict[str, Any]) -> None:
    done = "can be rebuilt from" if value["dry_run"] else "was rebuilt from"
    out.print(
        f"{literal(str(location))} {done} {show_count(value['found'], 'shard')} ({show_size(value['size_bytes'])}, all "
        f"verified): {literal(value['manifest'])}"
    )
