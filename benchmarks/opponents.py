"""Other ways to save on tmpfs: DCP's own writer, ``torch.save``, safetensors, ``dcp.async_save``."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.rounds import no_dist
from benchmarks.states import State, fill_from, leaves, tensors


class DcpFiles:
    """``FileSystemWriter`` and ``FileSystemReader`` with their defaults."""

    def __init__(self, folder: Path, rank: int, state: State) -> None:
        self.folder = folder / "dcp"
        self._rank = rank
        self._state = state

    def clear(self) -> None:
        if self._rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def save(self) -> None:
        dcp.save(self._state, storage_writer=dcp.FileSystemWriter(self.folder), no_dist=no_dist())

    def load(self, target: State) -> State:
        dcp.load(target, storage_reader=dcp.FileSystemReader(self.folder), no_dist=no_dist())
        return target


class AsyncFiles(DcpFiles):
    """``dcp.async_save`` with one stager for all saves.

    This is its fast mode: the stager keeps its copy of the state allocated.
    """

    def __init__(self, folder: Path, rank: int, state: State) -> None:
        super().__init__(folder, rank, state)
        self.folder = folder / "async"
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._saving: Future[Any] | None = None

    def start(self) -> None:
        writer = dcp.FileSystemWriter(self.folder)
        self._saving = dcp.async_save(self._state, storage_writer=writer, async_stager=self._stager, no_dist=no_dist())

    def finish(self) -> None:
        if self._saving is not None:
            self._saving.result()

    def close(self) -> None:
        self._stager.close()


class TorchFile:
    """``torch.save`` and ``torch.load``, one file per rank."""

    def __init__(self, folder: Path, rank: int, state: State) -> None:
        self.path = folder / f"rank-{rank}.pt"
        self._flat = dict(leaves(state))

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def save(self) -> None:
        torch.save(self._flat, self.path)

    def load(self, target: State, *, mapped: bool = False) -> State:
        fill_from(target, torch.load(self.path, mmap=mapped, weights_only=True))
        return target


class SafetensorsFile:
    """``save_file`` and ``load_file`` of the tensors; the format holds no other objects."""

    def __init__(self, folder: Path, rank: int, state: State) -> None:
        self.path = folder / f"rank-{rank}.safetensors"
        self._flat = tensors(state)

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def save(self) -> None:
        save_file(self._flat, self.path)

    def load(self, target: State) -> State:
        fill_from(target, load_file(self.path))
        return target
