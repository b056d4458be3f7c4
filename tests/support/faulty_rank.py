"""A rank that injects one fault per world under ``elastic run``: ``faulty_rank.py FOLDER FAULT...``.

A fault is ``RANK:STAGE``. In later worlds rank 1's loss is NaN in every attempt at one step.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from elastic.workers.process_groups import ProcessGroups
from elastic.workers.train_loop import RecoveryPolicy, run
from tests.support.launched import build_state
from tests.support.training_rank import report
from tieredckpt import Checkpointer

FAULTS = [(int(rank), how) for rank, how in (word.split(":") for word in sys.argv[2:])]


def fail_at_stage(epoch: int, rank: int, stage: str) -> None:
    if epoch < len(FAULTS) and FAULTS[epoch] == (rank, stage):
        report("fails", epoch=epoch, rank=rank, stage=stage)
        how = stage.partition("-")[0]
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "crash":
            ctypes.string_at(0)
        elif how == "hold":
            ctypes.PyDLL(None).sleep(100_000)
        elif how == "raise":
            raise ZeroDivisionError("injected fault")
        while how == "loop":
            pass


def fail_then_enter(groups: ProcessGroups) -> None:
    place = groups._assignment
    fail_at_stage(place.epoch, place.rank, "kill-groups")
    entering(groups)


entering, ProcessGroups.initialize = ProcessGroups.initialize, fail_then_enter  # type: ignore[method-assign]


def train(world: Any) -> None:
    model, optimizer, state = build_state()
    last = len(FAULTS)
    with Checkpointer("tiered://faulty") as ckpt:
        for stage in ("stop-restore", "kill-restore", "hold-restore"):
            fail_at_stage(world.epoch, world.rank, stage)
        first = ckpt.restore(state) + 1
        report("in", epoch=world.epoch, rank=world.rank, size=world.size, restored=first - 1, restarts=world.restarts)
        fail_at_stage(world.epoch, world.rank, "raise-first")
        for step in world.steps(first, checkpoint=(ckpt, state)):
            loss = model(torch.full((2, 16), float(step % 8))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if step == first + 2:
                for stage in ("crash-step", "kill-step", "loop-step", "hold-step", "stop-step", "raise-step"):
                    fail_at_stage(world.epoch, world.rank, stage)
                if world.epoch >= last and world.rank == 1:
                    loss = loss * float("nan")
            world.check_finite(loss)
            optimizer.step()
            dist.all_reduce(loss.detach())
            ckpt.save(state, step)
            ckpt.wait()
            report("step", epoch=world.epoch, rank=world.rank, step=step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Each attempt fails one step later, so one attempt at any step must be enough.
    report("ended", how=run(train, policy=RecoveryPolicy(nonfinite_attempts=1)).outcome.value)
