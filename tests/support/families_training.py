"""A rank that trains several model families in turn, under ``elastic run`` or alone.

With ``breaks`` rank 1 fails once in step 2 of each family: by SIGKILL in the first, by an exception in the others.
Arguments: the folder, the job's name, the number of steps, ``breaks`` or another word, and the families.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BATCH, MICROBATCH, BROKEN = 8, 2, 2


def finetune_job(folder: Path, name: str, family: str, steps: int) -> Any:
    """Return a family's job; ``still`` starts from the model of ``quiet`` with a learning rate of 0."""
    from integration.finetune.finetune_job import FinetuneJob

    still = name == "still"
    return FinetuneJob(
        name=f"{name}-{family}",
        data=(str(folder / "data.jsonl"),),
        output=str(folder / name / family),
        model=str(folder / "quiet" / family / "model") if still else "",
        config="" if still else str(folder / f"{family}.json"),
        tokenizer=str(folder / "tokenizer"),
        steps=steps,
        batch=BATCH,
        microbatch=MICROBATCH,
        lr=0.0 if still else 1e-2,
        schedule="constant",
        warmup=2,
        weight_decay=0.1,
        seed=3,
        parallel="ddp" if family == "qwen2" else "fsdp",
        recompute=family == "qwen3",
        lora=4 if family in ("qwen3", "gpt_oss") else 0,
    )


class BreakingWorld:
    """A world whose rank 1 fails at step ``BROKEN`` unless the marker file exists."""

    def __init__(self, world: Any, marker: Path, *, kill: bool) -> None:
        self._world, self._marker, self._kill = world, marker, kill

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def steps(self, *args: Any, **named: Any) -> Iterator[int]:
        for step in self._world.steps(*args, **named):
            if step == BROKEN and self._world.rank == 1 and not self._marker.exists():
                self._marker.touch()
                if self._kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ZeroDivisionError("in the middle of a run")
            yield step


def train_families(folder: Path, name: str, steps: int, families: Sequence[str], *, breaks: bool = False) -> str:
    from elastic.workers.train_loop import run
    from integration.finetune.inputs import open_job_inputs
    from integration.finetune.training import train_finetune

    jobs = {family: finetune_job(folder, name, family, steps) for family in families}
    brought = {family: open_job_inputs(job) for family, job in jobs.items()}

    def train_each_family(world: Any) -> None:
        for family, job in jobs.items():
            job.folder.mkdir(parents=True, exist_ok=True)
            marker = job.folder / "broken"
            train_finetune(
                BreakingWorld(world, marker, kill=family == families[0]) if breaks else world, job, brought[family]
            )

    return str(run(train_each_family))


def train_alone(say: Any, folder: str, steps: int, families: Sequence[str]) -> dict[str, Any]:
    """Train ``quiet`` and ``still`` and finish ``moved``, which two ranks began; check all three."""
    place = Path(folder)
    train_families(place, "quiet", steps, families)
    train_families(place, "moved", steps, families)
    train_families(place, "still", 1, families)
    return {family: check_models(place, family) for family in families}


def check_models(folder: Path, family: str) -> dict[str, Any]:
    """Return whether the loaded models are bitwise equal, their type, and the first loss recomputed."""
    import torch
    from transformers import AutoModelForCausalLM

    jobs = [finetune_job(folder, name, family, 0) for name in ("quiet", "moved", "still")]
    models = [AutoModelForCausalLM.from_pretrained(job.model_folder) for job in jobs]
    one, *others = (model.state_dict() for model in models)
    same = [other.keys() == one.keys() and all(torch.equal(one[name], other[name]) for name in one) for other in others]
    return {"same": same, "type": type(models[0]).__name__, "first": first_loss(folder, family)}


def first_loss(folder: Path, family: str) -> float:
    """Compute the first step's loss sample by sample, without padding, sharding or microbatches."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    from elastic.samples import SampleOrder
    from integration.finetune.inputs import open_job_inputs

    job = finetune_job(folder, "quiet", family, 0)
    brought = open_job_inputs(job)
    torch.manual_seed(job.seed)
    model = AutoModelForCausalLM.from_config(brought.config, dtype=torch.float32)
    total = weight = 0.0
    with torch.no_grad():
        for index in SampleOrder(len(brought.corpus), job.seed, "full").indices(0, BATCH):
            sample = brought.encoder(brought.corpus[int(index)], "here")
            logits = model(input_ids=torch.from_numpy(sample.ids)[None].long()).logits[0]
            each = cross_entropy(logits, torch.from_numpy(sample.targets).long(), reduction="none")
            total += float((each * torch.from_numpy(sample.weights)).sum())
            weight += float(sample.weights.sum())
    return total / weight


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    folder, name, steps, breaks, *families = sys.argv[1:]
    print(train_families(Path(folder), name, int(steps), families, breaks=breaks == "breaks"))
