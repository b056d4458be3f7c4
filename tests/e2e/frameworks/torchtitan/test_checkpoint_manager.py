"""torchtitan's checkpoints as steps: killed and started again, a training continues bit for bit."""

import signal
from functools import partial

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: run `tox -e torchtitan`")

from tests.support.stores import flip_byte, pinned_file
from tests.support.torchtitan_training import JOB, STEPS, URL, saved_folders, train
from tests.support.transformers_training import KILL, TERM, values_by_step
from tieredckpt import Checkpointer

pytestmark = pytest.mark.e2e


def complete_steps():
    with Checkpointer(URL, on_sigterm="ignore") as ckpt:
        return [one.step for one in ckpt.steps() if one.is_complete]


def flip_byte_of_step(step):
    with Checkpointer(URL, on_sigterm="ignore") as ckpt:
        store = ckpt.session.agent.store
        for shard in store.list_shards(JOB):
            if shard.key.version == step:
                pin = store.pin(shard.key)
                flip_byte(pinned_file(pin), pin.record.size_bytes // 2)
                store.unpin(pin.id)


def test_killed_training_continues_bit_equal(agent_dir, titan_zygote, tmp_path, undisturbed):
    size = len(undisturbed)
    kills = {rank: {"after 5": KILL} for rank in range(size)}
    first = titan_zygote.run_ranks(size, train, str(tmp_path), kills)
    assert {one.status for one in first} == {-signal.SIGKILL}
    assert complete_steps()[-1] == 4
    assert not saved_folders(tmp_path)
    second = titan_zygote.run_ranks(size, train, str(tmp_path))
    for before, after, whole in zip(first, second, undisturbed, strict=True):
        assert after.lines[0] == "loaded True"
        assert min(values_by_step(after.lines)) == 5
        for kind in ("loss", "state"):
            found = values_by_step(before.lines, kind) | values_by_step(after.lines, kind)
            assert found == values_by_step(whole.lines, kind)
        assert len(values_by_step(whole.lines)) == STEPS
        assert after.result == whole.result


def test_data_worker_continues_with_the_next_sample(agent_dir, titan_zygote, tmp_path, undisturbed_pair):
    with_worker = partial(train, workers=1)
    titan_zygote.run_ranks(2, with_worker, str(tmp_path), {0: {"after 5": KILL}, 1: {"after 5": KILL}})
    second = titan_zygote.run_ranks(2, with_worker, str(tmp_path))
    assert min(values_by_step(second[0].lines)) == 5
    assert [one.result for one in second] == [one.result for one in undisturbed_pair]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_restores_the_same_bits(agent_dir, titan_zygote, tmp_path, before, after):
    first = titan_zygote.run_ranks(before, train, str(tmp_path), {rank: {"after 5": KILL} for rank in range(before)})
    refused = titan_zygote.start_world(after, train, str(tmp_path))
    for one in refused:
        with pytest.raises(AssertionError, match=f"{before} data-parallel ranks and cannot continue on {after}"):
            one.wait()
    resume = partial(train, exclude_from_loading=["dataloader"])
    second = titan_zygote.run_ranks(after, resume, str(tmp_path))
    assert {values_by_step(one.lines, "state")[4] for one in [*first, *second]} == {
        values_by_step(first[0].lines, "state")[4]
    }
    assert min(values_by_step(second[0].lines)) == 5


def test_sigterm_of_one_rank_ends_all_ranks_at_the_same_step(agent_dir, titan_zygote, tmp_path, undisturbed_pair):
    resume = partial(train, interval=100)
    first = titan_zygote.run_ranks(2, resume, str(tmp_path), {1: {"before 3": TERM}})
    assert [one.status for one in first] == [-signal.SIGTERM, -signal.SIGTERM]
    (step,) = {max(values_by_step(one.lines)) for one in first}
    assert 3 <= step < STEPS
    assert complete_steps() == [step]
    second = titan_zygote.run_ranks(2, resume, str(tmp_path))
    assert [one.result for one in second] == [one.result for one in undisturbed_pair]
    assert min(values_by_step(second[0].lines)) == step + 1


def test_torn_step_is_not_used(agent_dir, titan_zygote, tmp_path, undisturbed_pair):
    running = titan_zygote.start_world(2, train, str(tmp_path), {1: {"before 6": KILL}})
    try:
        assert running[1].wait().status == -signal.SIGKILL
        with pytest.raises(AssertionError, match="RuntimeError"):  # the digest of step 6 needs both ranks
            running[0].wait()
    finally:
        for one in running:
            one.kill_if_alive()
    assert complete_steps()[-1] == 4
    second = titan_zygote.run_ranks(2, train, str(tmp_path))
    assert [one.result for one in second] == [one.result for one in undisturbed_pair]
    assert min(values_by_step(second[0].lines)) == 5


def test_damaged_step_is_skipped_for_an_older_one(agent_dir, titan_zygote, tmp_path, undisturbed_pair):
    titan_zygote.run_ranks(2, train, str(tmp_path), {0: {"after 5": KILL}, 1: {"after 5": KILL}})
    flip_byte_of_step(4)
    second = titan_zygote.run_ranks(2, train, str(tmp_path))
    assert min(values_by_step(second[0].lines)) == 3
    assert [one.result for one in second] == [one.result for one in undisturbed_pair]
