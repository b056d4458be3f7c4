"""Jobs whose list of pieces exceeds one message are restored."""

import json
import os
import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.pieces import measure
from tests.support.paged_agents import paged_agent
from tests.support.stores import store_directory
from tieredckpt import Checkpointer, SaveFailedError
from tieredckpt.cli.tier_client import open_tier_client
from tieredckpt.settings import settings_from_mapping

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "many"
PIECES = 6_000
MESSAGE, PAGE = 1 << 20, 32 << 10
"""Sizes that a rank's uncompressed layout (0.6 MiB) fits and both ranks' layouts exceed."""


def settings():
    embedded = os.environ.get("TIEREDCKPT_AGENT_EMBEDDED") == "true"
    return settings_from_mapping(
        {"agent": {"directory": os.environ["TIEREDCKPT_AGENT_DIRECTORY"], "embedded": embedded}}
    )


def rank_of():
    return dist.get_rank() if dist.is_initialized() else 0


def names_of(rank, pieces):
    return [f"model.layers.{number // 12}.rank{rank}.attention.projection.{number % 12}" for number in range(pieces)]


def state_of(rank, pieces, value):
    state = {name: torch.full((4,), value) for name in names_of(rank, pieces)}
    return {**state, f"note{rank}": f"rank {rank} wrote {value}"}


def save(pieces):
    with Checkpointer(f"tiered://{JOB}", settings=settings()) as ckpt:
        ckpt.save(state_of(rank_of(), pieces, 1.0 + rank_of()), 7).wait()


def restore(pieces, whose):
    """Restore the tensors and objects of these ranks."""
    wanted = {}
    for rank in whose:
        wanted |= state_of(rank, pieces, 0.0)
    with Checkpointer(f"tiered://{JOB}", settings=settings()) as ckpt:
        began = time.perf_counter()
        assert ckpt.restore(wanted) == 7
        seconds = time.perf_counter() - began
    for rank in whose:
        for name in names_of(rank, pieces):
            assert torch.equal(wanted[name], torch.full((4,), 1.0 + rank)), name
        assert wanted[f"note{rank}"] == f"rank {rank} wrote {1.0 + rank}"
    return seconds


def restore_own(pieces):
    return restore(pieces, [rank_of()])


def restore_the_others(pieces):
    return restore(pieces, [1 - rank_of()])


def restore_all(pieces):
    return restore(pieces, [0, 1])


@pytest.fixture
def folder(monkeypatch):
    with store_directory() as directory:
        monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory))
        yield directory


@pytest.fixture
def small_messages(folder):
    with paged_agent(folder, message_bytes=MESSAGE, page_bytes=PAGE):
        yield


def test_many_pieces_round_trip_with_small_messages(small_messages, ranks):
    ranks.run(2, save, PIECES)
    ranks.run(2, restore_own, PIECES)
    ranks.run(2, restore_the_others, PIECES)
    ranks.run(1, restore_all, PIECES)


def test_tools_list_every_piece(small_messages, ranks):
    ranks.run(2, save, PIECES)
    with open_tier_client(settings()) as sight:
        (view,) = sight.survey(JOB).views
        described = sight.describe(JOB, view.version_id)
    assert len(described.manifest.shards) == 2
    assert sum(len(described.manifest.layout_of(shard).tensors) for shard in described.manifest.shards) == 2 * PIECES


def test_rank_with_more_pieces_than_an_agent_stores_is_refused_at_its_save(folder, ranks):
    with paged_agent(folder, message_bytes=16 << 10, page_bytes=4 << 10):
        ranks.run(1, save_refused, PIECES)


def save_refused(pieces):
    state = {os.urandom(24).hex(): torch.ones(1) for _ in range(pieces)}  # incompressible names
    with Checkpointer(f"tiered://{JOB}", settings=settings()) as ckpt:
        saved = ckpt.save(state, 1)
        with pytest.raises(SaveFailedError, match="the limit is"):
            saved.wait()


def finds_its_own(kind, job, own):
    """Run ``benchmarks.pieces`` in separate processes and print the times without a check."""
    found = measure(kind, *job)
    print(json.dumps(found, indent=1))
    asked = {what: found[what] for what in found if what.startswith(("restore", "reshard"))}
    assert [said["pieces"] for said in asked.values()] == own
    return [said["grown, MiB"] for said in asked.values()]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_rank_of_a_job_with_a_million_pieces_keeps_only_its_own():
    assert max(finds_its_own("sharded", (1000, 1000), [1000, 1000, 2000, 2000])) < 8


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_rank_keeps_only_names_and_its_own_pieces_of_a_million_tensors():
    assert max(finds_its_own("apart", (200, 5000), [5000] * 4)) < 400


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_two_ranks_with_240_000_pieces_each(agent_dir, ranks, monkeypatch):
    monkeypatch.setattr("tests.support.ranks._TIMEOUT_S", 3000.0)
    monkeypatch.setenv("TIEREDCKPT_AGENT_EMBEDDED", "true")
    ranks.run(2, save, 240_000)
    ranks.run(2, restore_own, 240_000)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_single_rank_saves_600_000_pieces(agent_dir, ranks, monkeypatch):
    monkeypatch.setattr("tests.support.ranks._TIMEOUT_S", 3000.0)
    monkeypatch.setenv("TIEREDCKPT_AGENT_EMBEDDED", "true")
    ranks.run(1, save, 600_000)
    ranks.run(1, restore_own, 600_000)
