"""A load with unreadable memory reads another tier or raises, but loads no older step."""

import errno

import pytest

from peerstore.settings import StoreSettings
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from tests.support.agents import agent_directory
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.failing_calls import failing_os_call
from tests.support.jobs import in_process_agent, state_at
from tieredckpt import Checkpointer, TierUnavailableError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "tiered://unreadable"


@pytest.fixture
def slots():
    with agent_directory() as directory:
        store = NodeStore(TmpfsArena(directory), StoreSettings(budget="1GiB"))
        with in_process_agent(store):
            yield str(directory / "slots")


def saved(durable, *steps):
    ckpt = Checkpointer(JOB, durable=durable, on_sigterm="ignore")
    for step in steps:
        assert ckpt.save(state_at(step), step).wait("durable" if durable else "sealed")
    return ckpt


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
def test_durable_copy_is_read_and_the_unreadable_memory_copy_kept(slots, tmp_path, code):
    with saved(f"file://{tmp_path}", 1, 2) as ckpt:
        far, near = zeros_like_state(state_at(0)), zeros_like_state(state_at(0))
        with failing_os_call("preadv", code, below=slots):
            assert ckpt.restore(far) == 2
        assert set(ckpt.last_restore.bytes_by_tier) == {"durable"}
        assert ckpt.restore(near) == 2
        assert set(ckpt.last_restore.bytes_by_tier) == {"memory"}
        assert_same_bits(state_at(2), far)
        assert_same_bits(state_at(2), near)
        assert [(info.step, info.is_complete, info.quarantined) for info in ckpt.steps()] == [
            (1, True, ""),
            (2, True, ""),
        ]


def test_unreadable_only_copy_raises_instead_of_using_an_older_step(slots):
    with saved(None, 1, 2) as ckpt:
        with (
            failing_os_call("preadv", errno.EMFILE, below=slots),
            pytest.raises(TierUnavailableError, match="load again"),
        ):
            ckpt.restore(zeros_like_state(state_at(0)))
        found = zeros_like_state(state_at(0))
        assert ckpt.restore(found) == 2
        assert_same_bits(state_at(2), found)
        assert [info.is_complete for info in ckpt.steps()] == [True, True]


def test_step_dropped_during_verification_is_not_reported_as_damaged(slots, caplog, monkeypatch):
    verify = NodeStore.verify
    with saved(None, 1, 2) as ckpt:

        def given_up_first(store, key, chunks=None):
            monkeypatch.setattr(NodeStore, "verify", verify)
            store.versions.delete(key.job, [key.version_id])
            for pin in list(store.reader._pins):
                store.unpin(pin)
            return verify(store, key, chunks)

        monkeypatch.setattr(NodeStore, "verify", given_up_first)
        assert ckpt.restore(zeros_like_state(state_at(0))) == 1
    assert "given up while it was looked for" in caplog.text
    assert "damaged" not in caplog.text
