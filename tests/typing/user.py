"""A training script that uses the public API, for type checkers. It is never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from typing_extensions import assert_type

import elastic
import tieredckpt
from tieredckpt import (
    CheckpointDamagedError,
    Checkpointer,
    CheckpointNotFoundError,
    NullCheckpointer,
    SaveFailedError,
    Settings,
    TieredCheckpointError,
    TieredReader,
    TieredWriter,
    TierUnavailableError,
)
from tieredckpt.checkpointer.save_handle import SaveHandle, SaveState, StepInfo
from tieredckpt.dcp.restore_report import RestoreReport


def plain_dcp(state: dict[str, Any], step: int) -> int:
    writer = TieredWriter("tiered://llama-8b", step=step)
    reader = TieredReader(Path("llama-8b"), durable="s3://bucket/llama", on_dtype_mismatch="cast")
    as_writer: StorageWriter = writer
    as_reader: StorageReader = reader
    as_stager: AsyncStager = writer
    dcp.save(state, storage_writer=as_writer)  # pyright: ignore[reportPrivateImportUsage] - torch's own
    dcp.load(state, storage_reader=as_reader)  # pyright: ignore[reportPrivateImportUsage] - torch's own
    del as_stager
    assert_type(reader.report, RestoreReport | None)
    assert_type(writer.error, TieredCheckpointError | None)
    assert_type(reader.restored_step, int)
    return reader.restored_step


def loop(model: torch.nn.Module, total: int, *, off: bool) -> None:
    state: dict[str, Any] = {"model": model.state_dict(), "step": 0}
    with Checkpointer("tiered://llama-8b", durable="s3://bucket/llama", every=1, durable_every=200) as ckpt:
        assert_type(ckpt, Checkpointer)
        ckpt.prepare(state)
        step = ckpt.restore(state) + 1
        assert_type(step, int)
        for now in range(step, total):
            saved = ckpt.save(state, now)
            assert_type(saved, SaveHandle)
            assert_type(saved.ok, bool)
            assert_type(saved.error, BaseException | None)
            if saved.wait("durable", timeout_s=5.0) is SaveState.DURABLE:
                assert_type(ckpt.wait("memory"), bool)
        assert_type(ckpt.steps(), list[StepInfo])
        assert_type(ckpt.last_restore, RestoreReport | None)
    either = NullCheckpointer() if off else Checkpointer("llama", settings=Settings(), on_busy="wait")
    with either as one:
        assert_type(one.save(state, 3, force=True), SaveHandle)
        assert_type(one.restore(state, step=3), int)


def what_went_wrong(ckpt: Checkpointer, state: dict[str, Any]) -> str:
    try:
        ckpt.restore(state)
    except CheckpointNotFoundError:
        return "absent"
    except TierUnavailableError:
        return "unknown"
    except CheckpointDamagedError:
        return "damaged"
    except (SaveFailedError, TieredCheckpointError) as error:
        assert_type(error, SaveFailedError | TieredCheckpointError)
    return "fine"


def settings() -> None:
    found = Settings()
    assert_type(found.enabled, bool)
    assert_type(found.memory.every, int)
    assert_type(found.durable.url, str)
    assert_type(tieredckpt.Settings, type[Settings])


def train(world: elastic.World) -> float:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loop = elastic.Loop(world, model, optimizer, [torch.ones(2)], global_batch=8, microbatch=2, checkpoint="tiered://a")
    loss = 0.0
    for step in loop.until(3):
        assert_type(step, elastic.LoopStep)
        for x in step:
            step.backward(model(x).sum(), weight=len(x))
        loss = assert_type(step.loss, float)
    hooks = elastic.StepHooks(world, NullCheckpointer(), {"model": model})
    assert_type(hooks.begin(0), bool)
    hooks.end(0)
    return loss


def train_until_the_end() -> float | None:
    return elastic.run(train).value
