"""A small sharded model whose steps a test releases one by one and disturbs.

Files in the folder control it: ``limit`` is the number of steps that may run. ``break-KIND`` holds ``RANK STEP`` and
injects one fault there. Each process writes its steps to its own file. ``STORY_BUDGET`` overrides the starts allowed in
one process. ``STORY_DEAF_S`` is how many seconds an agent may leave a message unread.
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
    """Train and return the outcome."""
    import elastic

    return str(elastic.run(lambda world: _train(say, world, Path(folder)), plane=_control_plane()).outcome.value)


def _control_plane() -> Any:
    """Return the control plane, or ``None`` for the one that a rank finds by itself."""
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
    """Return the factor of the loss of one step, the same at every attempt."""
    path = folder / "break-nan"
    return float("nan") if path.exists() and path.read_text() == f"{rank} {step}" else 1.0


def _raise() -> None:
    raise ZeroDivisionError("in the middle of a step")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _send_partial_frame() -> None:
    """Kill this process in the middle of a message to its agent."""
    from integration.hyperpod.elastic_agent.ipc import shared_agent_connection

    shared_agent_connection()._sock.sendall(struct.pack(">I", 4096) + b'{"type": "job_fault", "rank": ')
    _kill()


def _hang() -> None:
    while True:  # like a driver that does not respond: no abort wakes it
        time.sleep(3600)


def _stop() -> None:
    """Stop all threads, as a debugger, a frozen control group or swapping does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _block_in_native_code() -> None:
    """Block in native code that holds the GIL, so that no other Python thread runs."""
    ctypes.PyDLL(None).pause()


class Process(NamedTuple):
    """Output of one process."""

    pid: int
    pod: str
    lines: list[list[str]]

    @property
    def steps(self) -> list[int]:
        return [int(words[2]) for words in self.lines if words[0] == "step"]

    @property
    def newest_step(self) -> tuple[int, int]:
        """Number of the current start, and the last step done in it."""
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
    """Return loss and digest by rank and step. Fail if a repeated step differs."""
    found: dict[tuple[int, int], str] = {}
    for words in lines:
        if words[0] == "step":
            key, value = (int(words[1]), int(words[2])), " ".join(words[3:])
            assert found.setdefault(key, value) == value, key
    return found


def main() -> None:
    """Run the training. Local rank 1 calls ``wait_rank`` first, as scripts for HyperPod do.

    Rank 1 skips that call if ``STORY_BUDGET`` is set.
    """
    folder = os.environ["STORY"]
    faulthandler.register(signal.SIGUSR1)  # lets a test that timed out dump the stacks of its ranks
    if os.environ["LOCAL_RANK"] == "1" and "STORY_BUDGET" not in os.environ:
        from integration.hyperpod.elastic_agent import wait_rank

        wait_rank()
        assert int(os.environ["RANK"]) % 2 == 1
    pod = Path(os.environ.get("TEST_POD", "none")).name
    with (Path(folder) / f"said-{pod}-{os.getpid()}").open("a", buffering=1) as file:
        file.write(f"ended {run_training(lambda text: print(text, file=file), folder)}\n")


if __name__ == "__main__":
    main()
