"""The training loop of every rank, exact at any number of ranks, and its padded batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from elastic.batch_cache import BatchCache, remove_job_batches
from elastic.batch_scaling.batch_plan import RankPlan
from elastic.batch_scaling.lr_rules import Rewarmup
from elastic.batch_scaling.lr_scaler import LRScaler
from elastic.gradients.exact_gradients import ExactGradients, StepTotal
from elastic.samples import ElasticDataLoader, seeded
from elastic.samples.data_loader import DataStep
from elastic.workers.world_handle import World
from integration.finetune import model as model_module
from integration.finetune.finetune_job import (
    FinetuneJob,
    SizedJob,
    StepLogWriter,
    learning_rate_at,
    size_job,
    total_steps,
)
from integration.finetune.inputs import JobInputs, JsonLinesCorpus, SampleEncoder
from integration.finetune.model import export_model
from tieredckpt import Checkpointer

_STREAM = "finetune"


def train_finetune(world: World, job: FinetuneJob, inputs: JobInputs) -> int:
    """Train until all steps are done, write the model, and return the number of steps."""
    size = size_job(job, nodes=world.node_count, world_size=world.size)
    with open_batch_cache(job, inputs) as cache:
        samples = TokenizedDataset(inputs.corpus, inputs.encoder, cache)
        with _loader(job, samples, size, world) as loader:
            total = _run_steps(world, job, inputs, size, loader)
    dist.barrier()  # all ranks of this node have finished reading prepared batches
    if world.local_rank == 0:
        remove_job_batches(job.name)
    return total


def open_batch_cache(job: FinetuneJob, inputs: JobInputs) -> BatchCache:
    """Open the cache shared by a node's ranks. Other data, tokenizers or lengths have separate entries."""
    backend: Any = getattr(inputs.tokenizer, "backend_tokenizer", None)
    tokenizer = backend.to_str() if backend is not None else str(inputs.tokenizer)
    made_of = {"data": inputs.corpus.digest, "tokenizer": tokenizer, "length": inputs.length, "cut": job.too_long}
    return BatchCache(job.name, fingerprint=made_of, stream=_STREAM, max_bytes=job.cache)


def _loader(job: FinetuneJob, samples: TokenizedDataset, size: SizedJob, world: World) -> ElasticDataLoader:
    return ElasticDataLoader(
        samples,
        size.plan.for_rank(world.rank),
        seed=job.seed,
        collate_fn=pad_samples,
        num_workers=job.workers,
        pin_memory=world.device.type == "cuda",
    )


def _run_steps(world: World, job: FinetuneJob, inputs: JobInputs, size: SizedJob, loader: ElasticDataLoader) -> int:
    model = model_module.shard_model(inputs.config, job, world)
    optimizer = torch.optim.AdamW(
        [one for one in model_module.unwrap_model(model).parameters() if one.requires_grad],
        lr=size.lr,
        betas=(job.beta1, job.beta2),
        eps=job.eps,
        weight_decay=job.weight_decay,
    )
    batch = size.plan.global_batch
    rewarm = Rewarmup(job.rewarm)
    rate = LRScaler(optimizer, size.rule, global_batch=batch, world_size=world.size, rewarm=rewarm)
    progress = StepLogWriter(job.progress_file, rank=world.rank)
    state = {
        "model": model_module.unwrap_model(model),
        "optim": optimizer,
        "data": loader,
        "rate": rate,
        "progress": progress,
    }
    ckpt = Checkpointer(
        f"tiered://{job.name}",
        every=job.every,
        durable=job.durable or None,
        durable_every=job.durable_every,
        keep_last=job.keep_last,
    )
    with rate, ckpt:
        restored = ckpt.restore(state)
        progress.recover()
        if restored < 0:
            model_module.load_initial_weights(model, inputs.config, job, world)
        place = loader.position
        total = total_steps(job, samples=len(inputs.corpus), done=place.cursor, step=place.step, batch=batch)
        plan = size.plan.for_rank(world.rank)
        runner = _StepRunner(job, plan, world, model, ExactGradients(model, tree=job.exact))
        for step in world.steps(restored + 1, total, checkpoint=(ckpt, state)):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(
                    step, total, peak=size.lr, shape=job.schedule, warmup=job.warmup, least=job.min_lr
                )
            used = rate.learning_rates[0]
            work = next(iter(loader))
            result = runner.of(step, work)
            if world.check_finite(result.loss):
                optimizer.step()
            work.commit()
            tokens = int(result.weight)
            world.report(loss=result.loss, tokens=tokens, samples=work.samples)
            progress.write_step(
                step=step,
                steps=total,
                loss=result.loss,
                norm=result.norm,
                tokens=tokens,
                samples=work.samples,
                lr=used,
                ranks=world.size,
                seconds=round(time.perf_counter() - began, 6),
            )
            ckpt.save(state, step)  # after the step's line, which is part of the state
        with world.pause_watchdog():
            export_model(model, inputs.config, inputs.tokenizer, job, rank=world.rank)
        progress.write(done=total, model=str(job.model_folder))
        return total


class _StepRunner(NamedTuple):
    """Forward and backward passes of one step."""

    job: FinetuneJob
    plan: RankPlan
    world: World
    model: nn.Module
    sums: ExactGradients

    def of(self, step: int, work: DataStep) -> StepTotal:
        """Run one step. Each token's loss counts by its weight over the weight of all tokens on all ranks."""
        mine: list[PaddedBatch] = [one.data for one in work]
        for turn in self.sums.step(self.plan):
            batch = mine[turn.position].to(self.world.device)
            with seeded(self.job.seed, step, turn.id):
                with self._precision():
                    logits = self.model(input_ids=batch.ids, use_cache=False).logits
                each = cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
                turn.backward((each * batch.weights.flatten()).sum(), weight=batch.weights.sum(dtype=torch.float64))
        return self.sums.finish(clip=self.job.clip)

    def _precision(self) -> AbstractContextManager[object]:
        """Return the autocast context of DDP; FSDP2 casts internally."""
        job, device = self.job, self.world.device.type
        half = job.precision == "bfloat16" or (job.precision == "auto" and device == "cuda")
        return torch.autocast(device, torch.bfloat16) if half and job.parallel == "ddp" else nullcontext()


_BLOCK = 16
_MULTIPLE = 8
"""Sample lengths are padded to a multiple, which devices process faster."""


class TokenizedDataset:
    """Dataset of tokenized samples. A block is tokenized at the first access and mapped afterwards."""

    def __init__(self, corpus: JsonLinesCorpus, encoder: SampleEncoder, cache: BatchCache) -> None:
        self._corpus = corpus
        self._encoder = encoder
        self._cache = cache

    def __len__(self) -> int:
        return len(self._corpus)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        number, place = divmod(index, _BLOCK)
        block = self._cache.get(number, self.tokenize_block)
        start, end = block["starts"][place : place + 2].tolist()
        return block["ids"][start:end], block["targets"][start:end], block["weights"][start:end]

    def tokenize_block(self, number: int) -> dict[str, torch.Tensor]:
        """Tokenize one block."""
        first = number * _BLOCK
        indices = range(first, min(first + _BLOCK, len(self._corpus)))
        found = [self._encoder(self._corpus[index], self._corpus.location_of(index)) for index in indices]
        starts = torch.tensor([0, *(len(one.ids) for one in found)]).cumsum(0)
        parts = zip(("ids", "targets", "weights"), zip(*found, strict=True), strict=True)
        return {"starts": starts, **{name: torch.cat([torch.from_numpy(one) for one in all_]) for name, all_ in parts}}


@dataclass(frozen=True)
class PaddedBatch:
    """Input of one forward and backward pass: rows of the same length."""

    ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> PaddedBatch:
        return PaddedBatch(*(one.to(device, non_blocking=True) for one in (self.ids, self.targets, self.weights)))

    def pin_memory(self) -> PaddedBatch:
        return PaddedBatch(self.ids.pin_memory(), self.targets.pin_memory(), self.weights.pin_memory())


def pad_samples(samples: Sequence[Any]) -> PaddedBatch:
    """Pad samples on the right with tokens of weight 0, which no earlier token sees."""
    longest = max(len(ids) for ids, _, _ in samples)
    width = -(-longest // _MULTIPLE) * _MULTIPLE
    shape = (len(samples), width)
    ids, targets = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    weights = torch.zeros(shape)
    for row, (one, after, counted) in enumerate(samples):
        ids[row, : len(one)] = one
        targets[row, : len(one)] = after
        weights[row, : len(one)] = counted
    return PaddedBatch(ids, targets, weights)
