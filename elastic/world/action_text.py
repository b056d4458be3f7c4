"""Descriptions of world actions for the coordinator's log."""

from __future__ import annotations

from elastic.world.world_state import (
    BreakWorld,
    FailJob,
    FinishJob,
    FormWorld,
    PauseWorld,
    PromoteSpare,
    ReleaseNode,
    RequestNodes,
    RespawnRanks,
    RespawnStragglers,
    StopJob,
    WorldAction,
)
from peerstore.sizes_and_durations import show_count


def describe_action(action: WorldAction, now_s: float) -> str:
    """Return a sentence that describes ``action``. ``now_s`` is on the clock of the action's deadlines."""
    match action:
        case FormWorld():
            ranks = len(action.nodes) * action.nproc
            why = f": {action.reason}" if action.reason else ""
            return (
                f"world {action.epoch} forms ({action.kind.value}) with {ranks} ranks on {', '.join(action.nodes)}{why}"
            )
        case BreakWorld():
            return f"world {action.epoch} is broken, its ranks leave within {action.within_s:.0f} s: {action.reason}"
        case PauseWorld():
            what = "stop" if action.stop else "pause"
            within_s = max(0.0, action.deadline_s - now_s)
            return f"the ranks of world {action.epoch} {what} at a common step within {within_s:.0f} s: {action.reason}"
        case RespawnRanks():
            return f"node {action.node} starts new processes for local ranks {', '.join(map(str, action.local_ranks))}"
        case PromoteSpare():
            return f"a spare process of node {action.node} takes local rank {action.local_rank}"
        case RespawnStragglers():
            return f"node {action.node} replaces the processes of ranks that are not ready in time"
        case ReleaseNode():
            how = "killed" if action.force else "released"
            return f"node {action.node} is {how}: {action.reason}"
        case RequestNodes():
            return f"the job can use {show_count(action.nodes, 'more node', 'more nodes')}: {action.reason}"
        case StopJob():
            sealed = "" if action.sealed_step is None else f" after step {action.sealed_step.step}"
            return f"the job stops{sealed}: {action.reason}"
        case FinishJob():
            return "the job has finished"
        case FailJob():
            return f"the job fails: {action.reason} ({action.attempts})"
