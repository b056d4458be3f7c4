"""P7: speed of uploads to an object store, and their effect on the trainer's steps."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.clients import (
    ENVIRONMENT,
    Send,
    by_boto3,
    by_obstore,
    by_s3torchconnector,
    durable_settings,
    stored_bytes,
    uploader,
)
from benchmarks.parameters import Scene
from benchmarks.rounds import Contender, as_row, measure, missing, no_dist, use_threads
from benchmarks.sandbox import JOB, settings_for
from benchmarks.states import State, advance, blank, build, difference, raw, tensors, wipe
from tieredckpt import Checkpointer, TieredReader

PLAIN, SUMMED = "uploader, no checksum", "uploader, crc32"
RAW_PLAIN = ("obstore, no checksum", "boto3 tuned, no checksum")
RAW_SUMMED = ("obstore, crc64nvme", "s3torchconnector")
ALONE, DRAINING = "step, nothing drains", "step while a save drains"
_STEPS = 60


def run_null(rank: int, scene: Scene) -> list[dict[str, Any]]:
    return _uploads(scene, scene.null)


def run_real(rank: int, scene: Scene) -> list[dict[str, Any]]:
    return _uploads(scene, scene.rclone)


def _uploads(scene: Scene, endpoint: str) -> list[dict[str, Any]]:
    use_threads(scene.threads)
    os.environ.update(ENVIRONMENT)
    source = scene.folder / "slot"
    content = np.random.Generator(np.random.SFC64(11)).bytes(scene.size_bytes)
    source.write_bytes(content)
    expected = {"object": torch.frombuffer(bytearray(content), dtype=torch.uint8)}
    contenders: list[Contender] = []
    absent: list[dict[str, Any]] = []
    with contextlib.ExitStack() as undo:
        for name, make in _clients(undo, scene, source).items():
            try:
                contenders.append(_contender(name, make, endpoint, scene))
            except ImportError as error:
                absent.append(missing(name, f"not installed: {error}"))
            except Exception as error:
                if name in (PLAIN, SUMMED):
                    raise
                absent.append(missing(name, f"does not work with this server: {' '.join(str(error).split())}"))
        rows = measure(
            contenders, scene.rounds, expected=expected, prepare=lambda _: None, every_round=False, spoil=scene.spoil
        )
    return rows + absent


def _clients(undo: contextlib.ExitStack, scene: Scene, source: Path) -> dict[str, Callable[[str], Send]]:
    """Return a factory for each client; it takes an endpoint."""
    return {
        PLAIN: lambda at: uploader(undo, scene, at, source, "none"),
        SUMMED: lambda at: uploader(undo, scene, at, source, "crc32"),
        RAW_PLAIN[0]: lambda at: by_obstore(scene, at, source),
        RAW_PLAIN[1]: lambda at: by_boto3(undo, scene, at, source),
        RAW_SUMMED[0]: lambda at: by_obstore(scene, at, source, checksum_algorithm="CRC64NVME"),
        RAW_SUMMED[1]: lambda at: by_s3torchconnector(scene, at, source),
    }


def _contender(name: str, make: Callable[[str], Send], endpoint: str, scene: Scene) -> Contender:
    """Return a contender. Raise if the client is not installed or does not work with this server."""
    object_name = f"{name.replace(' ', '-').replace(',', '')}.bin"
    send = make(endpoint)
    send(object_name)
    # The null server stores nothing to read back. The same client uploads once more to a server that does.
    # rclone rejects s3torchconnector's uploads, which have checksums in trailers.
    keeper = scene.moto if name == RAW_SUMMED[1] else scene.rclone
    check = send if endpoint == keeper else make(keeper)

    def found() -> State:
        check(object_name)
        return {"object": torch.frombuffer(bytearray(stored_bytes(keeper, object_name)), dtype=torch.uint8)}

    kind = "ours" if name in (PLAIN, SUMMED) else "opponent"
    note = "compared after the same upload to a server that stores it" if endpoint == scene.null else ""
    return Contender(name, kind, lambda _: send(object_name), found, note=note)


def run_steps(rank: int, scene: Scene) -> list[dict[str, Any]]:
    """Time a single-threaded training loop while its agent drains to a real server on this machine."""
    use_threads(scene.threads)
    os.environ.update(ENVIRONMENT)
    state = build("A", scene.size_bytes, rank=0, world=1)
    step = _training_step()
    alone = Contender(ALONE, "limit", lambda _: None, None, note="median of the round's steps")
    note = "the S3 server runs on the same cores"
    draining = Contender(DRAINING, "ours", lambda _: None, dict, note=note)
    settings = settings_for(scene, **vars(durable_settings(scene, scene.rclone)))
    with Checkpointer(JOB, settings=settings, on_sigterm="ignore") as checkpointer:
        for number in range(scene.rounds):
            alone.samples.append(statistics.median(_timed(step) for _ in range(_STEPS)))
            advance(state, number)
            saved = checkpointer.save(state, number)
            saved.wait()
            took = [_timed(step)]
            while _busy(checkpointer) and len(took) < 100_000:
                took.extend(_timed(step) for _ in range(10))
            draining.samples.append(statistics.median(took))
            saved.wait("durable")
    _compare_stored(draining, state, scene)
    return [as_row(alone), as_row(draining)]


def _busy(checkpointer: Checkpointer) -> bool:
    return any(view.state in ("waiting", "running") for view in checkpointer.session.agent.drain_status(JOB))


def _timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _training_step() -> Callable[[], None]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(128, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()

    return step


def _compare_stored(contender: Contender, state: State, scene: Scene) -> None:
    found = from_store(state, scene)
    if contender.name in scene.spoil:
        raw(next(iter(tensors(found).values())))[0] ^= 1
    contender.differs = difference(state, found)
    contender.equal = not contender.differs


def from_store(like: State, scene: Scene) -> State:
    """Return the state that an agent with empty memory restores from the store."""
    target = blank(like)
    wipe(target)
    settings = settings_for(scene, "elsewhere", **vars(durable_settings(scene, scene.rclone)))
    dcp.load(target, storage_reader=TieredReader(JOB, settings=settings), no_dist=no_dist())
    return target
