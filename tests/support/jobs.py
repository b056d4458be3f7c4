"""A job in a few lines: states by step, saved and restored through the tiers."""

from __future__ import annotations

import contextlib
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from peerstore.store.node_store import NodeStore
from tests.support.agents import stop_agent
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.s3 import BUCKET, S3Server
from tieredckpt import Checkpointer
from tieredckpt.agent.agent_api import NodeAgentAPI
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.session.session import close_sessions, use_agent_factory
from tieredckpt.settings import DurableSettings, Settings, load_settings, override_settings
from tieredckpt.testing import _Shared


def state_at(step: int, size: int = 1 << 18) -> dict[str, Any]:
    """Return about a megabyte of data unique to this step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.randn(size, generator=generator),
        "nested": {"b": torch.arange(7) + step, "half": torch.randn(33, generator=generator).bfloat16()},
        "step": step,
    }


@contextlib.contextmanager
def in_process_agent(store: NodeStore) -> Iterator[NodeAgentService]:
    """Let sessions of this process use an agent with this store; close both at the end."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(store))
        node = stack.enter_context(contextlib.closing(NodeAgentService(store)))
        stack.enter_context(use_agent_factory(lambda *_: cast("NodeAgentAPI", _Shared(node))))
        yield node


class CheckpointJob:
    """One job on this node, with a durable tier."""

    def __init__(self, agent_dir: Path, durable: DurableSettings, name: str = "") -> None:
        self.agent_dir = agent_dir
        self.name = name or f"job-{uuid.uuid4().hex[:8]}"
        self.settings: Settings = override_settings(load_settings(), durable=vars(durable))

    def checkpointer(self, **arguments: Any) -> Checkpointer:
        return Checkpointer(f"tiered://{self.name}", settings=self.settings, on_sigterm="ignore", **arguments)

    def save(self, *steps: int, durable: bool = True, size: int = 1 << 18, **arguments: Any) -> None:
        """Save steps and wait until they are sealed and, with ``durable``, durable."""
        with self.checkpointer(**arguments) as ckpt:
            for step in steps:
                saved = ckpt.save(state_at(step, size), step)
                saved.wait()
                if durable:
                    assert ckpt.wait("durable", timeout_s=60), ckpt.session.agent.drain_status(self.name)

    def assert_restores(self, step: int, *, tiers: set[str], size: int = 1 << 18, named: int | None = None) -> None:
        """Assert that a restore reads ``step``, bit for bit, from these tiers."""
        with self.checkpointer() as ckpt:
            found = zeros_like_state(state_at(max(step, 0), size))
            assert ckpt.restore(found, named) == step
            assert ckpt.last_restore is not None
            assert set(ckpt.last_restore.bytes_by_tier) == tiers
            assert_same_bits(state_at(step, size), found)

    def lose_memory(self) -> None:
        """Lose the node with everything in its memory."""
        close_sessions()
        stop_agent(self.agent_dir, signal.SIGKILL)
        shutil.rmtree(self.agent_dir, ignore_errors=True)

    def kill_agent(self) -> None:
        stop_agent(self.agent_dir, signal.SIGKILL)


def bucket_url(prefix: str = "") -> str:
    return f"s3://{BUCKET}/{prefix or uuid.uuid4().hex[:8]}"


def durable_settings(server: S3Server, **changes: Any) -> DurableSettings:
    """Return settings for a durable tier below a new prefix of the server's bucket."""
    return server.settings(url=bucket_url(), **changes)


def list_objects(server: S3Server, settings: DurableSettings) -> dict[str, int]:
    """Return names (relative to the URL) and sizes of the objects below the URL."""
    prefix = settings.url.removeprefix(f"s3://{BUCKET}/") + "/"
    found = {}
    with server.client() as client:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
            for item in page.get("Contents", []):
                found[item["Key"].removeprefix(prefix)] = item["Size"]
    return found
