"""A small training with Ray Train, whose workers kill themselves at given points."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.core.generated import autoscaler_pb2
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from integration.ray_train import open_checkpointer, report, restore
from peerstore.daemon_process import process_start_time
from tests.support.local_nodes import wait_until

STEPS = 6


@contextlib.contextmanager
def ray_cluster() -> Iterator[None]:
    """Run Ray's processes on this machine while the block runs, and wait until they have ended."""
    directory = tempfile.mkdtemp(prefix="ray-")
    before = set(_descendants())
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=100 << 20,
        _temp_dir=directory,
    )
    try:
        yield
    finally:
        started = set(_descendants()) - before
        ray.shutdown()
        wait_until(lambda: not any(process_start_time(pid) == begun for pid, begun in started), "Ray's processes ended")
        shutil.rmtree(directory, ignore_errors=True)


def _descendants() -> Iterator[tuple[int, int]]:
    """Yield pid and start time of each process below this one."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names do
        if name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in parents:
        parent = pid
        while (parent := parents.get(parent, 0)) > 1:
            if parent == os.getpid():
                yield pid, process_start_time(pid)
                break


def fit(
    folder: Path,
    *,
    workers: int = 2,
    name: str = "run",
    max_failures: int = 0,
    keep: CheckpointConfig | None = None,
    **config: Any,
) -> ray.train.Result:
    """Train with the real trainer; the workers' events are in ``folder``."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"events": str(folder / f"{name}.jsonl"), **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name,
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=max_failures),
            checkpoint_config=keep or CheckpointConfig(),
        ),
    )
    return trainer.fit()


def events(folder: Path, name: str, kind: str) -> list[tuple[Any, ...]]:
    """Return rank, step and value of each event of a kind."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [tuple(line[1:]) for line in map(json.loads, lines) if line[0] == kind]


def announce_preemption(deadline_s: float) -> None:
    """Drain this node, as a cloud's agent does before it takes the machine away."""
    context = ray.get_runtime_context()
    accepted, problem = ray._raylet.GcsClient(address=context.gcs_address).drain_node(
        context.get_node_id(),
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "test",
        int(1000 * (time.time() + deadline_s)),
    )
    assert accepted, problem


def make_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 8))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def digest(state: dict[str, Any]) -> str:
    """Return a digest of the bytes of model and optimizer."""
    summed = hashlib.sha256()
    for tensor in state["model"].state_dict().values():
        summed.update(tensor.numpy().tobytes())
    for values in state["optimizer"].state_dict()["state"].values():
        for name in sorted(values):
            summed.update(values[name].numpy().tobytes())
    return summed.hexdigest()


def train(config: dict[str, Any]) -> None:
    """Train to ``steps``, with one fault a run. ``fault``: its rank and step, before the step is reported.

    ``torn``: whether the other ranks save the step. ``drain``: step before which rank 0 announces a preemption.
    """
    rank = ray.train.get_context().get_world_rank()
    events = Path(config["events"])

    def record(kind: str, step: int, value: str = "") -> None:
        with events.open("a") as file:
            file.write(json.dumps([kind, rank, step, value]) + "\n")

    state = make_state()
    model, optimizer = state["model"], state["optimizer"]
    open_checkpointer(**config.get("options", {}))
    first = restore(state) + 1
    record("first", first, digest(state))
    parallel = torch.nn.parallel.DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    for step in range(first, config.get("steps", STEPS)):
        torch.manual_seed(1000 * step + rank)
        loss = parallel(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record("loss", step, loss.item().hex())
        if config.get("drain") == step:
            if rank == 0:
                announce_preemption(120)
            wait_until(ray.train.get_preemption_info, "Ray reports the preemption")  # with all ranks
        if config.get("fault") == [rank, step] and _is_first_time(events):
            if config.get("torn"):
                ray.train.get_preemption_info()  # the other ranks pass this point of report() and save
            os.kill(os.getpid(), config.get("signal", signal.SIGKILL))
            signal.pause()
        score = config.get("scores", {}).get(str(step), 0.0)
        report({"step": step, "score": score}, state, step)
        record("saved", step, digest(state))
    record("end", config.get("steps", STEPS), digest(state))


def _is_first_time(events: Path) -> bool:
    try:
        events.with_suffix(".fault").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
