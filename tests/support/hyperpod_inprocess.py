"""A small sharded model under whoever runs it; a test opens its steps one after the other, and breaks what it likes.

In a folder, ``limit`` says how many steps may be done, ``break-KIND`` whom something happens to, once: ``RANK STEP``.
What ranks have done is in a file for each process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

TOTAL = 24


def trains(say: Callable[[str], None], folder: str) -> str:
    """Returns how it ended."""
    import elastic

    return str(elastic.run(lambda world: _train(say, world, Path(folder))).how.value)


def _train(say: Callable[[str], None], world: Any, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from tests.support.elastic_training import batch_of, build, optimizer_of
    from tests.support.recovering import digest
    from tieredckpt import Checkpointer

    say(f"world {world.restarts}")
    model = build()
    fully_shard(model, mesh=world.mesh())
    optimizer = optimizer_of(model)
    state = {"model": model, "optim": optimizer}
    with Checkpointer("tiered://hyperpod", every=1) as ckpt:
        for step in world.steps(ckpt.restore(state) + 1, TOTAL, checkpoint=(ckpt, state)):
            _gate(folder, step)
            loss = model(batch_of(step).chunk(world.size)[world.rank]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            _break(folder, world.rank, step)
            optimizer.step()
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            ckpt.save(state, step)
            say(f"step {world.rank} {step} {whole.item().hex()} {digest(model, optimizer)}")


def _gate(folder: Path, step: int) -> None:
    while step >= int((folder / "limit").read_text() or 0):
        time.sleep(0.005)


def _break(folder: Path, rank: int, step: int) -> None:
    for kind, deed in (("raise", _raise), ("kill", _kill), ("hang", _hang)):
        path = folder / f"break-{kind}"
        with suppress(FileNotFoundError):
            if path.read_text() == f"{rank} {step}":
                path.unlink()
                deed()


def _raise() -> None:
    raise ZeroDivisionError("in the middle of a step")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    while True:  # as a driver that does not answer: no abort wakes it
        time.sleep(3600)


class Process(NamedTuple):
    """What one process has said."""

    pid: int
    pod: str
    lines: list[list[str]]

    @property
    def steps(self) -> list[int]:
        return [int(words[2]) for words in self.lines if words[0] == "step"]

    @property
    def newest(self) -> tuple[int, int]:
        """The start that it is in, by number, and the last step that it has done there."""
        count, step = -1, -1
        for words in self.lines:
            if words[0] == "world":
                count, step = int(words[1]), -1
            elif words[0] == "step":
                step = int(words[2])
        return count, step


def processes(folder: Path) -> list[Process]:
    found = []
    for path in sorted(folder.glob("said-*")):
        _, pod, pid = path.name.split("-")
        found.append(Process(int(pid), pod, [line.split() for line in path.read_text().splitlines()]))
    return found


def done(lines: list[list[str]]) -> dict[tuple[int, int], str]:
    """Loss and what rank had after it, by rank and step; one that was done twice was done in the same way."""
    found: dict[tuple[int, int], str] = {}
    for words in lines:
        if words[0] == "step":
            key, value = (int(words[1]), int(words[2])), " ".join(words[3:])
            assert found.setdefault(key, value) == value, key
    return found


def main() -> None:
    """Every second rank asks who it is before it does anything else, as scripts for HyperPod do."""
    folder = os.environ["STORY"]
    if os.environ["LOCAL_RANK"] == "1":
        from integration.hyperpod.agent import wait_rank

        wait_rank()
        assert int(os.environ["RANK"]) % 2 == 1
    pod = Path(os.environ.get("TEST_POD", "none")).name
    with (Path(folder) / f"said-{pod}-{os.getpid()}").open("a", buffering=1) as file:
        file.write(f"ended {trains(lambda text: print(text, file=file), folder)}\n")


if __name__ == "__main__":
    main()
