"""Which durable steps may go. Pure."""

from __future__ import annotations

from collections.abc import Collection

from peerstore.records import Group


def victims(
    whole: Collection[Group], *, keep_last: int, keep_every: int = 0, quarantined: Collection[Group] = ()
) -> list[Group]:
    """Whole steps to delete, oldest first. ``keep_last`` 0 keeps all; the newest good one is never among them.

    Quarantined steps do not count as kept and are deleted once enough good ones are newer.
    """
    if keep_last <= 0:
        return []
    order = sorted(whole, key=lambda group: (group.version, group.epoch, group.attempt, group.incarnation))
    good = [group for group in order if group not in quarantined]
    if not good:
        return []
    kept = set(good[-keep_last:])
    kept.update(group for group in good if keep_every and group.version % keep_every == 0)
    oldest = order.index(good[-keep_last:][0])
    return [group for number, group in enumerate(order) if group not in kept and number < oldest]
