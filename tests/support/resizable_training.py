"""A tiny language model whose training can change its number of ranks between any two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from elastic.gradients import ExactGradients, MicrobatchShare
from elastic.gradients.reduction import all_gather_tensor, piece_bounds

MICROBATCHES = 10
WORDS = 19
IGNORED = -100


class StepResult(NamedTuple):
    """Exact result of one step, as digests."""

    loss: str
    norm: str
    parameters: str
    optimizer: str


class TrainingState(NamedTuple):
    """The full, unsharded training state."""

    parameters: list[torch.Tensor]
    optimizer: list[dict[str, torch.Tensor]]


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.words = nn.Embedding(WORDS, 12)
        self.hidden = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Dropout(0.2), nn.Linear(20, 12))
        self.norm = nn.LayerNorm(12)
        self.out = nn.Linear(12, WORDS)
        self.scale = nn.Parameter(torch.ones(1))
        self.never = nn.Parameter(torch.ones(3))
        self.to(dtype)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.hidden(self.words(words)))) * self.scale


def batch(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a microbatch in which some targets are ignored, a different number in each."""
    chance = torch.Generator().manual_seed(step * 1000 + microbatch)
    words = torch.randint(WORDS, (2, 7), generator=chance)
    targets = torch.randint(WORDS, (2, 7), generator=chance)
    kept = 1 + (step + microbatch * 5) % 13
    targets.view(-1)[torch.randperm(14, generator=chance)[kept:]] = IGNORED
    return words, targets


def loss_sum(model: nn.Module, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss and its number of tokens."""
    words, targets = batch(step, microbatch)
    torch.manual_seed(step * 1000 + microbatch)  # dropout
    logits = model(words.view(-1))
    return F.cross_entropy(logits, targets.view(-1), reduction="sum", ignore_index=IGNORED), (targets >= 0).sum()


class Worlds:
    """Process groups of the first ranks, created once on all ranks."""

    def __init__(self, sizes: Sequence[int], grids: Sequence[int] = ()) -> None:
        self.groups = {size: dist.new_group(range(size)) for size in sizes}
        self._grids = {}
        for size in grids:
            ranks = torch.arange(size).view(2, size // 2)
            lines = [dist.new_group(line.tolist()) for line in (*ranks.T, *ranks)]
            self._grids[size] = (ranks, [one for one in lines if one != dist.GroupMember.NON_GROUP_MEMBER])

    def mesh(self, kind: str, size: int) -> DeviceMesh:
        """Return a 1D mesh, or a 2D mesh with two replicas."""
        if kind == "fsdp":
            return DeviceMesh.from_group(self.groups[size], "cpu")
        ranks, mine = self._grids[size]
        return DeviceMesh.from_group(mine, "cpu", mesh=ranks, mesh_dim_names=("replicas", "shards"))


def wrap_model(model: nn.Module, kind: str, worlds: Worlds, size: int) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=worlds.groups[size], find_unused_parameters=True)
    if kind in ("fsdp", "hsdp"):
        mesh = worlds.mesh(kind, size)
        for module in (model.hidden, model.out):
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


class Training:
    """One attempt: a world and the model wrapped for it, with the state of the previous one."""

    def __init__(self, kind: str, worlds: Worlds, size: int, state: TrainingState | None, **how: Any) -> None:
        model = Model()
        if state is not None:
            with torch.no_grad():
                for one, value in zip(model.parameters(), state.parameters, strict=True):
                    one.copy_(value)
        self.model = wrap_model(model, kind, worlds, size)
        self.sums = ExactGradients(self.model, group=worlds.groups[size], **how)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1)
        if state is not None:
            self._load(state.optimizer)

    def _load(self, states: list[dict[str, torch.Tensor]]) -> None:
        for one, values in zip(self.model.parameters(), states, strict=True):
            if values:
                self.optimizer.state[one] = {name: _like_parameter(one, value) for name, value in values.items()}

    def step(self, step: int, share: MicrobatchShare) -> StepResult:
        for microbatch in self.sums.step(share):
            loss, tokens = loss_sum(self.model, step, microbatch.id)
            microbatch.backward(loss, weight=tokens)
        total = self.sums.finish(clip=0.5)
        self.optimizer.step()
        state = self.state()
        assert total.norm is not None
        return StepResult(total.loss.hex(), total.norm.hex(), digest(state.parameters), digest(state.optimizer))

    def state(self) -> TrainingState:
        parameters = list(self.model.parameters())
        kept = [self.optimizer.state.get(one, {}) for one in parameters]
        tensors = [one.detach() for one in parameters] + [value for one in kept for value in one.values()]
        found = iter(full_tensors(tensors))
        return TrainingState([next(found) for _ in parameters], [{name: next(found) for name in one} for one in kept])


def _like_parameter(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    data = parameter.data
    if not isinstance(data, DTensor) or value.shape != data.shape:
        return value.clone()
    return distribute_tensor(value, data.device_mesh, data.placements, src_data_rank=None)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def full_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gather many full tensors with one collective."""
    cut = [one for one in tensors if isinstance(one, DTensor)]
    if not cut:
        return [one.clone() for one in tensors]
    group = cut[0].device_mesh.get_group(cut[0].device_mesh.ndim - 1)
    heights = [[end - begin for begin, end in _rows(one, group.size())] for one in cut]
    mine = torch.cat([one.to_local().reshape(-1) for one in cut])
    widths = [one.shape[1:].numel() for one in cut]
    piece = max(sum(h[rank] * w for h, w in zip(heights, widths, strict=True)) for rank in range(group.size()))
    gathered = mine.new_zeros(piece * group.size())
    all_gather_tensor(gathered, F.pad(mine, (0, piece - len(mine))), group)
    parts = []
    for rank, there in enumerate(gathered.view(group.size(), piece)):
        sizes = [h[rank] * w for h, w in zip(heights, widths, strict=True)]
        parts.append(there[: sum(sizes)].split(sizes))
    found = iter([torch.cat(one).view(like.shape) for one, like in zip(zip(*parts, strict=True), cut, strict=True)])
    return [next(found) if isinstance(one, DTensor) else one.clone() for one in tensors]


def _rows(tensor: DTensor, ranks: int) -> list[tuple[int, int]]:
    return [piece_bounds(len(tensor), ranks, rank) for rank in range(ranks)]


def digest(tensors: Sequence[Any]) -> str:
    found = xxhash.xxh3_128()
    for one in tensors:
        for name, tensor in sorted(one.items()) if isinstance(one, dict) else [("", one)]:
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def train(kind: str, sizes: Sequence[int], worlds: Worlds, *, deal: str = "even", **how: Any) -> list[StepResult]:
    """Train one step at each size. All ranks receive the newest state at a resize; unused ranks wait."""
    rank, seen, state = dist.get_rank(), [], None
    training: Training | None = None
    for step, size in enumerate(sizes):
        if step == 0 or size != sizes[step - 1]:
            training = Training(kind, worlds, size, state, **how) if rank < size else None
        if training is not None:
            seen.append(training.step(step, getattr(MicrobatchShare, deal)(MICROBATCHES, size, rank)))
            state = training.state()
        if step + 1 < len(sizes) and sizes[step + 1] != size:
            handed = [state, seen]
            dist.broadcast_object_list(handed, src=0)
            state, seen = handed
    return seen
