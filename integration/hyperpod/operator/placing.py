"""Who gets which rank, and what each agent is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from integration.hyperpod.operator.actions import Start, StartBody, Update
from integration.hyperpod.operator.seen import Pod
from integration.hyperpod.operator.turn import Turn

_MARK = "+"


def arranged(chosen: Sequence[str], seats: Sequence[str]) -> tuple[str, ...]:
    """Who had a seat keeps it; who is new takes the seat of one who went, or the end."""
    staying = set(chosen).intersection(seats)
    new = iter([name for name in chosen if name not in staying])
    filled = (seat if seat in staying else next(new, None) for seat in seats)
    return (*(name for name in filled if name is not None), *new)


def version_of(epoch: int, now_s: float) -> str:
    """A moment, as AWS's versions are; with the world's number, so that no two are the same."""
    moment = datetime.fromtimestamp(now_s, timezone.utc).isoformat(timespec="milliseconds")
    return f"{moment.replace('+00:00', 'Z')}{_MARK}{epoch}"


def epoch_of(version: str | None) -> int:
    """The world's number; 0 for a version that no operator of this kind has made."""
    number = (version or "").rpartition(_MARK)[2]
    return int(number) if number.isdecimal() else 0


def give_ranks(turn: Turn, chosen: Sequence[Pod], waiting: Sequence[Pod]) -> None:
    """A new world of ``chosen``; the first of those who wait are its spares."""
    members = arranged([pod.name for pod in chosen], turn.state.seats)
    epoch = turn.state.epoch + 1
    port = turn.spec.master_port + epoch % turn.spec.master_ports
    turn.set(
        epoch=epoch,
        version=version_of(epoch, turn.now_s),
        members=members,
        spares=tuple(pod.name for pod in waiting[: turn.spec.spares]),
        master_addr=turn.pods[members[0]].ip,
        master_port=str(port),
    )


def start(turn: Turn, pod: Pod) -> Start:
    return Start(pod.name, _body(turn, pod))


def update(turn: Turn, pod: Pod) -> Update:
    return Update(pod.name, _body(turn, pod))


def _body(turn: Turn, pod: Pod) -> StartBody:
    state = turn.state
    everybody = (*state.members, *state.spares)
    ips = [(rank, turn.pods.get(name)) for rank, name in enumerate(state.members)]
    return StartBody(
        rank=everybody.index(pod.name),
        nnodes=len(state.members),
        fault_count=state.epoch - 1,
        master_addr=state.master_addr,
        master_port=state.master_port,
        version=state.version,
        rank_ips=tuple({"rank": rank, "ip": each.ip} for rank, each in ips if each is not None),
        worker_data=_data(turn),
        spare=pod.name in state.spares,
        progress=dict(state.progress),
        rules=turn.spec.rules or None,
    )


def _data(turn: Turn) -> list[object] | None:
    """What workers have told their agents, of all of them: every worker gets it back with its rank."""
    found: list[object] = []
    for pod in turn.members:
        found += pod.answer.worker_data if pod.answer is not None else ()
    return found or None
