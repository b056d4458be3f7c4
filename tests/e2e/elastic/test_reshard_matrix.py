"""Every layout of every world loads into every other with real ranks, optimizer included.

A world saves each of its layouts into a separate job. Then each world loads the layouts of all others from the nodes'
memory. The checksum must equal that of the unsharded values. The values must have the same bits as values that torch
itself shards.
"""

import itertools
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from elastic.reshard.state_checksum import state_checksum
from tests.support.bits import assert_same_bits
from tests.support.layouts import Variant, build_variant, expected_state, fill_with_poison, variants
from tests.support.models import get_state, set_state
from tieredckpt import Checkpointer, TieredReader, TieredWriter

pytestmark = pytest.mark.e2e

FEW = [Variant("fsdp", (5,)), Variant("hsdp", (2, 2)), Variant("2d", (2, 3))]


def save_all(chosen):
    """Save each of these variants of this world's size, and return the checksum of each."""
    found = {}
    for variant in chosen:
        state = get_state(*build_variant(variant, blank=False))
        dcp.save(state, storage_writer=TieredWriter(f"tiered://{variant}", 1))
        found[str(variant)] = state_checksum(state).all_reduced()
    return found


def load_all(variant, sources):
    """Load all saved layouts one after the other into the same model."""
    expected = get_state(*build_variant(variant, blank=False))
    model, optimizer = build_variant(variant, blank=True)
    found = {}
    for source in sources:
        state = get_state(model, optimizer)
        fill_with_poison(state)
        reader = TieredReader(f"tiered://{source}")
        dcp.load(state, storage_reader=reader)
        set_state(model, optimizer, state)
        loaded = get_state(model, optimizer)
        found[str(source)] = state_checksum(loaded).all_reduced()
        assert_same_bits(expected, loaded, f"{source} -> {variant}")
        assert set(reader.report.bytes_by_tier) <= {"memory"}
    return found


def every_pair(ranks, sources, targets):
    """Save all sources, load each into all targets, and compare the checksums."""
    saved = {}
    for world, group in itertools.groupby(sorted(sources, key=lambda v: v.world), key=lambda v: v.world):
        saved |= agreed(ranks.run(world, save_all, list(group)))
    (reference, *others) = saved.values()
    for other in others:  # all layouts have the same state
        other.assert_equal(reference)
    expected = state_checksum(expected_state()).all_reduced()
    reference.assert_equal(expected)
    pairs = 0
    for target in targets:
        for found in agreed(ranks.run(target.world, load_all, target, sources)).values():
            found.assert_equal(expected)
            pairs += 1
    return pairs


def agreed(answers):
    """Check that all ranks returned the same, and return it."""
    for answer in answers[1:]:
        assert answer == answers[0]
    return answers[0]


def test_layouts_reshard_into_each_other(agent_dir, ranks):
    assert every_pair(ranks, FEW, FEW) == len(FEW) ** 2


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_layout_reshards_into_every_other(agent_dir, ranks):
    """About 2,000 pairs of real worlds, six minutes on two cores."""
    chosen, began = variants(8), time.monotonic()
    pairs = every_pair(ranks, chosen, chosen)
    print(f"{pairs} pairs of {len(chosen)} layouts in {time.monotonic() - began:.0f} s")
    assert pairs == len(chosen) ** 2
    one_dimensional = {(v.kind, v.world) for v in chosen if len(v.mesh) == 1}
    assert one_dimensional == {(kind, world) for kind in ("ddp", "fsdp", "tp") for world in range(1, 9)}


def save_damaged(variant):
    model, optimizer = build_variant(variant, blank=False)
    before = state_checksum(get_state(model, optimizer)).all_reduced()
    with torch.no_grad():
        victim = next(iter(model.parameters()))
        local = victim.to_local() if hasattr(victim, "to_local") else victim
        if torch.distributed.get_rank() == 1:
            local.view(-1).view(torch.int32)[0] ^= 1
    return before, state_checksum(get_state(model, optimizer)).all_reduced()


@pytest.mark.parametrize(
    ("variant", "diverged"),
    [(Variant("fsdp", (2,)), False), (Variant("ddp", (2,)), True), (Variant("hsdp", (2, 2)), False)],
)
def test_changed_bit_of_one_rank_is_detected_by_all(agent_dir, ranks, variant, diverged):
    for before, after in ranks.run(variant.world, save_damaged, variant):
        name = "model.up.weight"
        if diverged:  # the checksum counts another rank's replica
            assert after.diverged_names == (name,)
            assert not before.differences(after)
        else:
            assert set(before.differences(after)) | set(after.diverged_names) == {name}


def share(names):
    return state_checksum({name: torch.arange(4.0) for name in names[torch.distributed.get_rank()]}).all_reduced()


def test_reshard_of_ranks_with_different_names(ranks):
    """Ranks have different names, as in pipeline stages, and each name counts once."""
    whole = state_checksum({name: torch.arange(4.0) for name in "abc"}).all_reduced()
    for found in ranks.run(3, share, (["a", "b"], ["b"], ["c", "b"])):
        assert found == whole


def row_parallel(value):
    """FSDP2 over tensor parallelism, where the last rank has an empty shard of shape (0, 0)."""
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 5, bias=False))
    torch.nn.init.constant_(model[0].weight, value)
    parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"]).state_dict()


def save_and_load_empty(how):
    state, found = row_parallel(3.0), row_parallel(0.0)
    if torch.distributed.get_rank() == 2:
        assert tuple(state["0.weight"].to_local().shape) == (0, 0)
    if how == "dcp":
        dcp.save(state, storage_writer=TieredWriter("tiered://empty", 1))
        dcp.load(found, storage_reader=TieredReader("tiered://empty"))
    else:
        with Checkpointer("tiered://empty", on_sigterm="ignore") as ckpt:
            for step in range(3):
                assert ckpt.save(state, step).ok
            assert ckpt.restore(found) == 2
    assert_same_bits(state, found)
    return state_checksum(found).all_reduced()


@pytest.mark.parametrize("how", ["dcp", "checkpointer"])
def test_empty_shards_of_every_kind_reshard(agent_dir, ranks, how):
    expected = state_checksum({"0.weight": torch.full((5, 4), 3.0)}).all_reduced()
    for found in ranks.run(3, save_and_load_empty, how):
        found.assert_equal(expected)
