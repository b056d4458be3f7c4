"""Cost of ``elastic.samples`` compared with torch's own samplers: ``python -m benchmarks.samples``.

All contenders take turns in one thread. A row shows the processor time of the fastest turn, because other load only
slows turns down, and its ratio to the reference row.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from elastic.batch_scaling.batch_plan import BatchPlan, RankPlan
from elastic.samples import ElasticDataLoader, ElasticSampler, SampleOrder, seeded
from elastic.samples.rng import sample_key, seed_generators

MICROBATCH = 32
STEPS = 50


class Sized:
    """A dataset of ``samples`` samples that cost nothing to read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.sample = torch.zeros(16)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def ours(samples: int, batch: int, world: int) -> Callable[[], None]:
    def run() -> None:
        sampler = ElasticSampler(samples, _shares(batch, world), seed=next(_seeds))
        for _ in itertools.islice(sampler.batches(), _pieces(batch, world)):
            pass

    return run


def randoms(samples: int, batch: int, world: int) -> Callable[[], None]:
    """Return a run of ``RandomSampler``.

    It has no ranks, no seed that survives a restart, and no position to resume from.
    """

    def run() -> None:
        for _ in itertools.islice(
            BatchSampler(RandomSampler(Sized(samples)), MICROBATCH, False), _pieces(batch, world)
        ):
            pass

    return run


def distributed(samples: int, batch: int, world: int) -> Callable[[], None]:
    def run() -> None:
        sampler = DistributedSampler(Sized(samples), world, 0, seed=next(_seeds))
        for _ in itertools.islice(BatchSampler(sampler, MICROBATCH, False), _pieces(batch, world)):
            pass

    return run


def loader(seed_samples: bool) -> Callable[[], None]:
    elastic = ElasticDataLoader(Sized(10**6), _shares(64, 1), seed=1, seed_samples=seed_samples)

    def run() -> None:
        for step in itertools.islice(elastic, STEPS):
            for _ in step:
                pass
            step.commit()

    return run


def torchs_loader() -> Callable[[], None]:
    batches = iter(DataLoader(Sized(10**6), batch_size=MICROBATCH, shuffle=True))

    def run() -> None:
        for _ in itertools.islice(batches, STEPS * 2):
            pass

    return run


def one_seeded() -> None:
    with seeded(1, 2, next(_seeds)):
        pass


def one_copied() -> None:
    """Do the same by saving and restoring every state."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.default_generator.manual_seed(1)
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


_seeds = itertools.count()


def _shares(batch: int, world: int) -> RankPlan:
    return BatchPlan(batch, world, microbatch=MICROBATCH).for_rank(0)


def _pieces(batch: int, world: int) -> int:
    return STEPS * batch // world // MICROBATCH


def times(calls: dict[str, Callable[[], object]], rounds: int, each: int = 1) -> dict[str, float]:
    """Return the seconds of each call in its fastest turn."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            began = time.thread_time()
            for _ in range(each):
                call()
            if turn:  # the first turn warms up
                taken[name].append((time.thread_time() - began) / each)
    return {name: min(those) for name, those in taken.items()}


def show(title: str, found: dict[str, float], unit: float, beside: str) -> None:
    for name, seconds in found.items():
        print(f"| {title} | {name} | {seconds / unit:,.1f} | {seconds / found[beside]:.3g} |")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.samples", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args(arguments).rounds
    torch.set_num_threads(1)
    print("| what | whose | us | times |\n|---|---|---|---|")
    batch, world = 1024, 8
    for samples in (100_000, 1_000_000, 10_000_000):
        calls = {
            "ElasticSampler": ours(samples, batch, world),
            "DistributedSampler": distributed(samples, batch, world),
            "RandomSampler": randoms(samples, batch, world),
        }
        title = f"start and {STEPS} steps, {samples:,} samples, batch {batch:,}, {world} ranks"
        show(title, times(calls, rounds), 1e-6, "DistributedSampler")
    orders = {"10**6": SampleOrder(10**6, 1), "10**12": SampleOrder(10**12, 1)}
    for count in (1, 1024, 65_536):
        calls = {f"of {size} samples": functools.partial(order.indices, 7, count) for size, order in orders.items()}
        show(f"{count:,} indices in one call", times(calls, rounds, each=5), 1e-6, "of 10**6 samples")
    calls = {
        "ElasticDataLoader": loader(True),
        "ElasticDataLoader, seed_samples=False": loader(False),
        "DataLoader": torchs_loader(),
    }
    show(f"{STEPS} steps of 2 microbatches of {MICROBATCH}, no workers", times(calls, rounds), 1e-6, "DataLoader")
    calls = {
        "seeded": one_seeded,
        "all states copied": one_copied,
        "of a sample": lambda: seed_generators(sample_key(1, 2, 3)),
    }
    show("setting random generators", times(calls, rounds, each=500), 1e-6, "all states copied")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
