"""Ranks with a launcher's environment, forked from a process that has imported torch."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support import forked_starts
from tests.support.zygote import RunningProcess, Zygote

Say = Callable[[str], None]


def start_ranks(
    zygote: Zygote, ranks: int, port: int, function: Callable[..., Any], *args: Any, **environ: str
) -> list[RunningProcess]:
    """Start the ranks of one node, which meet at the launcher's store at ``port``."""
    return [
        zygote.start(
            function,
            *args,
            environ={
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
                **environ,
            },
        )
        for rank in range(ranks)
    ]


class _Lines(io.StringIO):
    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line:
                self._say(line)
        return len(text)


def run_script(say: Say, path: str) -> None:
    """Run a script unchanged."""
    with contextlib.redirect_stdout(_Lines(say)):
        runpy.run_path(path, run_name="__main__")


def run_torchrun(say: Say, path: str, options: Sequence[str], *args: str) -> None:
    """Run ``torchrun`` itself; its ranks are new processes."""
    from torch.distributed.run import main

    forked_starts.fork_template()
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    sys.argv = ["torchrun"]
    main(["--standalone", *options, path, *args])


def build_state() -> tuple[Any, Any, dict[str, Any]]:
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Linear(16, 8)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, {"model": model, "optim": optimizer}


def one_step(model: Any, optimizer: Any, step: int, folder: str) -> None:
    """Train one step; in step 2, create ``pid-PID`` and wait for the file ``go``."""
    import torch

    loss = model(torch.full((2, 16), float(step))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 2:
        (Path(folder) / f"pid-{os.getpid()}").touch()
        while not (Path(folder) / "go").exists():
            time.sleep(0.005)


def train_polling(say: Say, folder: str) -> None:
    """Train until an elastic event, then save and exit."""
    import torch.distributed as dist

    from elastic.workers.event_detector import close_detectors, elastic_event_detected
    from tieredckpt import Checkpointer

    dist.init_process_group("gloo")
    model, optimizer, state = build_state()
    with Checkpointer("tiered://asking", on_sigterm="ignore") as ckpt:
        step = ckpt.restore(state)
        say(f"restored {step}")
        while not elastic_event_detected():
            step += 1
            one_step(model, optimizer, step, folder)
        ckpt.save(state, step, force=True).wait()
        say(f"left {step}")
    close_detectors()
    dist.destroy_process_group()


def train_with_loop(say: Say, kind: str, job: str) -> None:
    """Run five steps of :class:`elastic.Loop`; report losses and a digest of the parameters."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import elastic
    from tests.support.resizable_training import digest, full_tensors

    samples = [torch.randn(8, generator=torch.Generator().manual_seed(index)) for index in range(30)]

    def train(world: elastic.World) -> str:
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 12), torch.nn.Dropout(0.2), torch.nn.Linear(12, 1)
        model: torch.nn.Module = torch.nn.Sequential(*layers)
        if kind == "fsdp":
            fully_shard(model, mesh=world.mesh())
        elif kind == "ddp":
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        options = {"global_batch": 4, "microbatch": 2, "clip": 0.5, "checkpoint": f"tiered://{job}-{kind}"}
        losses = []
        for step in elastic.Loop(world, model, optimizer, samples, **options).until(5):
            for x in step:
                step.backward(model(x).square().mean(), weight=len(x), reduction="mean")
            losses.append(step.loss.hex())
        return f"{losses} {digest(full_tensors([one.detach() for one in model.parameters()]))}"

    say(str(elastic.run(train).value))


def train_in_loop(folder: str) -> None:
    """Train under :func:`elastic.run`; report the outcome in a file name, as the launcher captures output."""
    from elastic.workers.train_loop import run
    from tieredckpt import Checkpointer

    def train(world: Any) -> None:
        model, optimizer, state = build_state()
        with Checkpointer("tiered://looping") as ckpt:
            for step in world.steps(ckpt.restore(state) + 1, checkpoint=(ckpt, state)):
                one_step(model, optimizer, step, folder)

    ended = run(train)
    (Path(folder) / f"{ended.outcome.value}-{ended.steps}-{os.getpid()}").touch()


def restore_state(say: Say, job: str) -> None:
    import torch.distributed as dist

    from tieredckpt import Checkpointer

    dist.init_process_group("gloo")
    _, _, state = build_state()
    with Checkpointer(job) as ckpt:
        say(f"restored {ckpt.restore(state)} {','.join(ckpt.last_restore.bytes_by_tier)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train_in_loop(sys.argv[1])
