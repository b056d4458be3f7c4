"""AWS's checkpointing library on ranks, unchanged except for its memory service's address and its log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import async_save, load, save


@contextmanager
def aws_library_at(url: str) -> Iterator[Any]:
    """Yield the library's config, writer and reader, patched to use ``url`` and not to log to /var."""
    from amzn_sagemaker_checkpointing.checkpointing import filesystem
    from amzn_sagemaker_checkpointing.checkpointing.filesystem import storage_base
    from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
    from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig
    from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import InMemoryCheckpointClient

    made = InMemoryCheckpointClient.__init__

    def make(self: Any, *args: Any, config: Any = None, **kwargs: Any) -> None:
        made(self, *args, config=config or InMemoryClientConfig(base_url=url), **kwargs)

    quiet = staticmethod(lambda *_: logging.getLogger("aws"))
    with (
        mock.patch.object(InMemoryCheckpointClient, "__init__", make),
        mock.patch.object(storage_base._TieredStorageBase, "_setup_logger", quiet),
    ):
        yield (
            SageMakerCheckpointConfig,
            filesystem.SageMakerTieredStorageWriter,
            filesystem.SageMakerTieredStorageReader,
        )


def state_of(step: int, world: int) -> dict[str, Any]:
    """Return a job's state after ``step``: one tensor per rank, one shared tensor, and the step."""
    made = torch.Generator().manual_seed(step)
    shared = torch.randn(33, 7, generator=made)
    return {
        "ranks": {f"w{rank}": torch.randn(1000, generator=made) for rank in range(world)},
        "all": shared,
        "at": step,
    }


def save_steps(urls: list[str], namespace: str, steps: list[int]) -> None:
    """Save each rank's own tensor and the shared state, in the background unless 20 divides the step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with aws_library_at(urls[rank]) as (Config, Writer, _):
        for step in steps:
            state = state_of(step, world)
            state["ranks"] = {f"w{rank}": state["ranks"][f"w{rank}"]}
            writer = Writer(Config(namespace=namespace, world_size=world), step=step)
            if step % 20:
                async_save(state, storage_writer=writer).result()
            else:
                save(state, storage_writer=writer)
            writer.client.close()
            dist.barrier()


def load_newest(urls: list[str], namespace: str, step: int | None = None) -> tuple[int, bool]:
    """Return the loaded step, and whether all ranks' tensors are bit for bit those saved then."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with aws_library_at(urls[rank]) as (Config, _, Reader):
        state = state_of(10**6, world)
        reader = Reader(Config(namespace=namespace, world_size=world), step=step)
        try:
            load(state, storage_reader=reader)
        finally:
            reader.client.close()
    saved = state_of(state["at"], world)
    same = all(torch.equal(saved["ranks"][name], found) for name, found in state["ranks"].items())
    return state["at"], same and torch.equal(saved["all"], state["all"])
