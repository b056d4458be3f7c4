"""The types of what the agent and its workers say to each other, by their names on the wire."""

from __future__ import annotations

import enum

# Of a worker.
INIT = "init"
AT_BARRIER = "at_rcb_barrier"
PAST_BARRIER = "past_rcb_barrier"
DATA = "job_data"
LABELS = "rank_labels"
CHECKPOINT_INIT = "ckpt_init"
CHECKPOINT_UPDATE = "ckpt_info_update"

# Of the agent.
START = "job_start"
RANK_INFO = "job_rank_info"
INVALID = "invalid_response"

# Of both.
FAULT = "job_fault"
CHECKPOINT_GET = "ckpt_info_get"

RESTARTS = frozenset({START, RANK_INFO, FAULT})
"""What a worker that is started anew without being ended has to hear."""
CHECKPOINTS = frozenset({CHECKPOINT_GET, INVALID})
HEARD = RESTARTS | CHECKPOINTS


class RestartMode(enum.Enum):
    """What a worker asks for with a fault: the cheapest that it believes to help."""

    IN_PROCESS = "in_process_restart"
    """The processes stay, the world is a new one."""
    PROCESS = "process_level_restart"
    """The processes are started anew in the pods that there are."""
    JOB = "job_level_restart"
    """So are the pods."""
