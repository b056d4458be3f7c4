"""``tieredckpt.load`` and ``save``: a state in one call, without a template or a prior setup."""

import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import elastic
import tieredckpt
from tests.support.bits import assert_same_bits
from tests.support.local_nodes import wait_until
from tests.support.scripts import run_script
from tieredckpt import CheckpointNotFoundError, TieredReader
from tieredckpt.errors import MismatchError, MissingStepError, UsageError
from tieredckpt.session.session import open_session
from tieredckpt.settings import load_settings

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
]


def state_at(step):
    return {
        "model": {"w.x": torch.full((3, 4), float(step)), "layers": [torch.ones(1) * step, {"b": torch.ones(2)}]},
        "optim": {"lr": 0.1, "betas": (0.9, 0.99), "names": ["a", "b"]},
        "step": step,
        "half": torch.arange(5).bfloat16(),
        "scalar": torch.tensor(float(step)),
        "empty": torch.empty(0, 3),
    }


def in_order(value):
    """Return a value with sorted keys, because a checkpoint does not keep their order."""
    return {key: in_order(value[key]) for key in sorted(value)} if isinstance(value, dict) else value


IN_A_FRESH_PROCESS = """
import sys, warnings
warnings.simplefilter("error", UserWarning)
import tieredckpt
state = tieredckpt.load(sys.argv[1])
assert state["model"]["layers"][1]["b"].tolist() == [1.0, 1.0], state
tieredckpt.save("copied", state, state["step"] + 1)
print(state["step"], state["half"].dtype, state["model"]["w.x"].sum().item())
"""


@pytest.mark.parametrize(
    "target", [pytest.param("whole", marks=pytest.mark.fresh_starts), "tiered://whole", "tiered://whole/step-2"]
)
def test_saved_step_is_loaded_in_a_fresh_process(agent_dir, tmp_path, target):
    for step in (2, 3):
        tieredckpt.save("whole", state_at(step), step)
    step = 2 if "step" in target else 3
    run = run_script(tmp_path, IN_A_FRESH_PROCESS, target)
    assert (run.returncode, run.stdout) == (0, f"{step} torch.bfloat16 {12.0 * step}\n"), run.stderr
    assert_same_bits(in_order(state_at(step)), in_order(tieredckpt.load("copied", step=step + 1)))


def test_objects_nesting_and_kinds_are_as_saved(agent_dir):
    tieredckpt.save("tiered://whole/step-5", state_at(5))
    assert_same_bits(in_order(state_at(5)), in_order(tieredckpt.load("whole")))
    assert_same_bits(in_order(state_at(5)), in_order(tieredckpt.load("whole", step=5, device="cpu")))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_of_other_kinds_keep_their_type(agent_dir):
    state = {"coo": torch.eye(3).to_sparse(), "two": TwoTensor(torch.ones(2), torch.zeros(2)), "w": torch.ones(2)}
    tieredckpt.save("kinds", state, 1)
    with torch.serialization.safe_globals([TwoTensor]):
        found = tieredckpt.load("kinds")
    assert found["coo"].layout is torch.sparse_coo
    assert torch.equal(found["coo"].to_dense(), torch.eye(3))
    assert type(found["two"]) is TwoTensor
    assert torch.equal(found["two"].a, torch.ones(2))


def test_mistakes_are_reported(agent_dir):
    with pytest.raises(MissingStepError):
        tieredckpt.save("whole", {"a": torch.ones(1)})
    with pytest.raises(CheckpointNotFoundError):
        tieredckpt.load("nothing")
    tieredckpt.save("whole", {"a": torch.ones(1)}, 1)
    with pytest.raises(CheckpointNotFoundError):
        tieredckpt.load("whole", step=7)


def test_reading_a_step_is_not_a_rollback(agent_dir):
    """A training process reads an older step of its own job, and continues from its own step."""
    with tieredckpt.Checkpointer("looked-at") as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step), step).wait()
        assert tieredckpt.load("looked-at", step=1)["step"] == 1
        assert ckpt.save(state_at(3), 3).wait().value == "sealed"
    facts = open_session("looked-at", load_settings()).agent.store.list_shards("looked-at")
    assert {2, 3} <= {fact.key.version for fact in facts}
    assert len({fact.key.epoch for fact in facts}) == 1, "a rollback begins a new incarnation"


def save_sharded():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(12.0).view(6, 2)
    tieredckpt.save("sharded", {"m": {"t": distribute_tensor(whole, mesh, [Shard(0)])}, "n": 1}, 4)
    found = tieredckpt.load("sharded") if dist.get_rank() == 1 else None  # rank 1 alone
    return found is None or (torch.equal(found["m"]["t"], whole) and found["n"] == 1)


def test_step_saved_by_several_ranks_is_loaded_by_one(agent_dir, ranks):
    assert ranks.run(2, save_sharded) == [True, True]
    assert torch.equal(tieredckpt.load("tiered://sharded")["m"]["t"], torch.arange(12.0).view(6, 2))


@pytest.mark.parametrize("by", ["url", "object", "checkpoint_id"])
def test_cast_is_requested_by_url(agent_dir, by):
    tieredckpt.save("cast", {"w": torch.ones(3)}, 1)

    def load(query):
        target = {"w": torch.zeros(3, dtype=torch.float64)}
        url = f"tiered://cast/step-1{query}"
        if by == "url":
            with tieredckpt.enable_urls():
                dcp.load(target, checkpoint_id=url, no_dist=True)
        elif by == "object":
            dcp.load(target, storage_reader=TieredReader(url), no_dist=True)
        else:
            dcp.load(target, storage_reader=TieredReader("cast"), checkpoint_id=url, no_dist=True)
        return target["w"]

    assert load("?cast=1").tolist() == [1, 1, 1]
    for query in ("", "?cast=0"):
        with pytest.raises(CheckpointException) as failure:
            load(query)
        error = failure.value.failures[0][0]
        assert isinstance(error, MismatchError)
        assert "?cast=1" in str(error)


def test_cast_is_refused_for_saving():
    with pytest.raises(UsageError, match="is for loads"):
        tieredckpt.TieredWriter("tiered://cast/step-1?cast=1")
    with pytest.raises(UsageError, match="restores what it saved"):
        tieredckpt.Checkpointer("tiered://cast?cast=1")
    for query in ("?cast", "?cast=float16", "?x=1", "?cast=1&x=2"):
        with pytest.raises(UsageError, match="cast=1"):
            TieredReader(f"tiered://cast{query}")


@pytest.mark.parametrize("package", [tieredckpt, elastic])
def test_names_that_are_imported_lazily_are_listed(package):
    assert set(package.__all__) <= set(dir(package))


def test_killed_reader_does_not_count_as_a_crashed_load(agent_dir, tmp_path):
    tieredckpt.save("looked-at", state_at(1), 1)
    look = "import os, signal, tieredckpt; tieredckpt.load('looked-at'); os.kill(os.getpid(), signal.SIGKILL)"
    assert run_script(tmp_path, look).returncode == -signal.SIGKILL
    node = open_session("looked-at", load_settings()).agent
    wait_until(lambda: node.store.status().jobs[0].clients == 1, "the agent notices the end of the process")
    assert [view.crashed_loads for view in node.list_steps("looked-at").views] == [0]
