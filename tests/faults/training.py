"""A training for random faults, with results that do not depend on the world.

It uses dropout, clipping, a learning rate schedule, samples by number and a fixed reduction tree. Each rank appends
its worlds, steps and acknowledged saves to its own file of JSON lines.

Arguments: the folder for these files, ``ddp`` or ``fsdp``, steps between saves, steps between durable saves, and
seconds to wait after each step. The file ``limit`` in the folder holds the step before which ranks wait. If it also
holds the word ``end``, training ends there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from elastic import BatchPlan, ElasticDataLoader, ExactGradients, World, recoverable, seeded
from elastic.workers.train_loop import RecoveryPolicy
from peerstore.errors import PeerStoreError
from tests.support.golden_training import (
    SEED,
    NumberDataset,
    RankLog,
    bare_model,
    checksum_share,
    learning_rate_factor,
    refuse_step,
    wrap_model,
)
from tieredckpt import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveHandle
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.session.session import newest_sealed_key

BATCH, MICROBATCH = 16, 2
"""Eight microbatches, so one rank in a world of seven computes two."""
REPORT_EVERY, COPIED_S, LAST_S, PEER_LOSS_WAIT_S = 5, 2.0, 60.0, 5.0
JOB = "faults"


class StepLimit:
    """The step before which ranks wait, set by the driver."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "limit"

    def read(self) -> tuple[int, bool]:
        step, _, end = self._file.read_text().partition(" ")
        return int(step), bool(end)


class SafeStepReporter:
    """A writer of records about sealed and acknowledged steps."""

    def __init__(self, diary: RankLog, place: dict[str, int], durable_every: int) -> None:
        self._diary, self._place, self._durable_every = diary, place, durable_every
        self._uploading: list[SaveHandle] = []
        self._sealed = (-1, -1)

    def saved(self, saved: SaveHandle, step: int) -> None:
        self.sealed()
        if step % REPORT_EVERY == 0 and saved.ok:
            copies = 2 if self._place["size"] > int(os.environ["LOCAL_WORLD_SIZE"]) else 1
            with contextlib.suppress(TieredCheckpointError, PeerStoreError):
                saved.wait(copies=copies, timeout_s=COPIED_S)
                self._report(step, copies)
        if self._durable_every and step % self._durable_every == 0:
            self._uploading.append(saved)
        for one in list(self._uploading):
            with contextlib.suppress(TieredCheckpointError, PeerStoreError):
                if one.wait("durable", timeout_s=0.0).name == "DURABLE":
                    self._report(one.step, 0)
                    self._uploading.remove(one)

    def sealed(self) -> None:
        """Record the newest step that this process has sealed, with its incarnation."""
        key = newest_sealed_key(current=True)
        if key is not None and (key.epoch, key.version) != self._sealed:
            self._sealed = key.epoch, key.version
            write(self._diary, "sealed", step=key.version, number=key.epoch, name=key.incarnation, **self._place)

    def last(self, saved: SaveHandle) -> None:
        """Wait until the last step is durable, and record it."""
        with contextlib.suppress(TieredCheckpointError, PeerStoreError):
            if saved.wait("durable", timeout_s=LAST_S).name == "DURABLE":
                self._report(saved.step, 0)

    def _report(self, step: int, copies: int) -> None:
        """Record an acknowledged step; 0 copies mean the durable tier."""
        write(self._diary, "safe", step=step, copies=copies, **self._place)


def write(diary: RankLog, what: str, **values: Any) -> None:
    """Write a record with the kernel's time, because a fault may have moved Python's clock."""
    diary.write(what, **{"at": time.clock_gettime(time.CLOCK_REALTIME), **values})


def main(folder: Path, how: str, every: int, durable_every: int, pace_s: float) -> None:
    diary, limit = RankLog(folder), StepLimit(folder)
    run = int(os.environ.get("FAULTS_RUN", "0"))

    @recoverable(policy=RecoveryPolicy(peer_loss_wait_s=PEER_LOSS_WAIT_S))
    def train(world: World) -> None:
        bare = bare_model()
        model = wrap_model(bare, how, world)
        optimizer = torch.optim.AdamW(bare.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
        plan = BatchPlan(BATCH, world.size, microbatch=MICROBATCH).for_rank(world.rank)
        sums = ExactGradients(model, tree=True, on_nonfinite=refuse_step)
        place = {"run": run, "epoch": world.epoch, "rank": world.rank, "size": world.size}
        loader = ElasticDataLoader(NumberDataset(), plan, seed=SEED)
        state = {"model": bare, "optim": optimizer, "data": loader, "rate": schedule}
        durable = {"durable": os.environ["FAULTS_DURABLE"], "durable_every": durable_every} if durable_every else {}
        with ExitStack() as ending, Checkpointer(f"tiered://{JOB}", every=every, **durable) as ckpt, loader:
            safe = SafeStepReporter(diary, place, durable_every)
            ending.callback(safe.sealed)
            first = ckpt.restore(state) + 1
            write(diary, "world", first=first, node=os.environ["ELASTIC_NODE"], reason=world.reason, **place)
            for step in world.steps(first, checkpoint=(ckpt, state)):
                while (far := limit.read()) and step >= far[0] and not far[1]:
                    time.sleep(0.01)
                if step >= far[0]:
                    break
                work = next(iter(loader))
                mine = [batch.data for batch in work]
                for turn in sums.step(plan):
                    x, y = mine[turn.position]
                    with seeded(SEED, step, turn.id):
                        turn.backward((model(x) - y).square().sum(), weight=len(x))
                result = sums.finish(clip=1.0)
                optimizer.step()
                schedule.step()
                work.commit()
                # Record the step before its save, because the rank may end as soon as the save is acknowledged.
                bits = {"loss": result.loss.hex(), "norm": (result.norm or 0.0).hex()}
                bits["rate"] = schedule.get_last_lr()[0].hex()
                share = checksum_share(bare, optimizer)
                write(diary, "step", step=step, samples=work.indices().tolist(), share=share, **bits, **place)
                safe.saved(ckpt.save(state, step), step)
                time.sleep(pace_s)
            ending.enter_context(world.pause_watchdog())  # the last upload takes longer than a step
            if durable_every:
                safe.last(ckpt.save(state, step - 1, durable=True))

    train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # shows where a hung rank waits
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
