"""A training with DeepSpeed whose folders are steps, for processes that tests fork and kill."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.deepspeed_engine import digest_of_whole_state, make_engine, node_folder, train_steps
from tests.support.zygote import ProcessResult
from tieredckpt import Checkpointer

URL, STEPS, TAG = "tiered://deepspeed", 5, "newest"
TORN_BYTES = 2000
"""Size of a file at which :func:`limit_files` kills its process."""
Moments = dict[tuple[int, str], Callable[[], None]]


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def limit_files() -> None:
    """Let the kernel kill this process while it writes a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (TORN_BYTES, TORN_BYTES))


def convert(folder: Path) -> None:
    """Add DeepSpeed's universal checkpoint to a folder."""
    source = str(folder / TAG)
    command = [sys.executable, "-W", "ignore", "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    subprocess.run([*command, "--input_folder", source, "--output_folder", f"{source}_universal"], check=True)


def train(
    say: Any,
    root: str,
    stage: int = 1,
    moments: Moments | None = None,
    options: dict[str, Any] | None = None,
    *,
    universal: bool = False,
) -> str:
    """Restore, train and save each step; return a digest of the final state.

    ``moments`` are functions to call, by rank and moment: ``trained N`` before the save of a step, or ``saved N``.
    """
    engine, folder = make_engine(stage, universal=universal), node_folder(root)

    def reach(moment: str) -> None:
        (moments or {}).get((engine.global_rank, moment), lambda: None)()

    with Checkpointer(URL, **(options or {})) as ckpt:
        if ckpt.restore_directory(folder, overwrite=True) >= 0:
            if universal:
                convert(folder)
            path, _ = engine.load_checkpoint(str(folder))
            assert path is not None
            shutil.rmtree(folder)
        say(f"first {engine.global_steps} {digest_of_whole_state(engine) if engine.global_steps else ''}")
        while engine.global_steps < STEPS:
            train_steps(engine, 1)
            say(f"state {engine.global_steps} {digest_of_whole_state(engine)}")
            reach(f"trained {engine.global_steps}")
            engine.save_checkpoint(str(folder), tag=TAG)
            ckpt.save_directory(folder, engine.global_steps).wait()
            reach(f"saved {engine.global_steps}")
    return digest_of_whole_state(engine)


def states(run: ProcessResult) -> dict[int, str]:
    """Return the digest of the state after each step of a run."""
    words = [line.split() for line in run.lines if line.startswith("state ")]
    return {int(step): digest for _, step, digest in words}
