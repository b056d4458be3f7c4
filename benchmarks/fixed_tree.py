"""P12: time and peak memory of a step with fixed-order sums, compared with an all-reduce."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.parameters import Scene
from benchmarks.proc import watched
from benchmarks.rounds import Contender, measure, together, use_threads
from elastic.gradients import ExactGradients, MicrobatchShare

OURS = "fixed tree"
EXACT = "exact weights, an all-reduce"
DDP = "DDP, averaged"
ALONE = "no reduction"
FSDP_OURS = "FSDP2, fixed tree"
FSDP_DEALT = "FSDP2, fixed tree, dealt like cards"
FSDP_EXACT = "FSDP2, exact weights, each turn"
MICROBATCHES = 12
"""Not a power of two and not aligned, so that a rank has two partial sums."""
_ROWS, _LAYERS = 32, 4


def _model(size_bytes: int) -> nn.Sequential:
    torch.manual_seed(3)
    width = max(32, int((size_bytes / 4 / _LAYERS) ** 0.5))
    return nn.Sequential(*(part for _ in range(_LAYERS) for part in (nn.Linear(width, width), nn.Tanh())))


def _loss(model: nn.Module, microbatch: int) -> torch.Tensor:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    chance = torch.Generator().manual_seed(microbatch)
    return model(torch.randn(_ROWS, inner[0].in_features, generator=chance)).square().sum()


class Step:
    """All microbatches of a step with one way to sum gradients."""

    def __init__(self, model: nn.Module, share: MicrobatchShare, group: dist.ProcessGroup, **how: Any) -> None:
        self.model = model
        self._share = share
        self._sums = ExactGradients(model, group=group, **how)

    def __call__(self, _: int) -> None:
        for microbatch in self._sums.step(self._share):
            microbatch.backward(_loss(self.model, microbatch.id), weight=_ROWS)
        self._sums.finish(clip=1.0)

    def found(self) -> dict[str, torch.Tensor]:
        named = {name: one.grad for name, one in self.model.named_parameters()}
        return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in named.items()}


def _averaged(model: DistributedDataParallel, share: MicrobatchShare) -> Callable[[int], None]:
    """Return a step as with DDP: one all-reduce, during the last backward."""

    def step(_: int) -> None:
        for id_ in share.own_ids:
            model.require_backward_grad_sync = id_ == share.own_ids[-1]
            (_loss(model, id_) / (_ROWS * len(share.own_ids))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return step


def _unreduced(model: nn.Module, share: MicrobatchShare) -> Callable[[int], None]:
    def step(_: int) -> None:
        for id_ in share.own_ids:
            _loss(model, id_).backward()

    return step


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    use_threads(scene.threads)
    world, size = dist.group.WORLD, scene.size_bytes
    own = [dist.new_group([one]) for one in range(scene.ranks)][rank]
    share = MicrobatchShare.even(MICROBATCHES, scene.ranks, rank)
    single = Step(_model(size), MicrobatchShare.even(MICROBATCHES, 1, 0), own, tree=True)
    single(0)
    expected = single.found()
    mesh = init_device_mesh("cpu", (scene.ranks,))

    def sharded() -> nn.Module:
        model = _model(size)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    tree = Step(_model(size), share, world, tree=True)
    exact, fsdp_exact = Step(_model(size), share, world), Step(sharded(), share, world, reduce_every_microbatch=True)
    fsdp_tree = Step(sharded(), share, world, tree=True)
    dealt = Step(sharded(), MicrobatchShare.round_robin(MICROBATCHES, scene.ranks, rank), world, tree=True)
    ddp, alone = DistributedDataParallel(_model(size)), _model(size)
    contenders = [
        Contender(OURS, "ours", tree, tree.found, note=f"{MICROBATCHES} microbatches; compared with one rank's"),
        Contender(EXACT, "ours", exact, None),
        Contender(DDP, "opponent", _averaged(ddp, share), None, before=ddp.zero_grad),
        Contender(ALONE, "limit", _unreduced(alone, share), None, before=alone.zero_grad, note="forward and backward"),
        Contender(FSDP_OURS, "ours", fsdp_tree, fsdp_tree.found, note="compared with one rank's"),
        Contender(FSDP_DEALT, "ours", dealt, dealt.found, note="compared with one rank's"),
        Contender(FSDP_EXACT, "ours", fsdp_exact, None),
    ]
    rows = measure(
        contenders, scene.rounds, expected=expected, prepare=lambda _: None, every_round=False, spoil=scene.spoil
    )
    del single, expected
    models = [tree.model, exact.model, ddp, alone, fsdp_tree.model, dealt.model, fsdp_exact.model]
    return rows + [_peak(rank, one, model) for one, model in zip(contenders, models, strict=True)]


def _peak(rank: int, contender: Contender, model: nn.Module) -> dict[str, Any]:
    """Return rank 0's peak memory growth in one step, over its memory without gradients."""
    grown: list[int] = []
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        together()
        if rank == 0:
            with watched([os.getpid()]) as peak:
                contender.run(0)
            grown.append(peak.grown)
        else:
            contender.run(0)
        together()
    return {
        "name": f"{contender.name}: memory", "kind": contender.kind, "unit": "B", "first": None, "samples": grown[1:],
        "equal": None, "compared": False, "note": "growth at the worst moment of a step, gradients and activations too",
    }  # fmt: skip
