"""A small sharded model under whoever runs it; a test opens its steps one after the other, and breaks what it likes.

In a folder, ``limit`` says how many steps may be done, ``break-KIND`` whom something happens to, once: ``RANK STEP``.
What ranks have done is in a file for each process. ``STORY_BUDGET``: so many starts one process may go through, where
that is not what it is by default; ``STORY_DEAF_S``: how long an agent may leave unread what it is told.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

TOTAL = 24


def run_training(say: Callable[[str], None], folder: str) -> str:
    """Returns how it ended."""
    import elastic

    return str(elastic.run(lambda world: _train(say, world, Path(folder)), plane=_control_plane()).outcome.value)


def _control_plane() -> Any:
    """By default the one that a rank finds by itself."""
    from integration.hyperpod.elastic_agent import worker_client

    worker_client.AGENT_SILENCE_LIMIT_S = float(os.environ.get("STORY_DEAF_S", worker_client.AGENT_SILENCE_LIMIT_S))
    if "STORY_BUDGET" not in os.environ:
        return None
    from elastic.world.scaling_policy import ScalingPolicy
    from integration.hyperpod.elastic_agent.checkpoint_reporter import agent_checkpoint_reporter
    from integration.hyperpod.elastic_agent.in_process_mode import InProcessControlPlane

    agent_checkpoint_reporter()
    budget = int(os.environ["STORY_BUDGET"])
    return InProcessControlPlane(
        worker_client.this_agent_worker(), policy=ScalingPolicy(num_restart_before_full_job_restart=budget)
    )


def _train(say: Callable[[str], None], world: Any, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from tests.support.elastic_training import batch_of, build_model, optimizer_of
    from tests.support.recovery_training import digest
    from tieredckpt import Checkpointer

    say(f"world {world.restarts}")
    model = build_model()
    fully_shard(model, mesh=world.mesh())
    optimizer = optimizer_of(model)
    state = {"model": model, "optim": optimizer}
    with Checkpointer("tiered://hyperpod", every=1) as ckpt:
        for step in world.steps(ckpt.restore(state) + 1, TOTAL, checkpoint=(ckpt, state)):
            _wait_for_limit(folder, step)
            loss = model(batch_of(step).chunk(world.size)[world.rank]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            _break_if_asked(folder, world.rank, step)
            world.check_finite(loss * _loss_factor(folder, world.rank, step))
            optimizer.step()
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            ckpt.save(state, step)
            say(f"step {world.rank} {step} {whole.item().hex()} {digest(model, optimizer)}")


def _wait_for_limit(folder: Path, step: int) -> None:
    while step >= int((folder / "limit").read_text() or 0):
        time.sleep(0.005)


def _break_if_asked(folder: Path, rank: int, step: int) -> None:
    for kind, deed in (
        ("raise", _raise),
        ("kill", _kill),
        ("tear", _send_partial_frame),
        ("hang", _hang),
        ("stop", _stop),
        ("native", _block_in_native_code),
    ):
        path = folder / f"break-{kind}"
        with suppress(FileNotFoundError):
            if path.read_text() == f"{rank} {step}":
                path.unlink()
                deed()


def _loss_factor(folder: Path, rank: int, step: int) -> float:
    """What the loss of one step is multiplied with, at every attempt."""
    path = folder / "break-nan"
    return float("nan") if path.exists() and path.read_text() == f"{rank} {step}" else 1.0


def _raise() -> None:
    raise ZeroDivisionError("in the middle of a step")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _send_partial_frame() -> None:
    """Killed while it speaks to its agent: the length and the beginning of a frame are on their way."""
    from integration.hyperpod.elastic_agent.ipc import shared_agent_connection

    shared_agent_connection()._sock.sendall(struct.pack(">I", 4096) + b'{"type": "job_fault", "rank": ')
    _kill()


def _hang() -> None:
    while True:  # as a driver that does not answer: no abort wakes it
        time.sleep(3600)


def _stop() -> None:
    """As by a debugger, a frozen control group or a machine that swaps: no thread of it runs."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _block_in_native_code() -> None:
    """In native code that keeps the interpreter's lock: no other thread of Python runs."""
    ctypes.PyDLL(None).pause()


class Process(NamedTuple):
    """What one process has said."""

    pid: int
    pod: str
    lines: list[list[str]]

    @property
    def steps(self) -> list[int]:
        return [int(words[2]) for words in self.lines if words[0] == "step"]

    @property
    def newest_step(self) -> tuple[int, int]:
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
        pod, _, pid = path.name.removeprefix("said-").rpartition("-")
        found.append(Process(int(pid), pod, [line.split() for line in path.read_text().splitlines()]))
    return found


def step_results(lines: list[list[str]]) -> dict[tuple[int, int], str]:
    """Loss and what rank had after it, by rank and step; one that was done twice was done in the same way."""
    found: dict[tuple[int, int], str] = {}
    for words in lines:
        if words[0] == "step":
            key, value = (int(words[1]), int(words[2])), " ".join(words[3:])
            assert found.setdefault(key, value) == value, key
    return found


def main() -> None:
    """Every second rank asks who it is before it does anything else, as scripts for HyperPod do.

    It imports what it needs after that, one after the other: not where processes are started anew again and again.
    """
    folder = os.environ["STORY"]
    faulthandler.register(signal.SIGUSR1)  # a test that waited in vain asks what its ranks do
    if os.environ["LOCAL_RANK"] == "1" and "STORY_BUDGET" not in os.environ:
        from integration.hyperpod.elastic_agent import wait_rank

        wait_rank()
        assert int(os.environ["RANK"]) % 2 == 1
    pod = Path(os.environ.get("TEST_POD", "none")).name
    with (Path(folder) / f"said-{pod}-{os.getpid()}").open("a", buffering=1) as file:
        file.write(f"ended {run_training(lambda text: print(text, file=file), folder)}\n")


if __name__ == "__main__":
    main()
