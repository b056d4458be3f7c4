"""The step that the ranks sealed when their job was stopped, recorded by node agents for the next run.

A supervisor records it when the coordinator ends the job. The next run restores exactly this version, or raises. A node
that missed the end of the last run may have a higher step of an older incarnation. The record is valid until a later
incarnation has sealed a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from peerstore.errors import ShardDamagedError, ShardNotFoundError
from peerstore.message_codec import from_msgpack
from peerstore.shard_records import NonNegativeInt
from tieredckpt.agent.agent_api import NodeAgentAPI
from tieredckpt.errors import CheckpointDamagedError

STOPPED_STEP_BLOB = "stopped-step"


class StoppedStep(msgspec.Struct, frozen=True, order=True):
    """The version that the ranks sealed before a stop."""

    epoch: NonNegativeInt
    step: NonNegativeInt


class StopReport(msgspec.Struct, frozen=True):
    """A node's record of the last stop, and the newest versions that the node finds in the tiers."""

    stopped: StoppedStep | None = None
    newest_epoch: NonNegativeInt = 0
    """The greatest epoch of any version, complete or not."""
    newest_complete: StoppedStep | None = None


def record_stopped_step(agent: NodeAgentAPI, job: str, stopped: StoppedStep) -> None:
    """Record with the agent the step that the ranks of ``job`` sealed when it was stopped."""
    agent.store.blobs.put(job, STOPPED_STEP_BLOB, msgspec.msgpack.encode(stopped))


def report_last_stop(agent: NodeAgentAPI, job: str, *, avoid_after: int) -> StopReport:
    """Return the agent's record of the last stop and the newest versions in the tiers.

    A load avoids versions with ``avoid_after`` crashed loads.
    """
    try:
        stopped = from_msgpack(agent.store.blobs.get(job, STOPPED_STEP_BLOB), StoppedStep)
    except ShardNotFoundError:
        return StopReport()
    except (ShardDamagedError, msgspec.MsgspecError) as error:
        raise CheckpointDamagedError(
            f"{job}: the record of the step at which the job was stopped is damaged: {error}. Name the step to "
            "restore, for example with elastic run --resume-from STEP"
        ) from error
    survey = agent.list_steps(job, fresh=True)
    newest = survey.choose(avoid_after=avoid_after).version_id
    return StopReport(
        stopped,
        max((view.version_id.epoch for view in survey.views), default=0),
        None if newest is None else StoppedStep(newest.epoch, newest.version),
    )


def newest_stop(reports: Sequence[StopReport]) -> StoppedStep | None:
    """Return the newest recorded stop, or ``None`` if a later incarnation has sealed a shard."""
    stopped = max((one.stopped for one in reports if one.stopped is not None), default=None)
    newest_epoch = max((one.newest_epoch for one in reports), default=0)
    return None if stopped is None or newest_epoch > stopped.epoch else stopped


def describe_stop(stopped: StoppedStep, reports: Sequence[StopReport]) -> str:
    """Describe why this version is required, which complete one was found, and how to choose another."""
    found = [one.newest_complete for one in reports if one.newest_complete is not None]
    newest = max(found, key=lambda one: (one.step, one.epoch), default=None)
    there = "no complete step" if newest is None else f"step {newest.step}@{newest.epoch} as the newest complete one"
    return (
        f"the last run was stopped after its ranks sealed step {stopped.step}@{stopped.epoch}, and the tiers have "
        f"{there}. To restore another step: elastic run --resume-from STEP[@EPOCH], or restore(state, step)"
    )
