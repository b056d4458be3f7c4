"""``Checkpointer.seal``: a step is safe before the ranks leave, even if its save was skipped."""

from __future__ import annotations

import pytest
import torch

from tieredckpt import Checkpointer, NullCheckpointer, SaveFailedError, Settings
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.settings import DurableSettings
from tieredckpt.testing import memory_node


@pytest.fixture
def node():
    with memory_node() as one:
        yield one


@pytest.fixture
def state():
    return {"weight": torch.arange(12.0), "step": 7}


def attempts(node, job, step):
    return sorted(fact.key.attempt for fact in node.store.list_shards(job) if fact.key.version == step)


def test_saved_step_is_not_saved_again(node, state):
    with Checkpointer("tiered://seal") as ckpt:
        saved = ckpt.save(state, 8)
        assert ckpt.seal(state, 8) is saved
        assert saved.state is SaveState.SEALED
        assert attempts(node, "seal", 8) == [0]


def test_step_that_was_not_due_is_saved(node, state):
    with Checkpointer("tiered://seal", every=100) as ckpt:
        assert ckpt.save(state, 7).state is SaveState.NOT_DUE
        assert ckpt.seal(state, 7).state is SaveState.SEALED
        assert ckpt.restore({"weight": torch.zeros(12), "step": 0}) == 7


def test_skipped_save_uses_the_attempt_of_the_other_ranks(node, state):
    with Checkpointer("tiered://seal") as ckpt:
        ckpt.save(state, 0).wait()
        ckpt._last_saved = None  # as after a save that was skipped
        ckpt._ranks.all_gather = lambda mine: [mine, '{"good": true, "attempts": 3}']  # the other rank
        ckpt.seal(state, 8)
        assert attempts(node, "seal", 8) == [3]


def test_seal_makes_the_step_durable_on_request(node, state, tmp_path):
    with Checkpointer("tiered://seal", durable=f"file://{tmp_path}", durable_every=100) as ckpt:
        ckpt.save(state, 8).wait()
        assert ckpt.seal(state, 8, durable=True, timeout_s=30).state is SaveState.DURABLE
        assert [info.tiers for info in ckpt.steps() if info.step == 8 and "durable" in info.tiers]


def test_seal_uses_only_memory_without_a_durable_tier(node, state):
    with Checkpointer("tiered://seal") as ckpt:
        assert ckpt.seal(state, 8, durable=True).state is SaveState.SEALED


def test_a_failure_is_an_error_and_not_a_report(node, state):
    with Checkpointer("tiered://seal") as ckpt:
        ckpt.save(state, 0).wait()

        def failing(*_args, **_named):
            raise SaveFailedError("no slot")

        ckpt.session.slots.lease = failing
        with pytest.raises(SaveFailedError, match="no slot"):
            ckpt.seal(state, 8)


def test_refused_seal_retains_no_pin(node, state):
    with Checkpointer("tiered://seal") as ckpt:
        ckpt.save(state, 0).wait()
        seal = ckpt.session.seal

        def late(*what, **how):
            node.store.claim("seal", "another-incarnation")
            return seal(*what, **how)

        ckpt.session.seal = late
        with pytest.raises(SaveFailedError, match="was fenced"):
            ckpt.save(state, 8, keep=True).wait()
        assert node.store.versions.retained("seal") == set()


def test_disabled_checkpointer_writes_a_plain_checkpoint(state, tmp_path):
    settings = Settings(enabled=False, durable=DurableSettings(url=f"file://{tmp_path}"))
    with Checkpointer("tiered://seal", settings=settings) as ckpt:
        assert ckpt.seal(state, 8).state is SaveState.DURABLE
        assert [info.step for info in ckpt.steps()] == [8]


def test_null_checkpointer_seals_nothing(state):
    assert NullCheckpointer().seal(state, 8).state is SaveState.NOT_DUE
