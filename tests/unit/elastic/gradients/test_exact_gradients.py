"""Gradients in one process: sum dtypes, missing and non-finite values, misuse.

Several processes: ``tests/e2e/gradients``.
"""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from elastic.errors import JobFailedError, NonFiniteLossError, PolicyError
from elastic.gradients import ExactGradients, MicrobatchShare, StepTotal, exact_gradients
from elastic.gradients.reduction import _windows
from elastic.testing import InMemoryCoordinator
from elastic.workers.train_loop import RecoveryPolicy, RunOutcome
from elastic.workers.train_loop import run as recover
from elastic.workers.world_handle import World


class Weights(nn.Module):
    """A model whose loss is its weights times the input: the gradient is the input."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(3, dtype=dtype))
        self.never = nn.Parameter(torch.ones(2, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)

    def forward(self, factor: float) -> torch.Tensor:
        return (self.used * factor).sum()


def run(
    model: Weights, factors: list[float], *, weight: float = 2, clip: float | None = None, **how: object
) -> StepTotal:
    sums = ExactGradients(model, **how)
    for microbatch in sums.step(MicrobatchShare.even(len(factors), 1, 0)):
        microbatch.backward(model(factors[microbatch.id]), weight=weight)
    return sums.finish(clip=clip)


@pytest.mark.parametrize("tree", [False, True])
def test_gradients_are_divided_once_by_the_total_weight(tree: bool) -> None:
    model = Weights()
    model.used.grad = torch.full((3,), 99.0)  # of an earlier step
    total = run(model, [1.0, 2.0, 4.0], tree=tree)
    assert torch.equal(model.used.grad, torch.full((3,), 7 / 6))
    assert total == StepTotal(loss=3.5, weight=6, norm=None)
    assert model.never.grad is None  # so that an optimizer skips it


def test_weights_may_be_tensors() -> None:
    assert run(Weights(), [1.0], weight=torch.tensor(3)) == StepTotal(1.0, 3.0, None)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_fp32_by_default(tree: bool, dtype: torch.dtype) -> None:
    factors = [512.0] + [0.125] * 63
    model = Weights(dtype)
    run(model, factors, weight=1, tree=tree)
    expected = torch.tensor(sum(factors) / 64).to(dtype)
    assert model.used.grad is not None
    assert model.used.grad.dtype is dtype
    assert torch.equal(model.used.grad, expected.expand(3))
    if not tree:  # which loses less
        run(model, factors, weight=1, dtype=None)
        assert not torch.equal(model.used.grad, expected.expand(3))


def test_clipping_follows_the_sum_and_returns_the_norm() -> None:
    for tree in (False, True):
        model = Weights()
        total = run(model, [3.0, -1.0], clip=0.5, weight=1, tree=tree)
        assert total.norm == pytest.approx(math.sqrt(3))  # clipped separately they would cancel
        assert model.used.grad is not None
        assert model.used.grad.norm().item() == pytest.approx(0.5, rel=1e-5)
        small = run(model, [0.1, 0.0], clip=0.5, weight=1, tree=tree)
        assert small.norm == pytest.approx(0.05 * math.sqrt(3))
        assert torch.equal(model.used.grad, torch.full((3,), 0.1) / 2)


@pytest.mark.parametrize("tree", [False, True])
def test_nonfinite_sum_is_reported_once(tree: bool) -> None:
    told: list[StepTotal] = []
    run(Weights(), [1.0, 2.0], tree=tree, on_nonfinite=told.append)
    assert told == []
    total = run(Weights(), [1.0, math.inf], tree=tree, on_nonfinite=told.append)
    assert told == [total]
    assert not total.is_finite
    with pytest.raises(FloatingPointError):
        run(Weights(), [math.nan], tree=tree, on_nonfinite=_stop)


def test_nonfinite_loss_or_norm_raises_by_default() -> None:
    with pytest.raises(NonFiniteLossError, match=r"the loss \(of microbatch 1, which rank 0 computed\) is not .*nan"):
        run(Weights(), [1.0, math.nan, 2.0])
    with pytest.raises(NonFiniteLossError, match="the norm of the gradients is not finite"):
        run(Weights(), [1.0, 1e30], clip=1.0)
    overflowing = run(Weights(), [1.0, 1e30])  # as a GradScaler's: it looks itself
    assert overflowing.is_finite
    assert math.isnan(run(Weights(), [math.nan], on_nonfinite=None).loss)


@pytest.mark.parametrize("how", ["fault", "skip"])
def test_nonfinite_loss_in_a_world_follows_the_policy(how: Literal["fault", "skip"]) -> None:
    plane, seen = InMemoryCoordinator(1), []

    def train(world: World) -> None:
        losses = world._losses
        losses._agreed = frozenset(step for step, count in losses.seen.items() if how == "skip" and count > 1)
        model = Weights()
        for step in world.steps(2, 5):
            factors = [1.0, math.nan] if step == 3 else [1.0]
            run(model, factors)
            seen.append(step if model.used.grad is not None else -step)

    policy = RecoveryPolicy(backend="none", nonfinite=how)
    if how == "fault":
        with pytest.raises(JobFailedError, match=r"the loss \(of microbatch 1.*\) of step 3 is not finite.*2 attempts"):
            recover(train, plane=plane.planes[0], policy=policy)
        assert seen == [2, 2]
    else:
        assert recover(train, plane=plane.planes[0], policy=policy).outcome is RunOutcome.FINISHED
        assert seen == [2, 2, 2, -3, 4]  # an optimizer skips parameters without a gradient


def _stop(total: StepTotal) -> None:
    raise FloatingPointError(total)


def test_misuse_is_named() -> None:
    model = Weights()
    sums = ExactGradients(model)
    with pytest.raises(PolicyError, match="before all microbatches"):
        sums.finish()
    with pytest.raises(PolicyError, match="shared by 2 ranks, the group has 1"):
        next(sums.step(MicrobatchShare.even(2, 2, 0)))
    steps = sums.step(MicrobatchShare.even(2, 1, 0))
    first = next(steps)
    first.backward(model(1.0), weight=1)
    with pytest.raises(PolicyError, match="twice for microbatch 0"):
        first.backward(model(1.0), weight=1)
    next(steps)
    with pytest.raises(PolicyError, match="microbatch 1 was left without"):
        next(steps)
    with pytest.raises(PolicyError, match="before all microbatches"):
        sums.finish()
    with pytest.raises(PolicyError, match="all weights are 0"):
        run(model, [1.0], weight=0)
    with pytest.raises(PolicyError, match="no parameter that requires"):
        ExactGradients(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        (FullyShardedDataParallel, "'0' is wrapped by FSDP1"),
        (DistributedDataParallel, "only module '0' is wrapped by DDP"),
    ],
)
def test_wrappers_that_reduce_behind_its_back_are_refused(wrapper: type[nn.Module], words: str) -> None:
    inside = wrapper.__new__(wrapper)  # a real one needs a process group
    nn.Module.__init__(inside)
    with pytest.raises(PolicyError, match=words):
        ExactGradients(nn.Sequential(inside, nn.Linear(2, 2)))


def test_a_step_that_was_left_is_forgotten() -> None:
    model = Weights()
    for tree in (False, True):
        sums = ExactGradients(model, tree=tree)
        for microbatch in sums.step(MicrobatchShare.even(4, 1, 0)):
            microbatch.backward(model(100.0), weight=1)
            break
        for microbatch in sums.step(MicrobatchShare.even(1, 1, 0)):
            microbatch.backward(model(3.0), weight=1)
        assert sums.finish().loss == 9.0
        assert torch.equal(model.used.grad, torch.full((3,), 3.0))


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 7))
def test_windows_are_full_and_have_everything_once(sizes: list[int], most: int) -> None:
    windows = list(_windows(sizes, most))
    lengths = [sum(end - begin for _, begin, end in window) for window in windows]
    assert all(length == most for length in lengths[:-1])
    assert all(0 < length <= most for length in lengths)
    found = [(index, place) for window in windows for index, begin, end in window for place in range(begin, end)]
    assert found == [(index, place) for index, size in enumerate(sizes) for place in range(size)]


def test_the_fixed_norm_is_the_norm_and_does_not_see_where_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((), (1,), (37,), (23, 129), (5, 3, 7), (0, 4), (2,))]
    for one in parameters[:-1]:
        one.grad = torch.randn(one.shape) * 10 ** torch.randn(()).item()
    exact = math.sqrt(sum(one.grad.double().square().sum().item() for one in parameters[:-1]))
    found = exact_gradients.deterministic_gradient_norm(parameters)
    assert found == pytest.approx(exact, rel=1e-6)
    assert exact_gradients.gradient_norm(parameters) == pytest.approx(exact, rel=1e-6)
    matrix = parameters[3].grad
    whole = exact_gradients._row_sums(matrix)
    for rows in (1, 2, 10, 23):
        assert torch.equal(torch.cat([exact_gradients._row_sums(part) for part in matrix.split(rows)]), whole)
    monkeypatch.setattr(exact_gradients, "NORM_BLOCK_ELEMENTS", 300)
    assert exact_gradients.deterministic_gradient_norm(parameters) == found
    assert (
        exact_gradients.deterministic_gradient_norm([parameters[-1]])
        == exact_gradients.gradient_norm([parameters[-1]])
        == 0.0
    )
