"""Script for HyperPod agents in tests, with several loops; a file in its folder names the next one.

``ours`` is a training under :func:`elastic.recoverable` in which every step is unique. ``asking`` polls elastic events
with our function, ``shipped`` with the agent package's own. Ranks wait before the step that a file names, and faults
hit them there. The folder is the first argument.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ACT, LIMIT = "act", "limit"
JOB = "tiered://golden"


def read_instruction(folder: Path, name: str) -> str:
    """Return the test's instruction. The test replaces the file atomically."""
    return (folder / name).read_text()


def wait_for_step(folder: Path, step: int) -> None:
    while int(read_instruction(folder, LIMIT)) <= step:
        time.sleep(0.01)


def use_pod_directory(folder: Path) -> None:
    """Make this pod a node of its own, with a node agent that outlives its ranks."""
    pod = Path.cwd().name
    os.environ["TIEREDCKPT_AGENT_DIRECTORY"] = f"{os.environ['TEST_MEMORY']}{pod}"
    os.environ["TIEREDCKPT_AGENT_NODE"] = pod


def main() -> None:
    folder = Path(sys.argv[1])
    use_pod_directory(folder)
    act = read_instruction(folder, ACT)
    logging.basicConfig(level=logging.INFO)
    if act == "ours":
        run_elastic(folder, int(sys.argv[2]))
    else:
        run_agent_example(folder, act)


def run_elastic(folder: Path, total: int) -> None:
    import torch

    from elastic import BatchPlan, ElasticDataLoader, ExactGradients, World, recoverable, seeded
    from elastic.reshard.state_checksum import state_checksum
    from elastic.workers.train_loop import RecoveryPolicy
    from tests.support import golden_training as golden
    from tieredckpt import Checkpointer

    torch.set_num_threads(1)
    diary = golden.RankLog(folder / "diary")
    signal.signal(signal.SIGUSR1, lambda *_: diary.write("handler", rank=int(os.environ["RANK"])))

    @recoverable(policy=RecoveryPolicy(peer_loss_wait_s=5.0))
    def train(world: World) -> None:
        bare = golden.bare_model()
        model = golden.wrap_model(bare, "fsdp", world)
        optimizer = torch.optim.AdamW(bare.parameters(), lr=3e-3)
        plan = BatchPlan(golden.BATCH, world.size, microbatch=golden.MICROBATCH).for_rank(world.rank)
        sums = ExactGradients(model, tree=True, on_nonfinite=golden.refuse_step)
        place: dict[str, Any] = {"rank": world.rank, "size": world.size, "restarts": world.restarts}
        loader = ElasticDataLoader(golden.NumberDataset(), plan, seed=golden.SEED)
        state = {"model": bare, "optim": optimizer, "data": loader}
        with Checkpointer(JOB, on_busy="wait") as ckpt, loader:
            first = ckpt.restore(state) + 1
            tiers = ckpt.last_restore.bytes_by_tier if ckpt.last_restore else {}
            diary.write("world", first=first, tiers=sorted(tiers), **place)
            for step in world.steps(first, total, checkpoint=(ckpt, state)):
                wait_for_step(folder, step)
                work = next(iter(loader))
                mine = [batch.data for batch in work]
                for turn in sums.step(plan):
                    x, y = mine[turn.position]
                    with seeded(golden.SEED, step, turn.id):
                        turn.backward((model(x) - y).square().sum(), weight=len(x))
                result = sums.finish(clip=1.0)
                optimizer.step()
                work.commit()
                found = state_checksum({"model": bare, "optim": optimizer}).all_reduced().tensors_only.value
                ckpt.save(state, step).wait()
                diary.write("step", step=step, loss=result.loss.hex(), sum=f"{found:016x}", **place)

    print(train(), flush=True)


class SquaresDataset:
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> int:
        return index * index


def run_agent_example(folder: Path, act: str) -> None:
    """Run the loop of the agent package's example, with the processes that scripts usually start."""
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGUSR1, lambda *_: (folder / f"{act}-heard-{os.environ['RANK']}").touch())
    if act == "shipped":
        from hyperpod_elastic_agent.elastic_event_handler import elastic_event_detected
    else:
        from integration.hyperpod.elastic_events import elastic_event_detected
    dist.init_process_group("gloo")
    beside = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    loader = iter(
        torch.utils.data.DataLoader(SquaresDataset(), batch_size=1, num_workers=1, multiprocessing_context="fork")
    )
    step = 0
    begun = folder / f"{act}-begun-{dist.get_rank()}"
    while not elastic_event_detected():
        one = torch.ones(1)
        dist.all_reduce(one)
        assert int(next(loader)) == step * step
        if not begun.exists():
            begun.with_suffix(".tmp").write_text(str(beside.pid))
            begun.with_suffix(".tmp").replace(begun)
        step += 1
    survived = int(next(loader)) == step * step
    while not (folder / f"{act}-end").exists():  # the agent signals the ranks one by one: wait until all are signaled
        time.sleep(0.01)
    beside.communicate(b"end\n")
    said = {"step": step, "loader": survived, "beside": beside.returncode}
    (folder / f"{act}-ended-{dist.get_rank()}.tmp").write_text(json.dumps(said))
    (folder / f"{act}-ended-{dist.get_rank()}.tmp").replace(folder / f"{act}-ended-{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
