"""Agreement between the ranks of one DCP call: process group, messages in plans, store.

With collectives, each rank's proposal goes to DCP's coordinator with its plan, and the decision returns with the final
plan. A planner may drop or cache the contents of a plan, so a message does not remain in it. The thread that saves
receives the message when the plan is unpickled.

Without collectives the messages go through the ranks' rendezvous store.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.checkpoint.utils import _DistWrapper

from peerstore.errors import PeerStoreError
from peerstore.message_codec import from_json
from peerstore.shard_records import clock_ms
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointDeletedError,
    MismatchError,
    PeersLostError,
    SaveFailedError,
    TieredCheckpointError,
    TierUnavailableError,
)
from tieredckpt.gc_pause import gc_paused
from tieredckpt.rank_error import RankError
from tieredckpt.session.agent_discovery import have_agents_joined, join_peer_agents, record_joined_agents
from tieredckpt.session.incarnation import SaveDecision, SaveProposal, decide_save
from tieredckpt.session.session import Session
from tieredckpt.tensors.state_dict import StateDict, is_stateful, resolve_stateful

log = logging.getLogger(__name__)

_PLAN_TIMEOUT = timedelta(minutes=10)


T = TypeVar("T")


class RankGroup:
    """Ranks of a process group, by default of a new one, or this process without a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._own_group = None
        if group is None and dist.is_initialized():
            # Collectives of a save must not mix with those of the training on one group.
            group = self._own_group = dist.new_group(backend="gloo", timeout=_PLAN_TIMEOUT)
        self._group = group

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group) if dist.is_initialized() else 0

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group) if dist.is_initialized() else 1

    def all_gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, in order of ranks."""
        if not dist.is_initialized():
            return [text]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, text, group=self._group)
        return gathered

    def call_on_all(self, call: Callable[[], T]) -> T:
        """Return the result of ``call`` once all ranks have it; raise the failure of one rank on all."""
        error: Exception | None = None
        problem = RankError()
        try:
            result = call()
        except Exception as failure:  # noqa: BLE001 - raised below, once the other ranks know
            error = _own_error(failure)
            problem = RankError.of(error)
        answers = [from_json(text, RankError) for text in self.all_gather(msgspec.json.encode(problem).decode())]
        if error is not None:
            raise error
        problems = [(rank, answer) for rank, answer in enumerate(answers) if answer.message]
        if problems:
            described = "; ".join(f"rank {rank}: {answer.message}" for rank, answer in problems)
            raise RankError(described, problems[0][1].kind).error()
        return result

    def call_dcp(self, call: Callable[..., object], state: dict[str, Any], **storage: object) -> None:
        """Run DCP's save or load on all ranks, or without ``torch.distributed`` in this process only."""
        with warnings.catch_warnings():
            if is_alone := not dist.is_initialized():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            call(state, process_group=self._group, no_dist=is_alone, **storage)

    def load(self, state: StateDict, reader: StorageReader, planner: LoadPlanner) -> None:
        """Load as ``dcp.load`` does; raise a failure of any rank on all ranks, as ``CheckpointException``."""
        ranks = _DistWrapper(self._group, dist.is_initialized(), 0)
        names = sorted(state)  # load_state_dict() may have collectives
        filled = resolve_stateful({name: state[name] for name in names})

        def plan_own() -> LoadPlan:
            with gc_paused():
                metadata = reader.read_metadata()
                planner.set_up_planner(filled, metadata, ranks.is_coordinator)
                reader.set_up_storage_reader(metadata, ranks.is_coordinator, rank=ranks.rank)
                return reader.prepare_local_plan(planner.create_local_plan())

        def plan_all(plans: list[LoadPlan]) -> list[LoadPlan]:
            return reader.prepare_global_plan(planner.create_global_plan(plans))

        plan = ranks.reduce_scatter("plan", plan_own, plan_all)
        ranks.all_gather("read", lambda: reader.read_data(planner.finish_plan(plan), planner).wait())
        for name in names:
            value = state[name]
            if is_stateful(value):
                value.load_state_dict(filled[name])
            else:
                state[name] = filled[name]

    def close(self) -> None:
        if self._own_group is not None and dist.is_initialized():
            dist.destroy_process_group(self._own_group)
            self._own_group = None


_TIMEOUT_S = 120.0
"""Seconds that a rank waits for a key in the store."""
_FRAMES = 24
"""Stack frames that are searched for DCP's call."""
_PAUSES_S = 0.001, 0.05
"""First and longest pause in seconds between two checks of the store."""
MessageT = TypeVar("MessageT")
_received = threading.local()


class PlanMessage:
    """Message in a plan, removed when the plan is unpickled; ``stays``: it also remains in the plan."""

    def __init__(self, message: object, *, stays: bool = False) -> None:
        self.message = message
        self.keep_in_plan = stays
        self.name = secrets.token_hex(8)

    def __reduce__(self) -> tuple[Callable[[str, object, bool], object], tuple[str, object, bool]]:
        return _take_out, (self.name, self.message, self.keep_in_plan)


def _take_out(name: str, message: object, stays: bool) -> object:
    """Record a message of an unpickled or copied plan; return its replacement in the plan."""
    _messages()[name] = message
    return message if stays else None


def _messages() -> dict[str, object]:
    if not hasattr(_received, "messages"):
        _received.messages = {}
    messages: dict[str, object] = _received.messages
    return messages


def clear_plan_messages() -> None:
    """Discard messages that this thread received for another save or load."""
    _messages().clear()


def received_plan_messages(kind: type[MessageT]) -> list[MessageT]:
    """Return the messages of this kind that this thread has received."""
    return [message for message in _messages().values() if isinstance(message, kind)]


@dataclass(frozen=True)
class SaveRanks:
    """Ranks that take part in one call of DCP's save."""

    ranks: tuple[int, ...]
    """Global ranks; empty if this process saves without others."""

    @property
    def part_count(self) -> int:
        return max(1, len(self.ranks))

    @property
    def part(self) -> int:
        """Position of this rank among them."""
        return self.ranks.index(dist.get_rank()) if self.ranks else 0


def current_save_ranks() -> SaveRanks:
    """Return the ranks of the DCP save that is running in this thread.

    DCP passes a rank and no group to a writer. All its versions store the group in the local variable ``distW``, so
    this function searches the stack for it. Without such a variable it is the default group.
    """
    found = _find_dcp_call()
    if found is None:
        return _members(None) if dist.is_initialized() else SaveRanks(())
    return _members(found.group) if found.use_dist else SaveRanks(())


def join_agents_in_dcp_call(
    storage: StorageWriter | StorageReader, job: str, session: Callable[[], Session], *, restoring: bool
) -> None:
    """Let the agents of all ranks join, before the first plain DCP save or load of a world.

    In a call of some ranks they do not join, because the other ranks do not take part. The call must be one with
    ``storage``: one rank alone may use another writer or reader inside a call of all.
    """
    frame = _find_dcp_frame()
    if frame is None or storage not in (frame.f_locals.get("storage_writer"), frame.f_locals.get("storage_reader")):
        return
    call: _DistWrapper = frame.f_locals["distW"]
    if not call.use_dist:
        return
    if _members(call.group).part_count < dist.get_world_size():
        if not restoring and session().registration.agents_are_isolated:
            _warn_of_missing_copies(job)
        return
    if not have_agents_joined(job, restoring=restoring):
        ranks = RankGroup(call.group or dist.group.WORLD)
        ranks.call_on_all(session)  # a rank without an agent would block the others in the store
        ranks.call_on_all(lambda: join_peer_agents(session(), restoring=restoring))
        record_joined_agents(job, restoring=restoring)


@functools.cache  # warn once
def _warn_of_missing_copies(job: str) -> None:
    log.warning(
        "%s: its steps have no copies on other nodes, because only some of the ranks called dcp.save. Nodes learn of "
        "each other in a call of all ranks. Save once with all ranks, or set peer.discovery",
        job,
    )


def dcp_call_world_size() -> int | None:
    """Return the number of ranks in the DCP call on this thread's stack, or ``None`` without such a call."""
    found = _find_dcp_call()
    if found is None:
        return None
    return _members(found.group).part_count if found.use_dist else 1


def _find_dcp_call() -> _DistWrapper | None:
    frame = _find_dcp_frame()
    return None if frame is None else frame.f_locals["distW"]


def _find_dcp_frame() -> FrameType | None:
    """Return the frame of the innermost DCP call on this thread's stack."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None or isinstance(frame.f_locals.get("distW"), _DistWrapper):
            return frame
        frame = frame.f_back
    return None


def _members(group: dist.ProcessGroup | None) -> SaveRanks:
    if group is None and not dist.is_initialized():
        return SaveRanks(())
    return SaveRanks(tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)))


def decide_for_ranks(proposals: Sequence[SaveProposal]) -> SaveDecision:
    return decide_save(proposals, secrets.token_hex(6), clock_ms())


def agree_via_store(proposal: SaveProposal, saving: SaveRanks) -> SaveDecision:
    """Agree on one decision for all ranks of a save through the store; all of them call this."""
    if saving.part_count == 1:
        return decide_for_ranks([proposal])
    store = dist.distributed_c10d._get_default_store()
    rank = saving.part
    name = f"tieredckpt/{proposal.job}/saves/{_digest(saving.ranks)}/{proposal.step}"
    # The store counts the attempts, so that a restarted rank continues with the same count as the others.
    prefix = f"{name}/{store.add(f'{name}/{rank}', 1)}"
    store.set(f"{prefix}/{rank}", msgspec.json.encode(proposal).decode())
    if rank == 0:
        store.set(f"{prefix}/decision", _decide(store, prefix, saving))
    answer = from_json(_wait_for_key(store, f"{prefix}/decision", "the first rank did not say"), _Answer)
    if store.add(f"{prefix}/heard", 1) == saving.part_count:
        for each in range(saving.part_count):
            store.delete_key(f"{prefix}/{each}")
            store.delete_key(f"{name}/{each}")
        store.delete_key(f"{prefix}/decision")
        store.delete_key(f"{prefix}/heard")
    if answer.decision is None:
        raise answer.problem.error()
    return answer.decision


class _Answer(msgspec.Struct, frozen=True):
    decision: SaveDecision | None
    problem: RankError = RankError()


def _decide(store: torch.distributed.Store, prefix: str, saving: SaveRanks) -> str:
    try:
        proposals = [
            from_json(_wait_for_key(store, f"{prefix}/{rank}", f"rank {rank} did not come"), SaveProposal)
            for rank in range(saving.part_count)
        ]
        answer = _Answer(decide_for_ranks(proposals))
    except TieredCheckpointError as error:
        answer = _Answer(None, RankError.of(error))
    return msgspec.json.encode(answer).decode()


def _wait_for_key(store: torch.distributed.Store, key: str, otherwise: str) -> bytes:
    """Poll for a key of the store; a blocking wait would lock out this process's other threads."""
    deadline = time.monotonic() + _TIMEOUT_S
    pause, longest = _PAUSES_S
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise SaveFailedError(f"{otherwise} within {_TIMEOUT_S:.0f} s: without collectives, too, all ranks save")
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return store.get(key)


def _own_error(failure: Exception) -> Exception:
    """Return this package's error for one of the agent's or the operating system's."""
    if isinstance(failure, TieredCheckpointError) or not isinstance(failure, PeerStoreError | OSError):
        return failure
    error = TierUnavailableError(str(failure))
    error.__cause__ = failure
    return error


def _digest(ranks: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def unwrap_save_error(failure: BaseException) -> BaseException:
    """Return the package's most specific error inside DCP's exception, or ``failure`` itself.

    A damaged checkpoint comes before an unavailable tier, and that before other errors.
    """
    if isinstance(failure, CheckpointException):
        errors = [error for error, _ in failure.failures.values() if isinstance(error, TieredCheckpointError)]
        for kind in (
            CheckpointDamagedError,
            PeersLostError,
            CheckpointDeletedError,
            TierUnavailableError,
            TieredCheckpointError,
        ):
            for error in errors:
                if isinstance(error, kind):
                    return error
    return failure


def unwrap_load_error(failure: CheckpointException) -> BaseException:
    """Return the error to raise for a load that failed inside DCP."""
    own = unwrap_save_error(failure)
    if own is not failure:
        return own
    first = next(iter(failure.failures.values()))[0]
    if isinstance(first, ValueError | RuntimeError):  # from DCP's planner, for different names or shapes
        hint = " With strict=False what there is of the state is restored" if "Missing key" in str(first) else ""
        return MismatchError(f"the state and the checkpoint do not fit: {first}{hint}")
    return failure
