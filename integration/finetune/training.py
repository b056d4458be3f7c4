"""What every rank does in every world: the loop, exact in any number of ranks, and what is left of it in the end."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from elastic.gradients.exact import ExactGradients, Total
from elastic.prepared import BatchCache, forget_job
from elastic.rates.ramp import Rewarm
from elastic.rates.stepping import ElasticRate
from elastic.samples import ElasticDataLoader, PlanShares, seeded
from elastic.samples.loader import Step
from elastic.workers.world import World
from integration.finetune import models
from integration.finetune.exporting import export
from integration.finetune.job import Job, Sized, sized, total_steps
from integration.finetune.pretrained import Prepared
from integration.finetune.progress import Progress
from integration.finetune.samples import Padded, Samples, padded
from integration.finetune.schedule import rate_at
from tieredckpt import Checkpointer

_STREAM = "finetune"


def train(world: World, job: Job, brought: Prepared) -> int:
    """Take part until all steps are done, and the model is written; how many steps that were."""
    size = sized(job, nodes=world.node_count, world_size=world.size)
    with open_cache(job, brought) as cache:
        samples = Samples(brought.corpus, brought.encoder, cache)
        with _loader(job, samples, size, world) as loader:
            total = _steps(world, job, brought, size, loader)
    dist.barrier()  # nobody on this node reads prepared batches any more
    if world.local_rank == 0:
        forget_job(job.name)
    return total


def open_cache(job: Job, brought: Prepared) -> BatchCache:
    """Shared by a node's ranks; of other data, another tokenizer or length it knows nothing."""
    backend: Any = getattr(brought.tokenizer, "backend_tokenizer", None)
    tokenizer = backend.to_str() if backend is not None else str(brought.tokenizer)
    made_of = {"data": brought.corpus.digest, "tokenizer": tokenizer, "length": brought.length, "cut": job.too_long}
    return BatchCache(job.name, fingerprint=made_of, stream=_STREAM, max_bytes=job.cache)


def _loader(job: Job, samples: Samples, size: Sized, world: World) -> ElasticDataLoader:
    return ElasticDataLoader(
        samples,
        PlanShares(size.plan, world.rank),
        seed=job.seed,
        collate_fn=padded,
        num_workers=job.workers,
        pin_memory=world.device.type == "cuda",
    )


def _steps(world: World, job: Job, brought: Prepared, size: Sized, loader: ElasticDataLoader) -> int:
    model = models.sharded(brought.config, job, world)
    optimizer = torch.optim.AdamW(
        [one for one in models.inner(model).parameters() if one.requires_grad],
        lr=size.lr,
        betas=(job.beta1, job.beta2),
        eps=job.eps,
        weight_decay=job.weight_decay,
    )
    batch = size.plan.global_batch
    rewarm = Rewarm(job.rewarm)
    rate = ElasticRate(optimizer, size.rule, global_batch=batch, world_size=world.size, rewarm=rewarm)
    progress = Progress(job.progress_file, rank=world.rank)
    state = {"model": models.inner(model), "optim": optimizer, "data": loader, "rate": rate, "progress": progress}
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
            models.give_first_weights(model, brought.config, job, world)
        place = loader.place
        total = total_steps(job, samples=len(brought.corpus), done=place.cursor, step=place.step, batch=batch)
        turns = _Turns(job, size, world, model, ExactGradients(model, tree=job.exact))
        for step in world.steps(restored + 1, total, checkpoint=(ckpt, state)):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = rate_at(
                    step, total, peak=size.lr, shape=job.schedule, warmup=job.warmup, least=job.min_lr
                )
            used = rate.learning_rates[0]
            work = next(iter(loader))
            result = turns.of(step, work)
            if world.check(result.loss):
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
            ckpt.save(state, step)  # after the line, which is part of the state
        with world.unwatched():
            export(model, brought.config, brought.tokenizer, job, rank=world.rank)
        progress.write(done=total, model=str(job.model_folder))
        return total


class _Turns(NamedTuple):
    """Forward and backward of one step."""

    job: Job
    size: Sized
    world: World
    model: nn.Module
    sums: ExactGradients

    def of(self, step: int, work: Step) -> Total:
        """A token counts as much as it weighs, divided once by what all tokens of the step weigh, on all ranks."""
        mine: list[Padded] = [one.data for one in work]
        for turn in self.sums.step(self.size.plan):
            batch = mine[turn.place].to(self.world.device)
            with seeded(self.job.seed, step, turn.id):
                with self._precision():
                    logits = self.model(input_ids=batch.ids, use_cache=False).logits
                each = cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
                turn.backward((each * batch.weights.flatten()).sum(), weight=batch.weights.sum(dtype=torch.float64))
        return self.sums.finish(clip=self.job.clip)

    def _precision(self) -> AbstractContextManager[object]:
        """FSDP2 casts by itself."""
        job, device = self.job, self.world.device.type
        half = job.precision == "bfloat16" or (job.precision == "auto" and device == "cuda")
        return torch.autocast(device, torch.bfloat16) if half and job.parallel == "ddp" else nullcontext()
