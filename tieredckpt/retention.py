"""Which durable steps may go. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from peerstore.records import Group
from tieredckpt.resolve import Candidate, Verdict, resolve


def victims(
    whole: Mapping[Group, int | None], *, keep_last: int, keep_every: int = 0, quarantined: Collection[Group] = ()
) -> list[Group]:
    """Whole steps to delete, oldest first, out of all (with the step each one's incarnation began from).

    ``keep_last`` counts steps, not attempts at them; 0 keeps all. What a restore would choose is never deleted. Steps
    that are quarantined, or of a past that the job has left, do not count as kept and go once enough good ones are
    newer.
    """
    if keep_last <= 0:
        return []
    seen = resolve([Candidate(group, 0, {}, base) for group, base in whole.items()], quarantined=quarantined)
    unused = {g for g, verdict in seen.verdicts.items() if verdict in (Verdict.QUARANTINED, Verdict.SUPERSEDED)}
    good = {group.version for group in whole if group not in unused}
    if not good:
        return []
    oldest = sorted(good)[-keep_last:][0]
    old = [group for group in whole if group.version < oldest]
    gone = [group for group in old if group in unused or not keep_every or group.version % keep_every]
    return sorted(gone, key=lambda group: (group.version, group.epoch, group.attempt, group.incarnation))
