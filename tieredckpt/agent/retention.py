"""Retention: which durable steps may be deleted. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from peerstore.shard_records import VersionId
from tieredckpt.errors import UsageError
from tieredckpt.resolve_step import Candidate, IncarnationBranches, StepVerdict, resolve_step


def expired_steps(
    complete: Mapping[VersionId, int | None],
    *,
    keep_last: int,
    keep_every: int = 0,
    quarantined: Collection[VersionId] = (),
    kept: Collection[VersionId] = (),
) -> list[VersionId]:
    """Return the complete steps to delete, oldest first.

    ``complete`` maps each complete step to the step that its incarnation resumed from. ``keep_last`` counts steps, not
    attempts; 0 retains all. Steps in ``kept`` remain and do not count. The step that a restore would choose always
    remains. Quarantined steps and steps of branches that the job has left do not count. They are deleted once enough
    good steps are newer.
    """
    if keep_last <= 0:
        return []
    seen = {group: Candidate(group, 0, {}, base) for group, base in complete.items()}
    verdicts = resolve_step(list(seen.values()), quarantined=quarantined).verdicts
    unused = {group for group in complete if verdicts[group] in (StepVerdict.QUARANTINED, StepVerdict.SUPERSEDED)}
    good = {group.version for group in complete if group not in unused}
    good -= {group.version for group in kept}
    if not good:
        return []
    oldest = sorted(good)[-keep_last:][0]
    old = {group for group in complete if group.version < oldest}
    gone = {group for group in old if group in unused or not keep_every or group.version % keep_every} - {*kept}
    gone -= _still_needed(seen, gone, [g for g in unused - gone if verdicts[g] is StepVerdict.SUPERSEDED], quarantined)
    return sorted(gone, key=lambda group: (group.version, group.epoch, group.attempt, group.incarnation))


def _revived_steps(candidates: Collection[Candidate], gone: Collection[VersionId]) -> list[VersionId]:
    """Return steps of left branches that a restore would choose again if ``gone`` were deleted.

    Only the steps in ``gone`` show that the job left these branches.
    """

    def superseded(steps: Collection[Candidate]) -> set[VersionId]:
        found = resolve_step([one for one in steps if one.is_complete]).verdicts
        return {group for group, verdict in found.items() if verdict is StepVerdict.SUPERSEDED}

    remaining = [one for one in candidates if one.version_id not in gone]
    return sorted(superseded(candidates) - {*gone} - superseded(remaining))


def require_no_revival(job: str, candidates: Collection[Candidate], gone: Collection[VersionId]) -> None:
    """Raise ``UsageError`` if deleting ``gone`` lets a restore choose superseded steps."""
    revived = _revived_steps(candidates, gone)
    if revived:
        raise UsageError(
            f"Cannot delete step {', '.join(str(one.version) for one in gone)} of job {job}: the next restore would "
            f"then choose the abandoned steps {', '.join(str(one.version) for one in revived)}. Delete those first"
        )


def _still_needed(
    seen: Mapping[VersionId, Candidate],
    gone: set[VersionId],
    left: Collection[VersionId],
    quarantined: Collection[VersionId],
) -> set[VersionId]:
    """Return the steps of ``gone`` to retain, because only they show that the job left an older branch."""
    remaining = IncarnationBranches((one for group, one in seen.items() if group not in gone), quarantined)
    revived = [group for group in left if not remaining.supersede(group)]
    proofs = sorted(gone - {*quarantined}, reverse=True) if revived else []
    needed: list[Candidate] = []
    for group in revived:
        if not IncarnationBranches(needed).supersede(group):
            needed.append(next(seen[proof] for proof in proofs if IncarnationBranches([seen[proof]]).supersede(group)))
    return {one.version_id for one in needed}
