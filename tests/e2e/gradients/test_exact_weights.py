"""The gradients of uneven ranks equal those of one process; averages of averages do not."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.errors import PolicyError
from elastic.gradients import ExactGradients, MicrobatchShare
from tests.support.resizable_training import MICROBATCHES, Model, Worlds, full_tensor, loss_sum, wrap_model
from tests.support.zygote import Zygote

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

RANKS = 4
QUOTAS = (4, 3, 0, 3)
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "ddp": ("ddp", {}),
    "fsdp, once a step": ("fsdp", {}),
    "fsdp, each turn": ("fsdp", {"reduce_every_microbatch": True}),
    "hsdp, once a step": ("hsdp", {}),
    "hsdp, each turn": ("hsdp", {"reduce_every_microbatch": True}),
    "plain, tree": ("plain", {"tree": True}),
    "ddp, tree": ("ddp", {"tree": True}),
    "fsdp, tree": ("fsdp", {"tree": True}),
    "hsdp, tree": ("hsdp", {"tree": True}),
}


def everything(_: object) -> dict[str, float]:
    """Return each method's distance from the gradients of one process, relative to the largest."""
    gc.freeze()  # leave the parent's objects to the parent
    worlds = Worlds((RANKS,), (RANKS,))
    share = MicrobatchShare.contiguous(QUOTAS, dist.get_rank())
    expected, expected_loss, norm = reference(torch.float64)
    single, _, _ = reference(torch.float32)
    found = {"one process, fp32": distance(single, expected), "mean of means": distance(mean_of_means(share), expected)}
    for name in WAYS:
        for dtype in (torch.float64, torch.float32):
            gone = one_way(found, name, dtype, worlds, share, expected, expected_loss, norm)
            gc.collect()
            found[f"{name}, {dtype}, left"] = float(gone() is not None)
    found["refused"] = refusals(worlds, share)
    return found


def one_way(
    found: dict[str, float],
    name: str,
    dtype: torch.dtype,
    worlds: Worlds,
    share: MicrobatchShare,
    expected: list[torch.Tensor | None],
    expected_loss: float,
    norm: float,
) -> weakref.ref[torch.nn.Module]:
    """Return a weak reference to the model, which must be collected afterwards."""
    kind, how = WAYS[name]
    model = wrap_model(Model(dtype), kind, worlds, RANKS)
    sums = ExactGradients(model, group=worlds.groups[RANKS], **how)
    for again in range(2 if dtype is torch.float64 else 1):  # the second step starts with the state of the first
        for microbatch in sums.step(share):
            loss, tokens = loss_sum(model, again, microbatch.id)
            if microbatch.is_empty and not share.own_ids:
                loss = loss * math.nan  # the loss of a rank without microbatches must not count
            microbatch.backward(loss, weight=tokens)
        total = sums.finish(clip=None if again else 1e9)
        if not again:
            found[f"{name}, {dtype}"] = distance([one.grad for one in model.parameters()], expected)
            found[f"{name}, {dtype}, loss"] = abs(total.loss / expected_loss - 1)
            assert total.norm is not None
            found[f"{name}, {dtype}, norm"] = abs(total.norm / norm - 1)
    assert math.isfinite(total.loss)
    return weakref.ref(model)


def reference(dtype: torch.dtype) -> tuple[list[torch.Tensor | None], float, float]:
    model = Model(dtype)
    losses = [loss_sum(model, 0, id_) for id_ in range(MICROBATCHES)]
    count = sum(int(tokens) for _, tokens in losses)
    (sum(loss for loss, _ in losses) / count).backward()
    gradients = [one.grad for one in model.parameters()]
    norm = math.sqrt(sum(one.double().square().sum().item() for one in gradients if one is not None))
    return gradients, sum(loss.item() for loss, _ in losses) / count, norm


def mean_of_means(share: MicrobatchShare) -> list[torch.Tensor | None]:
    """Return the gradients of a DDP loop that averages the averages of its microbatches."""
    model = Model(torch.float64)
    for id_ in share.own_ids:
        loss, tokens = loss_sum(model, 0, id_)
        (loss / tokens / len(share.own_ids)).backward()
    for one in model.parameters():
        if one.grad is None:
            one.grad = torch.zeros_like(one)
        dist.all_reduce(one.grad)
        one.grad /= RANKS
    return [one.grad for one in model.parameters()]


def distance(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> float:
    """Return the relative distance; zeros match missing gradients, because FSDP2 reduces them."""
    most = max(one.abs().max().item() for one in expected if one is not None)
    differences = [
        (0.0 if mine is None else full_tensor(mine).abs().max().item())
        if theirs is None
        else (full_tensor(mine).double() - theirs).abs().max().item()
        for mine, theirs in zip(found, expected, strict=True)
    ]
    return torch.tensor(differences, dtype=torch.float64).max().item() / most  # torch's ``max`` propagates NaN


def refusals(worlds: Worlds, share: MicrobatchShare) -> float:
    """Check that every rank raises for impossible requests."""
    group = worlds.groups[RANKS]
    plain = ExactGradients(Model(), group=group)
    other = MicrobatchShare(share.by_rank, (share.rank + 1) % RANKS)
    with pytest.raises(PolicyError, match=f"this is rank {share.rank} of the group, not"):
        next(plain.step(other))
    wrong = copy.copy(share) if share.rank else MicrobatchShare.contiguous((3, 4, 0, 3), 0)  # rank 0 has another plan
    for microbatch in plain.step(wrong):
        microbatch.backward(loss_sum(plain._model, 0, microbatch.id)[0], weight=1)
    with pytest.raises(PolicyError, match=r"microbatches \[3\] not exactly once"):
        plain.finish()
    model = wrap_model(Model(torch.bfloat16), "fsdp", worlds, RANKS)
    sums = ExactGradients(model, tree=True, group=group)
    microbatch = next(sums.step(share))
    with pytest.raises(PolicyError, match=r"reduce_dtype=torch\.float32"):
        microbatch.backward(loss_sum(model, 0, microbatch.id)[0], weight=1)
    twice = wrap_model(Twice(), "fsdp", worlds, RANKS)
    sums = ExactGradients(twice, tree=True, group=group)
    microbatch = next(sums.step(share))
    with pytest.raises(PolicyError, match="run twice in one forward"):
        microbatch.backward(loss_sum(twice, 0, microbatch.id)[0], weight=1)
    return 1.0


class Twice(Model):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        inside = self.hidden(self.hidden(self.words(words)))
        return self.out(self.norm(inside))


@pytest.fixture(scope="module")
def found(zygote: Zygote) -> dict[str, float]:
    return zygote.run_world(RANKS, everything)[0]


@pytest.mark.parametrize("way", WAYS)
def test_double_precision_matches_a_single_process(found: dict[str, float], way: str) -> None:
    assert found[f"{way}, torch.float64"] < 1e-13
    assert found[f"{way}, torch.float64, loss"] < 1e-13
    assert found[f"{way}, torch.float64, norm"] < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_single_precision_is_as_close_as_a_single_process(found: dict[str, float], way: str) -> None:
    near = found["one process, fp32"]
    assert 0 < near < 1e-6
    assert found[f"{way}, torch.float32"] < 4 * near
    assert found[f"{way}, torch.float32, loss"] < 1e-6
    assert found[f"{way}, torch.float32, norm"] < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_unneeded_memory_is_freed(found: dict[str, float], way: str) -> None:
    """A process is in many worlds but has only one model."""
    assert found[f"{way}, torch.float64, left"] == 0.0
    assert found[f"{way}, torch.float32, left"] == 0.0


def test_mean_of_means_differs_from_the_exact_mean(found: dict[str, float]) -> None:
    assert found["mean of means"] > 1e-2


def test_impossible_options_are_refused(found: dict[str, float]) -> None:
    assert found["refused"] == 1.0
