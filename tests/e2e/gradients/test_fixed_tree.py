"""The fixed tree gives the same bits on any world: losses, norms, parameters and optimizer."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from elastic.gradients import reduction
from tests.support.resizable_training import StepResult, Worlds, train
from tests.support.zygote import Zygote

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

STEPS = 4


class Extent(NamedTuple):
    sizes: tuple[int, ...]
    grids: tuple[int, ...]
    resized: tuple[int, ...]


FEW = Extent((1, 3, 4), (4,), (4, 3, 1, 3))
ALL = Extent((1, 2, 3, 4, 6, 8), (4, 6), (8, 3, 1, 6))


class Found(NamedTuple):
    by_size: dict[int, list[StepResult]]
    resized: list[StepResult]


@pytest.fixture(
    scope="module",
    params=[pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.nightly)],  # 8 ranks on 2 cores
)
def extent(request: pytest.FixtureRequest) -> Extent:
    return request.param


@pytest.fixture(scope="module")
def found(zygote: Zygote, extent: Extent) -> dict[str, Found]:
    by_rank = zygote.run_world(max(extent.sizes), _everything, extent)
    assert all(one == by_rank[0] for one in by_rank)  # all ranks have the same result
    return by_rank[0]


def _everything(_: object, extent: Extent) -> dict[str, Found]:
    import torch.distributed as dist

    worlds = Worlds(extent.sizes, extent.grids)
    runs = {
        "plain": ("plain", extent.sizes, "even", {"tree": True}),
        "ddp": ("ddp", extent.sizes, "even", {"tree": True}),
        "fsdp": ("fsdp", extent.sizes, "even", {"tree": True}),
        "fsdp, dealt": ("fsdp", (3,), "round_robin", {"tree": True}),
        "hsdp": ("hsdp", extent.grids, "even", {"tree": True}),
        "all-reduce": ("plain", extent.sizes, "even", {"tree": False}),
    }
    mine = {}
    for name, (kind, sizes, deal, how) in runs.items():
        by_size = {size: train(kind, [size] * STEPS, worlds, deal=deal, **how) for size in sizes}
        resized = train(kind, extent.resized, worlds, deal=deal, **how) if sizes == extent.sizes else []
        mine[name] = Found(by_size, resized)
    reduction.EXCHANGE_WINDOW_BYTES, reduction.MIN_PIECE_BYTES = 300, 4  # this process is forked for this test alone
    mine["plain, small windows"] = Found({3: train("plain", [3] * STEPS, worlds, tree=True)}, [])
    handed = [mine]
    dist.broadcast_object_list(handed, src=0)  # small worlds have no shares for the last ranks
    for name, theirs in handed[0].items():
        for size, seen in theirs.by_size.items():
            if dist.get_rank() < size:
                assert mine[name].by_size[size] == seen, (
                    f"rank {dist.get_rank()} of {size} differs from the others: {name}"
                )
    return handed[0]


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
def test_every_step_is_the_same_at_any_number_of_ranks(found: dict[str, Found], extent: Extent, kind: str) -> None:
    by_size = found[kind].by_size
    assert set(by_size) == set(extent.sizes)
    for step in range(STEPS):
        assert len({seen[step] for seen in by_size.values()}) == 1, {size: seen[step] for size, seen in by_size.items()}
    assert len({seen.parameters for seen in by_size[1]}) == STEPS  # the model trains


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
def test_fixed_tree_result_is_unchanged_by_a_resize(found: dict[str, Found], kind: str) -> None:
    assert found[kind].resized == found[kind].by_size[1]


def test_replicated_shards_match_plain_shards(found: dict[str, Found]) -> None:
    for seen in found["hsdp"].by_size.values():
        assert seen == found["fsdp"].by_size[1]


def test_result_is_independent_of_wrapper_and_microbatch_assignment(found: dict[str, Found]) -> None:
    plain, ddp, fsdp = (found[kind].by_size[3] for kind in ("plain", "ddp", "fsdp"))
    assert ddp == plain
    assert found["plain, small windows"].by_size[3] == plain
    assert found["fsdp, dealt"].by_size[3] == fsdp
    assert [(seen.loss, seen.norm) for seen in fsdp] == [(seen.loss, seen.norm) for seen in plain]


def test_plain_all_reduce_depends_on_the_number_of_ranks(found: dict[str, Found]) -> None:
    """Prove that the tests above can fail: summing in rank order gives other bits."""
    by_size = found["all-reduce"].by_size
    assert len({seen[-1].loss for seen in by_size.values()}) > 1
    assert len({seen[-1].parameters for seen in by_size.values()}) > 1
    assert found["all-reduce"].resized[-1].parameters != by_size[1][-1].parameters
    assert by_size[1][0].loss == found["plain"].by_size[1][0].loss  # equal before the first sum
