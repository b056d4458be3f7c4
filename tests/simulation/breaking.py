"""Rules of production, each broken on purpose, to see that the simulation finds out.

``python -m tests.simulation --break settle-half`` looks for the first schedule in which it shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from peerstore.cluster.membership import Membership
from peerstore.cluster.placement import place
from peerstore.errors import FencedError
from peerstore.jobs import Jobs
from peerstore.ledger import newest_whole
from peerstore.peers import duties
from peerstore.peers.accounts import Accounts
from peerstore.peers.duties import Tally
from tests.simulation import agent, memory, restoring, transfers
from tests.simulation.schedule import Schedule, schedule_of
from tests.simulation.world import Shape
from tieredckpt import resolve


@dataclass(frozen=True)
class Broken:
    """What is put in the place of one decision, and which invariant is to notice."""

    where: Any
    name: str
    instead: Any
    noticed: str
    """Part of what the violation says."""
    among: tuple[str, ...] = ()
    """The kinds of events of the schedules that look for it; empty: all."""
    shape: Shape | None = None

    def schedule_of(self, seed: int) -> Schedule:
        return schedule_of(seed, self.among, self.shape)


def _of_any_rack(nodes: Any, copies: int, levels: tuple[str, ...]) -> Any:
    return place([msgspec.structs.replace(node, labels=()) for node in nodes], copies=copies, levels=levels)


_complete = Tally.complete


def _halves_count(tally: Tally, **known: Any) -> Any:
    for said in tally._said.values():
        for node, note in said.items():
            said[node] = msgspec.structs.replace(note, parts_in_all=len(note.parts))
    return _complete(tally, **known)


_check_fence = Jobs.check_fence


def _let_all_write(jobs: Jobs, key: Any) -> None:
    with contextlib.suppress(FencedError):
        _check_fence(jobs, key)


_SPARE = Shape(nodes=5, copies=2, parts=2)
"""More machines than ranks: the job may go on elsewhere while its past does not know of it."""

_plan = duties.plan


def _no_new_partner(held: Any, *, partners: Any, **known: Any) -> Any:
    return _plan(held, partners=partners if len(held.listed) < 2 else (), **known)


BROKEN = {
    "evict-whole": Broken(
        Jobs, "settled", lambda _, whole, mending=None: newest_whole(whole), "the last copy of a part"
    ),
    "count-unverified": Broken(transfers, "arrived_whole", lambda *_: True, "bytes nobody wrote"),
    "load-unverified": Broken(restoring, "damaged_chunks", lambda *_: (), "loaded with bytes that nobody wrote"),
    "stale-epoch": Broken(Jobs, "check_fence", _let_all_write, "although the job belongs to", ("save", "restart", "wait"), _SPARE),
    "settle-half": Broken(Tally, "complete", _halves_count, "is settled, but"),
    "torn": Broken(resolve.Candidate, "whole", True, "never was whole"),
    "alone": Broken(restoring, "elect", lambda votes: max(votes[0], default=None), "do not load the same step", ("save", "part", "restart all", "wait"), _SPARE),
    "oldest": Broken(resolve, "_order", lambda group: (-group.version,), "could be reached"),
    "past": Broken(resolve, "left_behind", lambda *_: False, "left", ("save", "save", "part", "heal", "restart all"), _SPARE),
    "silent-is-absent": Broken(
        resolve.Resolution, "unreachable", property(lambda _: (), lambda *_: None), "starts from nothing"
    ),
    "one-rack": Broken(memory, "_placed", _of_any_rack, "in one rack"),
    "no-quorum": Broken(Membership, "_objection", lambda _: "", "both halves", ("save", "part", "restart all", "wait"), _SPARE),
    "first-life": Broken(Membership, "life", lambda *_: 1, "cop"),
    "no-mending": Broken(agent, "worth_mending", lambda *_: False, "does not get its copies again", ("save", "corrupt", "part", "wait")),
    "no-new-partner": Broken(duties, "plan", _no_new_partner, "took the last copy", ("save", "crash", "wait")),
    "no-exception": Broken(
        __import__("peerstore.ledger").ledger, "stranded", lambda *_, **__: [], "cannot go on"
    ),
    "ask-forever": Broken(Accounts, "done", lambda *_: None, "no end"),
}


@contextlib.contextmanager
def broken_rule(name: str | None) -> Iterator[None]:
    """While the block runs, this rule does not hold; ``None`` breaks none."""
    if name is None:
        yield
        return
    rule = BROKEN[name]
    kept = vars(rule.where)[rule.name]
    setattr(rule.where, rule.name, rule.instead)
    try:
        yield
    finally:
        setattr(rule.where, rule.name, kept)
