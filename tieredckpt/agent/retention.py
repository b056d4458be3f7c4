"""Retention: which durable steps may be deleted. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from peerstore.shard_records import VersionId
from tieredckpt.errors import UsageError
from tieredckpt.resolve_step import Candidate, IncarnationBranches, StepVerdict, resolve_step


def expired_steps(
    whole: Mapping[VersionId, int | None],
    *,
    keep_last: int,
    keep_every: int = 0,
    quarantined: Collection[VersionId] = (),
    kept: Collection[VersionId] = (),
) -> list[VersionId]:
    """Whole steps to delete, oldest first, out of all (with the step each one's incarnation began from).

    ``keep_last`` counts steps, not attempts at them; 0 keeps all. Those that somebody wants ``kept`` stay and are not
    counted. What a restore would choose is never deleted. Steps
    that are quarantined, or of a past that the job has left, do not count as kept and go once enough good ones are
    newer.
    """
    if keep_last <= 0:
        return []
    seen = {group: Candidate(group, 0, {}, base) for group, base in whole.items()}
    verdicts = resolve_step(list(seen.values()), quarantined=quarantined).verdicts
    unused = {group for group in whole if verdicts[group] in (StepVerdict.QUARANTINED, StepVerdict.SUPERSEDED)}
    good = {group.version for group in whole if group not in unused}
    good -= {group.version for group in kept}
    if not good:
        return []
    oldest = sorted(good)[-keep_last:][0]
    old = {group for group in whole if group.version < oldest}
    gone = {group for group in old if group in unused or not keep_every or group.version % keep_every} - {*kept}
    gone -= _still_needed(seen, gone, [g for g in unused - gone if verdicts[g] is StepVerdict.SUPERSEDED], quarantined)
    return sorted(gone, key=lambda group: (group.version, group.epoch, group.attempt, group.incarnation))


def _revived_steps(candidates: Collection[Candidate], gone: Collection[VersionId]) -> list[VersionId]:
    """Steps of a past that the job has left, and that would be chosen again if ``gone`` were deleted: nothing else says
    that it did.
    """

    def left(seen: Collection[Candidate]) -> set[VersionId]:
        found = resolve_step([one for one in seen if one.is_complete]).verdicts
        return {group for group, verdict in found.items() if verdict is StepVerdict.SUPERSEDED}

    stay = [one for one in candidates if one.version_id not in gone]
    return sorted(left(candidates) - {*gone} - left(stay))


def require_no_revival(job: str, candidates: Collection[Candidate], gone: Collection[VersionId]) -> None:
    """Raise ``UsageError`` if a restore would choose steps that the job has left once ``gone`` are deleted."""
    revived = _revived_steps(candidates, gone)
    if revived:
        raise UsageError(
            f"job {job}: without step {', '.join(str(one.version) for one in gone)} nothing would say that the "
            f"job left steps {', '.join(str(one.version) for one in revived)} behind when it was restored from an "
            "older one, and the next restore would take those. Drop those first"
        )


def _still_needed(
    seen: Mapping[VersionId, Candidate],
    gone: set[VersionId],
    left: Collection[VersionId],
    quarantined: Collection[VersionId],
) -> set[VersionId]:
    """Steps whose deletion would bring back a past that the job has left: nothing else says that it did."""
    stay = IncarnationBranches((one for group, one in seen.items() if group not in gone), quarantined)
    lost = [group for group in left if not stay.supersede(group)]
    proofs = sorted(gone - {*quarantined}, reverse=True) if lost else []
    needed: list[Candidate] = []
    for group in lost:
        if not IncarnationBranches(needed).supersede(group):
            needed.append(next(seen[proof] for proof in proofs if IncarnationBranches([seen[proof]]).supersede(group)))
    return {one.version_id for one in needed}
