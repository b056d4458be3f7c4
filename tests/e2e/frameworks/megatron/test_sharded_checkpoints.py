"""Megatron-Core's sharded states: killed ranks, other shardings, lost nodes, damage, export."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

pytest.importorskip("megatron.core.package_info", reason="Megatron-Core is not installed")

with warnings.catch_warnings():  # about Transformer Engine and Apex, and torch's own
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from integration.megatron import (
        TieredLoadStrategy,
        TieredSaveStrategy,
        complete_exported_folder,
        load_sharded_state,
        save_sharded_state,
    )

from tests.e2e.peers.test_export_from_peers import flip_shard_bits
from tests.e2e.peers.test_torn_lost_or_absent_steps import sealed_on
from tests.support.bits import assert_same_bits
from tests.support.local_nodes import wait_until
from tieredckpt import Checkpointer
from tieredckpt.cli import main
from tieredckpt.dcp.rank_group import RankGroup
from tieredckpt.errors import CheckpointNotFoundError, MismatchError, UsageError
from tieredckpt.session.session import Session, close_sessions

pytestmark = pytest.mark.e2e

WHERE = ["n1", "n2"]


class Training:
    """A layer of Megatron's parallel matrices and torch's Adam, with a random number for each step."""

    def __init__(self, tensor_parallel, seed=1):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            tensor_model_parallel_size=tensor_parallel,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        torch.manual_seed(seed)
        init = {"config": config, "init_method": torch.nn.init.normal_, "bias": True, "skip_bias_add": False}
        self.layers = {
            "up": ColumnParallelLinear(16, 32, gather_output=False, **init),
            "down": RowParallelLinear(32, 16, input_is_parallel=True, **init),
        }
        self.adam = torch.optim.Adam([p for layer in self.layers.values() for p in layer.parameters()])
        self.iteration = 0

    def train(self, steps):
        losses = []
        for _ in range(steps):
            self.adam.zero_grad()
            hidden, _ = self.layers["up"](torch.rand(4, 16))
            out, _ = self.layers["down"](torch.relu(hidden))
            losses.append(out.pow(2).mean())
            losses[-1].backward()
            self.adam.step()
            self.iteration += 1
        return [loss.detach() for loss in losses]

    def sharded(self, loading=False):
        """Return the state as Megatron's training loop builds it."""
        groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state = {}
        for name, layer in self.layers.items():
            parts = layer.sharded_state_dict(f"{name}.", metadata=groups)
            # Extra states of Transformer Engine are empty.
            state |= {key: value for key, value in parts.items() if not isinstance(value, ShardedObject)}
        if loading:
            for group in self.adam.param_groups:
                for param in group["params"]:
                    param.grad = torch.zeros_like(param)
            self.adam.step()  # creates the moments
        optimizer = self.adam.state_dict()
        params = [p for group in self.adam.param_groups for p in group["params"]]
        by_param = get_param_id_to_sharded_param_map(state, iter(params))
        optimizer["state"] = {number: dict(one) for number, one in optimizer["state"].items()}
        steps = [one.pop("step") for one in optimizer["state"].values()]
        optim_state_to_sharding_state(optimizer, by_param)
        rank, size = dist.get_rank(), dist.get_world_size()
        return {
            "model": state,
            "optimizer": optimizer,
            "steps": steps,
            "rng": ShardedObject("rng", {"cpu": torch.get_rng_state(), "size": size}, (size,), (rank,)),
            "iteration": self.iteration,
            "local": LocalNonpersistentObject({"rank": rank}),
        }

    def load(self, ckpt, rng=True, read=None):
        asked = self.sharded(loading=True)
        if not rng:
            del asked["rng"]
        state = read(asked) if read else load_sharded_state(asked, ckpt)
        for name, layer in self.layers.items():
            own = {k.removeprefix(f"{name}."): v for k, v in state["model"].items() if k.startswith(f"{name}.")}
            layer.load_state_dict(own, strict=False)
        moments = zip(state["optimizer"]["state"].items(), state["steps"], strict=True)
        state["optimizer"]["state"] = {number: {"step": step, **one} for (number, one), step in moments}
        self.adam.load_state_dict(state["optimizer"])
        assert state["local"] == {"rank": dist.get_rank()}
        if rng:
            torch.set_rng_state(state["rng"]["cpu"])
        self.iteration = state["iteration"]
        return self

    def bits(self):
        """Return all values of this rank."""
        model = {name: layer.state_dict() for name, layer in self.layers.items()}
        state = {"model": model, "adam": self.adam.state_dict(), "rng": torch.get_rng_state()}
        return copy.deepcopy({**state, "iteration": self.iteration})


@pytest.fixture
def on_n1(nodes, monkeypatch):
    """Use the agent of the first node in this process."""
    for name, value in nodes["n1"].environ.items():
        monkeypatch.setenv(name, value)
    yield nodes
    close_sessions()


def train_and_save(job, steps, tensor_parallel=2, copies=1):
    training, ckpt = Training(tensor_parallel), Checkpointer(job)
    for _ in range(steps):
        training.train(1)
        saved = save_sharded_state(training.sharded(), ckpt, training.iteration)
        saved.wait(copies=copies, domains=copies, timeout_s=60)
    ckpt.close()
    parallel_state.destroy_model_parallel()
    return training.bits()


def train_and_die(job, steps):
    train_and_save(job, steps)
    os.kill(os.getpid(), signal.SIGKILL)


def load_and_train(job, steps=0, tensor_parallel=2, rng=True):
    """Return the loaded values, the losses of more steps and the values after them; save another step."""
    ckpt = Checkpointer(job)
    training = Training(tensor_parallel, seed=9).load(ckpt, rng)
    bits = training.bits()
    losses = training.train(steps)
    save_sharded_state(training.sharded(), ckpt, training.iteration + 1).wait()
    ckpt.close()
    parallel_state.destroy_model_parallel()
    return bits, losses, training.bits()


def train_without_end(job, steps, tensor_parallel=2):
    training = Training(tensor_parallel)
    losses = training.train(steps)
    parallel_state.destroy_model_parallel()
    return losses, training.bits()


def loaded_bits(nodes, where=WHERE, *args):
    return [bits for bits, _, _ in nodes.run(where, load_and_train, 0, *args)]


def test_killed_ranks_resume_bit_for_bit(nodes):
    whole = nodes.run(WHERE, train_without_end, 5)
    with pytest.raises(AssertionError, match="died"):
        nodes.run(WHERE, train_and_die, 3)
    for (losses, end), (_, later, after) in zip(whole, nodes.run(WHERE, load_and_train, 2), strict=True):
        assert_same_bits(losses[3:], later)
        assert_same_bits(end, after)


def whole_tensors(ranks, tensor_parallel):
    """Return the tensors of all ranks as one rank without tensor parallelism has them."""
    parts = ranks[:tensor_parallel]
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    names = ["up.weight", "up.bias", "down.weight", "down.bias"]
    whole = {}
    for number, name in enumerate(names):
        layer, key = name.split(".")
        values = [one["model"][layer][key] for one in parts]
        moments = [[one["adam"]["state"][number][m] for one in parts] for m in ("exp_avg", "exp_avg_sq")]
        joined = [torch.cat(v, dims[name]) if name in dims else v[0] for v in [values, *moments]]
        whole[name] = [*joined, parts[0]["adam"]["state"][number]["step"]]
    return whole


@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((2, 1), (1, 1)), ((1, 1), (2, 1))])
def test_other_sharding_loads_equal_bits(nodes, saved, loaded):
    (ranks, parallel), (new_ranks, new_parallel) = saved, loaded
    before = nodes.run(WHERE[:ranks], train_and_save, 3, parallel, ranks)
    after = loaded_bits(nodes, WHERE[:new_ranks], new_parallel, False)
    assert_same_bits(whole_tensors(before, parallel), whole_tensors(after, new_parallel))
    assert [one["iteration"] for one in after] == [3] * new_ranks
    if new_parallel == 1:
        assert all(whole_tensors([one], 1).keys() == whole_tensors(after, 1).keys() for one in after)
        assert_same_bits(after[0]["model"], after[-1]["model"])


def test_lost_node_is_loaded_from_peer_copies(nodes):
    before = nodes.run(WHERE, train_and_save, 3, 2, 2)
    nodes["n2"].lose()
    nodes.add("n3", "rack=r3")
    assert_same_bits(before, loaded_bits(nodes, ["n1", "n3"]))


def test_damaged_copy_is_replaced_by_the_other_copy(nodes):
    before = nodes.run(WHERE, train_and_save, 3, 2, 2)
    flip_shard_bits(nodes["n1"], nodes.job)
    assert_same_bits(before, loaded_bits(nodes))


def die_while_saving(job):
    """Kill rank 1 before its seal, and rank 0 after its own."""
    ckpt = Checkpointer(job)
    training = Training(2, seed=9).load(ckpt)

    def die(*args, **more):
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        Session.seal = die
    training.train(1)
    save_sharded_state(training.sharded(), ckpt, training.iteration).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def test_torn_save_is_not_loaded(nodes):
    before = nodes.run(WHERE, train_and_save, 3)
    with pytest.raises(AssertionError, match="died"):
        nodes.run(WHERE, die_while_saving)
    wait_until(lambda: 4 in sealed_on(nodes["n1"], nodes.job))
    assert_same_bits(before, loaded_bits(nodes))


def test_old_steps_are_evicted(nodes):
    before = nodes.run(WHERE, train_and_save, 8, 2, 2)
    steps = sealed_on(nodes["n1"], nodes.job)
    assert 8 in steps
    assert 1 not in steps
    assert_same_bits(before, loaded_bits(nodes))


def load_folder(job, folder):
    """Load ``folder`` with Megatron alone."""
    training = Training(2, seed=9)
    training.load(None, read=lambda asked: dist_checkpointing.load(asked, folder))
    parallel_state.destroy_model_parallel()
    return training.bits()


def test_exported_step_is_loaded_by_megatron_alone(on_n1, tmp_path):
    before = on_n1.run(WHERE, train_and_save, 3, 2, 2)
    assert main(["export", on_n1.job, str(tmp_path / "out"), "--format", "dcp"]) == 0
    complete_exported_folder(tmp_path / "out")
    assert_same_bits(before, on_n1.run(WHERE, load_folder, str(tmp_path / "out")))


def test_folder_without_a_sharded_state_is_an_error(tmp_path):
    RankGroup(None).call_dcp(dcp.save, {"a": torch.ones(2)}, checkpoint_id=tmp_path)
    with pytest.raises(UsageError, match="no step of Megatron-Core"):
        complete_exported_folder(tmp_path)


def save_by_strategy(job, root, kind):
    training, ckpt = Training(1), Checkpointer(job)
    strategy = TieredSaveStrategy(ckpt)
    if kind == "fully parallel":
        strategy = FullyParallelSaveStrategyWrapper(strategy, parallel_state.get_data_parallel_group())
    training.train(2)
    folder = Path(root, "iter_0000002")
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    request = dist_checkpointing.save(
        training.sharded(), str(folder), strategy, async_sharded_save=kind == "asynchronous"
    )
    bits = training.bits()
    if request is not None:
        training.train(1)
        request.execute_sync()
    ckpt.close()
    parallel_state.destroy_model_parallel()
    return bits


def load_by_strategy(job, root):
    training, ckpt = Training(1, seed=9), Checkpointer(job)
    folder = str(Path(root, "iter_0000002"))
    strategy = TieredLoadStrategy(ckpt)
    training.load(None, read=lambda asked: dist_checkpointing.load(asked, folder, strategy, strict="log_all"))
    assert strategy.loaded_step == 2
    assert not list(Path(folder).glob("*.distcp"))
    ckpt.close()
    parallel_state.destroy_model_parallel()
    return training.bits()


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous", "fully parallel"])
def test_strategies_of_megatron_save_and_load(nodes, tmp_path, kind):
    before = nodes.run(WHERE, save_by_strategy, str(tmp_path), kind)
    assert_same_bits(before, nodes.run(WHERE, load_by_strategy, str(tmp_path)))
    shutil.rmtree(tmp_path)
    assert_same_bits(before, loaded_bits(nodes, WHERE, 1))


def save_vocabulary(job, padded):
    ckpt = Checkpointer(job)
    save_sharded_state({"words": vocabulary(torch.arange(2.0 * padded).reshape(padded, 2))}, ckpt, 1).wait()
    ckpt.close()


def vocabulary(tensor, allow=True):
    ranks = (0, dist.get_rank(), dist.get_world_size())
    return ShardedTensor.from_rank_offsets("words", tensor, ranks, allow_shape_mismatch=allow)


def load_vocabulary(job, padded, allow=True, name="words", dtype=torch.float):
    ckpt = Checkpointer(job)
    asked = vocabulary(torch.ones(padded, 2, dtype=dtype), allow)
    asked.key = name
    try:
        return load_sharded_state({"words": asked}, ckpt)["words"]
    finally:
        ckpt.close()


@pytest.mark.parametrize("padded", [3, 5, 6])
def test_vocabulary_of_another_padding_is_loaded(nodes, padded):
    nodes.run(WHERE[:1], save_vocabulary, 5)
    (found,) = nodes.run(WHERE[:1], load_vocabulary, padded)
    saved = torch.arange(10.0).reshape(5, 2)
    assert_same_bits(torch.cat([saved, torch.zeros(1, 2)])[:padded], found)


def refused(job, match, *args):
    with pytest.raises(MismatchError, match=match):
        load_vocabulary(job, *args)


def test_mismatch_is_an_error_with_the_names(nodes):
    nodes.run(WHERE[:1], save_vocabulary, 5)
    nodes.run(WHERE[:1], refused, r"do not match: Global shape mismatch .* for key words", 6, False)
    nodes.run(WHERE[:1], refused, r"do not match: other from model not in state dict", 5, False, "other")
    nodes.run(WHERE[:1], refused, "words", 5, False, "words", torch.half)


def find_nothing(job):
    with pytest.raises(CheckpointNotFoundError):
        load_vocabulary(job, 5)


def test_load_before_the_first_save_is_an_error(nodes):
    nodes.run(WHERE, find_nothing)


def refuse_folder(job):
    ckpt = Checkpointer(job)
    with pytest.raises(UsageError, match="Which step is some/folder"):
        TieredSaveStrategy(ckpt).async_save({}, "some/folder")
    with pytest.raises(UsageError, match="never changes"):
        TieredLoadStrategy(ckpt).remove_sharded_tensors("iter_1", "optimizer")
    ckpt.close()


def test_unsupported_uses_of_the_strategies_are_errors(nodes):
    nodes.run(WHERE[:1], refuse_folder)
