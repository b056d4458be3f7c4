"""One rank of the demo, and the only file of the demo that imports torch.

``tieredckpt demo`` runs it. It writes events as JSON lines to the file of ``--events``.
"""

from __future__ import annotations

import argparse
import codecs
import json
import logging
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from peerstore import failpoints
from tieredckpt.checkpointer.checkpointer import Checkpointer
from tieredckpt.checkpointer.null_checkpointer import NullCheckpointer

DEMO_JOB = "demo"
CONTEXT, MODEL_WIDTH, LAYERS, HEADS, DEMO_BATCH_SIZE = 64, 192, 4, 6, 8


def demo_corpus() -> torch.Tensor:
    """Return the text of the module ``this``, which every Python has."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return torch.tensor([min(ord(letter), 127) for letter in codecs.decode(this.s, "rot13")])


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(MODEL_WIDTH), nn.LayerNorm(MODEL_WIDTH)
        self.mix = nn.MultiheadAttention(MODEL_WIDTH, HEADS, batch_first=True)
        self.think = nn.Sequential(
            nn.Linear(MODEL_WIDTH, 4 * MODEL_WIDTH), nn.GELU(), nn.Linear(4 * MODEL_WIDTH, MODEL_WIDTH)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        x = x + self.mix(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.think(self.between(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(128, MODEL_WIDTH), nn.Embedding(CONTEXT, MODEL_WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(LAYERS))
        self.out = nn.Linear(MODEL_WIDTH, 128)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        size, device = letters.shape[1], letters.device
        x = self.letters(letters) + self.places(torch.arange(size, device=device))
        mask = torch.full((size, size), float("-inf"), device=device).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.out(x)


def build_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def rank_batch(text: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's samples of a step. They depend only on the step and the rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    starts = torch.randint(0, len(text) - CONTEXT - 1, (DEMO_BATCH_SIZE,), generator=generator)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def model_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments}


def train_rank(args: argparse.Namespace, say: TextIO) -> None:
    text = demo_corpus()
    model, optimizer = build_model()
    state = model_state(model, optimizer)
    with make_checkpointer(args) as ckpt:
        began = time.perf_counter()
        step = ckpt.restore(state)
        report = ckpt.last_restore
        if step >= 0:
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        write_event(
            say,
            event="restored",
            step=step,
            seconds=time.perf_counter() - began,
            tiers=dict(report.bytes_by_tier) if report else {},
        )
        for current in range(step + 1, args.steps):
            loss = one_step(model, optimizer, text, current)
            began = time.perf_counter()
            saved = ckpt.save(model_state(model, optimizer), current)
            blocked = time.perf_counter() - began
            write_event(say, event="step", step=current, loss=loss.hex(), blocked=blocked, saved=saved.state.value)
        if args.durable:
            saved.wait(copies=2, timeout_s=60)
        began = time.perf_counter()
        ckpt.wait("durable", timeout_s=60)
        write_event(say, event="drained", seconds=time.perf_counter() - began)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, text: torch.Tensor, step: int) -> float:
    letters, following = rank_batch(text, step)
    loss = nn.functional.cross_entropy(model(letters).flatten(0, 1), following.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def make_checkpointer(args: argparse.Namespace) -> Checkpointer | NullCheckpointer:
    if not args.durable:
        return NullCheckpointer()
    return Checkpointer(
        f"tiered://{DEMO_JOB}", durable=args.durable, every=1, durable_every=args.durable_every, on_busy="wait"
    )


def write_event(say: TextIO, **event: Any) -> None:
    say.write(json.dumps(event) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--durable", default="")
    parser.add_argument("--durable-every", type=int, default=5)
    parser.add_argument("--killed-in-save", type=int, default=0)
    args = parser.parse_args()
    failpoints.arm_failpoints({"stage.half": args.killed_in_save})
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        with args.events.open("a", buffering=1) as say:
            train_rank(args, say)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
