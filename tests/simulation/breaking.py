"""Rules of production, each broken on purpose, to see that the simulation finds out.

``python -m tests.simulation --break settle-half`` looks for the first schedule in which it shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from peerstore import ledger
from peerstore.cluster.membership import Membership
from peerstore.cluster.placement import Placement, place
from peerstore.commit import Decided, Reports, Settling, Tally, Versions, newest_whole
from peerstore.errors import FencedError
from peerstore.jobs import Jobs
from peerstore.peers import duties
from peerstore.peers.accounts import Accounts
from peerstore.peers.duties import Held
from peerstore.peers.keeping import Keeping
from peerstore.peers.sharing import Sharing
from peerstore.records import Group, ShardKey
from tests.simulation import agent, memory, restoring, transfers
from tests.simulation.schedule import Schedule, schedule_of
from tests.simulation.world import Shape
from tieredckpt import resolve

_FEW_RANKS = Shape(nodes=4, copies=3, parts=2)
"""Either half of the machines may have a whole version: the job may go on in one, and the other not know of it."""
_PARITY = Shape(nodes=4, copies=1, parts=4, parity=3)


@dataclass(frozen=True)
class Broken:
    """What is put in the place of one decision, and which invariant is to notice."""

    where: Any
    name: str
    instead: Any
    noticed: str
    """Part of what the violation says."""
    kinds: tuple[str, ...] = ()
    """What happens in the schedules that look for it, in this order; empty: anything."""
    shape: Shape | None = None

    def schedule_of(self, seed: int) -> Schedule:
        return schedule_of(seed, self.kinds, self.shape)


_add, _check_fence, _complete, _plan = Tally.add, Jobs.check_fence, Reports.complete, duties.plan
_torn, _leave_out = Tally.torn, Versions.leave_out


def _what_one_tells_is_all(tally: Tally, note: Settling) -> None:
    _add(tally, msgspec.structs.replace(note, parts_in_all=len(note.parts)))


def _all_may_write(jobs: Jobs, key: ShardKey) -> None:
    with contextlib.suppress(FencedError):
        _check_fence(jobs, key)


def _settle_alone(reports: Reports, *, quorum: bool, **known: Any) -> Decided:
    return _complete(reports, quorum=True, **known)


def _left_out_is_there(tally: Tally, note: Settling) -> None:
    _add(tally, msgspec.structs.replace(note, sealed=(*note.sealed, *note.left_out), left_out=()))


def _believe_the_writer(versions: Versions, group: Group, part: int, _here: Any) -> bool:
    return _leave_out(versions, group, part, ())


def _tear_alone(jobs: Jobs, job: str, groups: Any) -> list[Group]:
    jobs.of(job).tear(groups)
    return []


def _what_is_on_its_way_is_torn(tally: Tally) -> tuple[Group, ...]:
    tally._torn |= {group: False for group, said in tally._said.items() if not said.whole}
    return _torn(tally)


def _what_is_whole_is_torn(tally: Tally) -> tuple[Group, ...]:
    tally._torn |= {group: False for group, said in tally._said.items() if said.whole}
    return _torn(tally)


def _no_new_partner(held: Held, *, partners: Any, **known: Any) -> tuple[str, ...]:
    return _plan(held, partners=partners if len(held.listed) < 2 else (), **known)


def _as_if_without_racks(nodes: Any, copies: int, levels: tuple[str, ...]) -> Placement:
    return place([msgspec.structs.replace(node, labels=()) for node in nodes], copies=copies, levels=levels)


BROKEN = {
    "evict below whole": Broken(
        Jobs, "settled", lambda _, whole, mending=None: newest_whole(whole), "the last copy of a part of what"
    ),
    "keep all of the past": Broken(ledger, "stranded", lambda *_, **__: [], "cannot go on"),
    "count what was not compared": Broken(transfers, "arrived_whole", lambda *_: True, "that has bytes nobody wrote"),
    "load what was not compared": Broken(restoring, "damaged_chunks", lambda *_: (), "was loaded with bytes"),
    "let the past write": Broken(
        Jobs,
        "check_fence",
        _all_may_write,
        "although the job belongs to",
        ("save", "restart", *["wait"] * 2, *["save"] * 3, *["wait"] * 2, *["save"] * 3),
        Shape(nodes=5, copies=3, parts=2),
    ),
    "begin without a quorum": Broken(
        Membership,
        "_objection",
        lambda _: "",
        "let an incarnation begin",
        ("save", "wait", "part", *["wait"] * 2, *["restart all"] * 2, "wait", *["save"] * 3, "wait"),
        _FEW_RANKS,
    ),
    "settle without a quorum": Broken(
        Reports,
        "complete",
        _settle_alone,
        "both halves of a partition settle",
        ("save", "wait", "part", *["wait"] * 2, "restart all", "wait", *["save"] * 3, "wait", *["save"] * 2, "wait"),
        Shape(nodes=3, copies=2, parts=1),
    ),
    "settle with what one tells": Broken(Tally, "add", _what_one_tells_is_all, "is settled, but part"),
    "count what was left out": Broken(Tally, "add", _left_out_is_there, "is whole without"),
    "tear what is on its way": Broken(Tally, "torn", _what_is_on_its_way_is_torn, "and nobody left a part out"),
    "tear what is whole": Broken(Tally, "torn", _what_is_whole_is_torn, "two answers"),
    "believe who did not hear": Broken(Versions, "leave_out", _believe_the_writer, "for left out, and was sealed"),
    "keep what is torn": Broken(Jobs, "tear", _tear_alone, "what is torn still takes room"),
    "ignore racks": Broken(memory, "_placed", _as_if_without_racks, "in one rack"),
    "seek no new partner": Broken(
        duties, "plan", _no_new_partner, "took the last copy", ("save", "wait", "crash", *["wait"] * 4, "crash")
    ),
    "mend never": Broken(
        agent, "worth_mending", lambda *_: False, "its copies again", ("save", "wait", "part", *["corrupt"] * 2, "heal")
    ),
    "believe who started again": Broken(Membership, "life", lambda *_: 1, "its copies again"),
    "believe parity's members who started again": Broken(
        Sharing,
        "_holding",
        lambda sharing, key: list(sharing._holders.get(key, ())),
        "is not made again from parity",
        ("save", "wait", "crash and return"),
        _PARITY,
    ),
    "count on two parts of one node": Broken(
        Keeping,
        "_useful",
        lambda _, kept: list(kept),
        "does not get its copies again",
        ("save", "wait", "crash and return"),
        _PARITY,
    ),
    "ask for ever": Broken(Accounts, "done", lambda *_: None, "and no end"),
    "choose what is torn": Broken(resolve.Candidate, "whole", True, "never was whole"),
    "choose alone": Broken(
        restoring,
        "elect",
        lambda votes: max(votes[0], default=None),
        "do not load the same step",
        ("save", "wait", "save", "noise", *["restart all", "wait", "wait"] * 3),
    ),
    "choose the oldest": Broken(resolve, "_order", lambda group: (-group.version,), "could be reached"),
    "choose what was left": Broken(
        resolve.Branches,
        "leave",
        lambda *_: False,
        "had left it behind",
        ("save", "wait", "part", *["save"] * 2, "wait", "restart all", "wait", *["save"] * 2, "heal", "restart all"),
        _FEW_RANKS,
    ),
    "take silence for absence": Broken(
        resolve.Resolution, "unreachable", property(lambda _: (), lambda *_: None), "starts from nothing"
    ),
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
