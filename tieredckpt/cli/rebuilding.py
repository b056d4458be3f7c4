"""``tieredckpt rebuild``: a manifest out of what lies beside the shards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from peerstore.records import Group
from peerstore.units import show_size
from tieredckpt.agent.catalog import Catalog, manifest_from
from tieredckpt.cli.exits import Exit
from tieredckpt.cli.options import looking, pass_screen, settings_for, with_exits
from tieredckpt.cli.quarantining import step_of
from tieredckpt.cli.screen import Screen, count
from tieredckpt.cli.sight import open_sight
from tieredckpt.coverage import gaps
from tieredckpt.durable import names
from tieredckpt.durable.store import ObjectNotFoundError
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError
from tieredckpt.fetch import damaged_chunks
from tieredckpt.location import Location
from tieredckpt.manifest import Manifest, decode_table

_SHOWN = 5


@click.command("rebuild", short_help="Write a lost manifest anew from its shards.")
@click.argument("target", metavar="JOB/step-N")
@click.option("--dry-run", "-n", is_flag=True, help="Only say whether it can be done.")
@looking
@pass_screen
@with_exits
def rebuild(screen: Screen, target: str, dry_run: bool, agent_dir: Path | None, durable: str | None) -> Exit:
    """Write a step's manifest anew from its shards' own indexes in the durable tier.

    For a manifest that was lost or damaged. Every shard is read and compared with its checksums first, and the shards
    have to hold the whole state. Of several attempts at the step, the latest that can be rebuilt is taken.
    """
    with open_sight(settings_for(agent_dir, durable, target)) as sight:
        location = step_of(target)
        catalog = sight.catalog(location.job)
        manifest = _latest(screen, catalog, location)
        name = names.manifest(location.job, manifest.group, _base(manifest))
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
    return Exit.OK


def _latest(screen: Screen, catalog: Catalog, location: Location) -> Manifest:
    """The newest attempt whose shards are all well; what is wrong with the newest one otherwise."""
    found = _attempts(catalog, location)
    if not found:
        raise CheckpointNotFoundError(f"{location}: no shard of it is in {catalog.store.url}")
    first: CheckpointDamagedError | None = None
    for group in sorted(found, reverse=True):
        try:
            return _rebuilt(screen, catalog, group)
        except CheckpointDamagedError as error:
            first = first or error
    raise first or CheckpointNotFoundError(str(location))


def _attempts(catalog: Catalog, location: Location) -> set[Group]:
    prefix = f"{names.steps(location.job)}{location.step:012d}/"
    places = (names.parse_shard(info.name, location.job) for info in catalog.store.list(prefix))
    return {place[0] for place in places if place is not None and place[2] == "index"}


def _rebuilt(screen: Screen, catalog: Catalog, group: Group) -> Manifest:
    files = catalog.shard_files(group)
    manifest = manifest_from(list(files.values()), created_ns=time.time_ns(), writer="tieredckpt rebuild")
    missing = manifest.parts - len(manifest.shards)
    if missing:
        lacking = _lacking(manifest)
        if lacking is None or lacking:
            names_of = f", and with them {', '.join(lacking[:_SHOWN])}" if lacking else ""
            raise CheckpointDamagedError(
                f"step {group.version} ({names.stem(group)}) lacks {missing} of {manifest.parts} parts{names_of}"
            )
    _check_bytes(screen, catalog, manifest)
    return manifest


def _lacking(manifest: Manifest) -> list[str] | None:
    """What the shards that are there do not hold; ``None`` when nobody knows what the whole state is."""
    if not manifest.tables:
        return None
    table = decode_table(next(iter(manifest.tables.values())))
    return gaps(table, [manifest.layout_of(shard) for shard in manifest.shards])


def _check_bytes(screen: Screen, catalog: Catalog, manifest: Manifest) -> None:
    total = sum(shard.size_bytes for shard in manifest.shards)
    with screen.progress(f"verifying step {manifest.step}", total) as advance:
        for shard in manifest.shards:
            try:
                bad = damaged_chunks(catalog.store, shard, advance)
            except ObjectNotFoundError as error:
                raise CheckpointDamagedError(f"{shard.key}: {error}") from error
            if bad:
                raise CheckpointDamagedError(f"{shard.key}: {count(len(bad), 'chunk')} of {shard.object} differ")


def _base(manifest: Manifest) -> int | None:
    return next((shard.meta.base for shard in manifest.shards if shard.meta.base is not None), None)


def _replace(catalog: Catalog, manifest: Manifest) -> None:
    """Put the manifest in the place of whatever is there under its own name."""
    entry = catalog.listing(fresh=True).manifests.get(manifest.group)
    base = entry.base if entry is not None else _base(manifest)
    if entry is not None:
        catalog.store.delete([names.manifest(manifest.job, manifest.group, entry.base)])
    catalog.commit(manifest, base)


def _show(out: Console, location: Location, value: dict[str, Any]) -> None:
    done = "can be rebuilt from" if value["dry_run"] else "was rebuilt from"
    out.print(
        f"{escape(str(location))} {done} {count(value['found'], 'shard')} ({show_size(value['size_bytes'])}, all "
        f"verified): {escape(value['manifest'])}"
    )
