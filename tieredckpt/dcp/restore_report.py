"""Result of a load, and its messages: mismatched entries and newer steps that it leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from peerstore.errors import PeerStoreError
from peerstore.shard_records import VersionId
from tieredckpt.errors import MismatchError, TieredCheckpointError
from tieredckpt.resolve_step import Candidate, Tier
from tieredckpt.restore.proof import RestoreProof
from tieredckpt.session.session import Session
from tieredckpt.tensors.state_dict import StateDict, flatten_state, resolve_stateful

log = logging.getLogger(__name__)
_MAX_NAMES = 5


@dataclass
class RestoreReport:
    """Result of a load: the step and its sources, or the reasons why no saved step was loaded."""

    step: int
    """Loaded step; -1 for none."""
    version_id: VersionId | None
    bytes_by_tier: dict[str, int]
    seconds: float = 0.0
    refused: tuple[str, ...] = ()
    """Newer steps that could not be used, with the reasons."""
    bytes_by_node: dict[str, int] = field(default_factory=dict)
    """Bytes of the peer tier by node."""
    mode: Literal["live", "snapshot", "torn", "lost", "damaged"] = "snapshot"
    """``live`` for the state of a fault's survivors, ``snapshot`` for a saved step.

    With step -1: ``torn`` if no save ever became complete, ``lost`` or ``damaged`` with ``on_lost="start_fresh"``.
    """
    steps_redone: int | None = None
    """Number of steps that a fault makes the training repeat; ``None`` without a fault."""
    newer_steps: tuple[VersionId, ...] = ()
    """Complete newer steps of other branches, oldest first, which the job abandons and repeats."""
    proof: RestoreProof | None = None
    """Comparison of the loaded state with the saved one; ``None`` without a comparison."""


def describe_newer_steps(session: Session, report: RestoreReport, usable: Sequence[Candidate]) -> str:
    """Return which newer complete steps the restored one leaves behind, and how to keep them; "" for none.

    ``usable``: the usable complete steps of all branches.
    """
    if not report.newer_steps:
        return ""
    job = session.job
    newest = report.newer_steps[-1]
    tiers = next(one.found.values() for one in usable if one.version_id == newest)
    found = {tier for tiers_of_part in tiers for tier in tiers_of_part}
    locations = ["this node's memory"] * (Tier.MEMORY in found)
    try:
        described = session.agent.steps.describe(job, newest)
    except (TieredCheckpointError, PeerStoreError) as error:
        log.debug("%s: the agent did not describe step %d: %s", job, newest.version, error)
        locations += ["the memory of other nodes"] * (Tier.PEER in found)
    else:
        nodes = sorted({source.node for sources in described.sources.values() for source in sources})
        locations += [f"the memory of {abbreviate(nodes)}"] if nodes else []
        found |= {tier for tiers_of_part in described.found.values() for tier in tiers_of_part}
    locations += ["the durable tier"] * (Tier.DURABLE in found)
    epochs = sorted({one.epoch for one in report.newer_steps})
    branches = [
        f"step{'s' * (len(steps) > 1)} {abbreviate([str(step) for step in steps])} of epoch {epoch}"
        for epoch in epochs
        for steps in [sorted({one.version for one in report.newer_steps if one.epoch == epoch}, reverse=True)]
    ]
    repeated = newest.version - report.step
    return (
        f"{job}: step {report.step} was restored, which leaves complete newer steps behind: "
        f"{'; '.join(branches)} (step {newest.version}: {', '.join(locations) or 'unknown tier'}). The job does "
        f"{repeated} step{'s' * (repeated > 1)} again. To keep step {newest.version}: tieredckpt pin {job} "
        f"{newest.version}@{newest.epoch}. To continue from it: elastic run --resume-from "
        f"{newest.version}@{newest.epoch}"
    )


def describe_mismatches(job: str, step: int, rank: int, proof: RestoreProof) -> str:
    """Return a message about mismatched entries, or an empty string."""
    if not proof.mismatched:
        return ""
    shown = abbreviate([f"{name} ({what})" if what else name for name, what in proof.mismatched.items()])
    count = "1 entry differs" if len(proof.mismatched) == 1 else f"{len(proof.mismatched)} entries differ"
    return (
        f"step {step} of {job} was restored, and on rank {rank} {count} from the saved state: "
        f"{shown}. Do not train on it. If every restore fails, two entries share memory or a load_state_dict() skips "
        "an entry. If another restore succeeds, memory was damaged during this one. To disable this check: "
        "TIEREDCKPT_MEMORY_PROOF=0, or Checkpointer(..., proof=False)"
    )


def abbreviate(names: Sequence[str]) -> str:
    """Return the first few of many names, and the number of the others."""
    return ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")


def explain_mismatch(
    error: MismatchError, state: StateDict, metadata: Metadata, job: str, step: int | None
) -> MismatchError:
    """Return an error that names all entries of ``state`` that do not match the step, or else ``error``."""
    saved, wanted = metadata.state_dict_metadata, flatten_state(resolve_stateful(state))
    if "Missing key" in str(error):
        unknown, left = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
        only_saved = f"; step {step} has {abbreviate(left)}, which the state does not" if left else ""
        text = (
            f"The state and step {step} of {job} do not match: the state has {abbreviate(unknown)}, which the step "
            f"does not{only_saved}. Rename the entries, or restore those that both have with strict=False"
        )
        return MismatchError(text) if unknown else error
    shapes = [
        f"{name} has the shape {tuple(value.shape)} and was saved with {tuple(entry.size)}"
        for name, value in sorted(wanted.items())
        if isinstance(value, torch.Tensor)
        and isinstance(entry := saved.get(name), TensorStorageMetadata)
        and value.shape != entry.size
    ]
    if not shapes or "Size mismatch" not in str(error):
        return error
    return MismatchError(
        f"Size mismatch between the state and step {step} of {job}: {abbreviate(shapes)}. Create the state with the "
        "saved shapes. To restore the other entries only, remove these from the state and pass strict=False"
    )
