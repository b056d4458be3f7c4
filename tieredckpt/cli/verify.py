"""``tieredckpt verify``: comparison of every copy of every shard with its checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from peerstore.checksums import chunk_count
from peerstore.errors import PeerStoreError, ShardDamagedError, ShardNotFoundError
from peerstore.membership.topology import PeerNode
from peerstore.shard_records import CHUNK_BYTES, ShardInfo, VersionId
from peerstore.sizes_and_durations import show_size
from tieredckpt.agent.agent_api import ClusterStatus, PeerSource
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.cli.cluster_tables import unreachable_lines
from tieredckpt.cli.command_output import AdvanceProgress, CommandOutput, literal, text_table
from tieredckpt.cli.common_options import pass_output, settings_from_options, tier_options, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode, worst_exit_code
from tieredckpt.cli.tier_client import TierClient, open_tier_client
from tieredckpt.durable.object_store import ObjectNotFoundError
from tieredckpt.errors import CheckpointDamagedError, DurableRefusedError, TierUnavailableError
from tieredckpt.format.manifest import Manifest, ShardIndex
from tieredckpt.location import Location, parse_location
from tieredckpt.resolve_step import Tier
from tieredckpt.restore.verified_reads import damaged_chunks
from tieredckpt.step_inventory import StepStatus
from tieredckpt.whatif.redundancy import unknown_nodes

_SHOWN_CHUNKS = 16
_CHUNKS_AT_ONCE = 64
"""Chunks that another node verifies per request."""


@dataclass(frozen=True)
class CopyCheck:
    """Result for one copy of one shard."""

    version_id: VersionId
    part: int
    tier: Tier
    size_bytes: int
    result: ExitCode
    """``OK``, ``DAMAGED`` or ``UNAVAILABLE``."""
    chunks: int = 0
    damaged: tuple[int, ...] = ()
    where: str = ""
    problem: str = ""
    node: str = ""
    """Node that has the copy in memory. Empty: a durable copy."""

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.version_id.version,
            "epoch": self.version_id.epoch,
            "part": self.part,
            "tier": self.tier.value,
            "result": {ExitCode.OK: "good", ExitCode.DAMAGED: "damaged"}.get(self.result, "unknown"),
            "size_bytes": self.size_bytes,
            "chunks": self.chunks,
            "damaged_chunks": list(self.damaged),
            "object": self.where or None,
            "node": self.node or None,
            "problem": self.problem or None,
        }


@with_exit_code_help
@click.command("verify", short_help="Compare every copy with its checksums.")
@click.argument("target", metavar="JOB[/step-N[@EPOCH]]")
@tier_options
@pass_output
def verify_command(screen: CommandOutput, target: str, agent_dir: Path | None, durable: str | None) -> ExitCode:
    """Compare all copies of all shards in memory and in the durable tier with their checksums.

    JOB alone means all of its steps, JOB/step-N all attempts at that step, JOB/step-N@EPOCH those of one run. Each node
    checks its own memory. Exit code 5: a node did not answer, and its copies were not checked. Agents drop damaged
    copies from memory. The durable tier is read completely and not changed.
    """
    with open_tier_client(settings_from_options(agent_dir, durable, target)) as client:
        location = parse_location(target)
        survey = client.survey(location.job)
        views = client.attempts_at(location, survey)
        cluster = client.agent.cluster_status(location.job) if client.agent else None
        checks = _check_all_copies(screen, client, location, views, cluster)
    silent = {} if cluster is None else unknown_nodes(cluster)
    problems = {tier.value: text for tier, text in survey.unreachable.items()}
    codes = [check.result for check in checks]
    if survey.is_partial or silent or not checks:
        codes.append(ExitCode.UNAVAILABLE)
    code = worst_exit_code(codes)
    value = {
        "job": location.job,
        "good": code is ExitCode.OK,
        "verified_bytes": sum(check.size_bytes for check in checks if check.result is ExitCode.OK),
        "unreachable": problems,
        "not_asked": silent,
        "checks": [check.as_json() for check in checks],
    }
    screen.result(value, lambda out: _show(out, location, checks, cluster, problems))
    return code


def _check_all_copies(
    screen: CommandOutput,
    client: TierClient,
    location: Location,
    views: Sequence[StepStatus],
    cluster: ClusterStatus | None,
) -> list[CopyCheck]:
    groups = {view.version_id for view in views}
    held = [
        (node, fact)
        for node in (cluster.nodes if cluster is not None else ())
        for fact in node.shards
        if fact.key.version_id in groups and not node.unreachable
    ]
    held.sort(key=lambda one: one[1].key)
    manifests, checks = _manifests(client, location, views)
    total = sum(fact.size_bytes for _, fact in held) + sum(s.size_bytes for m in manifests for s in m.shards)
    known = {shard.key: shard for manifest in manifests for shard in manifest.shards}
    with screen.progress_bar(f"verifying {location.job}", total) as advance:
        for node, fact in held:
            if client.agent is not None and cluster is not None and node.node.id == cluster.this_node:
                checks.append(_check_in_memory(client.agent, fact, known.get(fact.key), cluster.this_node))
                advance(fact.size_bytes)
            else:
                checks.append(_check_on_peer(client, location.job, node.node, fact, advance))
        for manifest in manifests:
            for shard in manifest.shards:
                checks.append(_check_in_store(client, location.job, shard, advance))
    return sorted(
        checks,
        key=lambda check: (
            check.version_id.version,
            check.version_id,
            check.part,
            check.tier is Tier.DURABLE,
            check.node,
        ),
    )


def _manifests(
    client: TierClient, location: Location, views: Sequence[StepStatus]
) -> tuple[list[Manifest], list[CopyCheck]]:
    found, checks = [], []
    for view in views:
        if not view.durable:
            continue
        try:
            found.append(client.catalog(location.job).manifest(view.version_id))
        except CheckpointDamagedError as error:
            checks.append(
                CopyCheck(view.version_id, -1, Tier.DURABLE, 0, ExitCode.DAMAGED, problem=f"manifest: {error}")
            )
        except (TierUnavailableError, DurableRefusedError) as error:
            checks.append(CopyCheck(view.version_id, -1, Tier.DURABLE, 0, ExitCode.UNAVAILABLE, problem=str(error)))
    return found, checks


def _check_in_memory(agent: NodeAgentClient, fact: ShardInfo, durable: ShardIndex | None, node: str) -> CopyCheck:
    key = fact.key

    def check(result: ExitCode, problem: str = "", bad: tuple[int, ...] = (), chunks: int = 0) -> CopyCheck:
        return CopyCheck(
            key.version_id, key.part, Tier.MEMORY, fact.size_bytes, result, chunks, bad, problem=problem, node=node
        )

    try:
        pin = agent.store.pin(key)
        try:
            record = pin.record
            bad = agent.store.verify(key)
        finally:
            pin.close()
            agent.store.unpin(pin.id)
    except ShardNotFoundError:
        return check(ExitCode.UNAVAILABLE, "evicted for a newer step in the meantime")
    except ShardDamagedError as error:
        return check(ExitCode.DAMAGED, str(error))
    except PeerStoreError as error:
        return check(ExitCode.UNAVAILABLE, str(error))
    chunks = chunk_count(record.size_bytes, record.chunk_bytes)
    if bad:
        return check(ExitCode.DAMAGED, "changed after it was sealed; the agent has dropped this copy", bad, chunks)
    if durable is not None and durable.checksums != record.checksums:
        return check(ExitCode.DAMAGED, "has other checksums than the durable copy of the same shard", chunks=chunks)
    return check(ExitCode.OK, chunks=chunks)


def _check_on_peer(
    client: TierClient, job: str, node: PeerNode, fact: ShardInfo, advance: AdvanceProgress
) -> CopyCheck:
    """Make another node verify its own copy."""
    key, reader = fact.key, client.peers(job)

    def check(result: ExitCode, problem: str = "") -> CopyCheck:
        return CopyCheck(
            key.version_id, key.part, Tier.PEER, fact.size_bytes, result, chunks, problem=problem, node=node.id
        )

    chunks = chunk_count(fact.size_bytes, CHUNK_BYTES)
    try:
        if reader is None:
            return check(ExitCode.UNAVAILABLE, "this process cannot reach its agent")
        for first in range(0, chunks, _CHUNKS_AT_ONCE):
            stop = min(chunks, first + _CHUNKS_AT_ONCE)
            if reader.is_damaged(PeerSource(node.id, node.address), key, (first, stop)):
                return check(ExitCode.DAMAGED, "changed after it was sealed; its agent has dropped this copy")
            advance(min(stop * CHUNK_BYTES, fact.size_bytes) - first * CHUNK_BYTES)
    except ShardNotFoundError:
        return check(ExitCode.UNAVAILABLE, "evicted for a newer step in the meantime")
    except ShardDamagedError as error:
        return check(ExitCode.DAMAGED, str(error))
    except (PeerStoreError, TierUnavailableError) as error:
        return check(ExitCode.UNAVAILABLE, str(error))
    return check(ExitCode.OK)


def _check_in_store(client: TierClient, job: str, shard: ShardIndex, advance: AdvanceProgress) -> CopyCheck:
    key, chunks = shard.key, chunk_count(shard.size_bytes, shard.chunk_bytes)

    def check(result: ExitCode, problem: str = "", bad: tuple[int, ...] = ()) -> CopyCheck:
        return CopyCheck(
            key.version_id, key.part, Tier.DURABLE, shard.size_bytes, result, chunks, bad, shard.object, problem
        )

    try:
        bad = damaged_chunks(client.object_store(job), shard, advance)
    except ObjectNotFoundError:
        return check(ExitCode.DAMAGED, "the object is missing", tuple(range(chunks)))
    except (TierUnavailableError, DurableRefusedError) as error:
        return check(ExitCode.UNAVAILABLE, str(error))
    return check(ExitCode.DAMAGED, "differs from the saved bytes", tuple(bad)) if bad else check(ExitCode.OK)


def _show(
    out: Console,
    location: Location,
    checks: Sequence[CopyCheck],
    cluster: ClusterStatus | None,
    unreachable: dict[str, str],
) -> None:
    rows = []
    groups = {check.version_id for check in checks}
    twice = len({group.version for group in groups}) < len({(group.version, group.epoch) for group in groups})
    for check in checks:
        epoch = [str(check.version_id.epoch)] if twice else []
        shown = {ExitCode.OK: "[green]good[/]", ExitCode.DAMAGED: "[red]damaged[/]"}.get(
            check.result, "[yellow]unknown[/]"
        )
        part = str(check.part) if check.part >= 0 else "-"
        rows.append(
            [
                *(str(check.version_id.version), *epoch, part, check.tier.value, literal(check.node or "-"), shown),
                *(show_size(check.size_bytes), literal(_problem(check))),
            ]
        )
    if rows:
        out.print(
            text_table(
                ["STEP", *(["EPOCH"] if twice else []), "PART", "TIER", "NODE", "RESULT", "SIZE", ""],
                rows,
                right=("STEP", "EPOCH", "PART", "SIZE"),
            )
        )
    for line in unreachable_lines(cluster) if cluster is not None else ():
        out.print(line)
    for tier, text in unreachable.items():
        out.print(f"[yellow]{tier} tier unavailable:[/] {literal(text)}")
    good = [check for check in checks if check.result is ExitCode.OK]
    damaged = sum(check.result is ExitCode.DAMAGED for check in checks)
    verdict = f"{len(good)} of {len(checks)} copies of {location} are good ({show_size(_bytes(good))} read)"
    out.print(verdict + (f", [bold red]{damaged} damaged[/]" if damaged else ""))


def _problem(check: CopyCheck) -> str:
    if not check.damaged:
        return check.problem
    first = ", ".join(map(str, check.damaged[:_SHOWN_CHUNKS]))
    more = f" and {len(check.damaged) - _SHOWN_CHUNKS} more" if len(check.damaged) > _SHOWN_CHUNKS else ""
    where = f"{check.where}: " if check.where else ""
    word = "chunk" if len(check.damaged) == 1 else "chunks"
    return f"{where}{word} {first}{more} of {check.chunks}: {check.problem}"


def _bytes(checks: Sequence[CopyCheck]) -> int:
    return sum(check.size_bytes for check in checks)
