"""Speed of the sharding-invariant checksum, compared with a copy and with xxh3.

    python -m benchmarks.checksum

Times are processor time of one thread, so other load on the machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import xxhash

from elastic.reshard.state_checksum import name_seed, weighted_sum

_SHAPE = _ROWS, _COLUMNS = 8192, 8192
_TYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
_SHARDS = {"rows": (1024, 0, _COLUMNS), "columns": (_ROWS, 1024, 1024), "narrow columns": (_ROWS, 64, 64)}
"""Shards of an 8,192 x 8,192 tensor: rows, first column, columns."""


def median_s(run: Callable[[], object], rounds: int) -> float:
    run()
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, GiB per second of one thread, median of {options.rounds}")
    print(f"{'type':10} {'shard':15} {'checksum':>9} {'copy':>9} {'xxh3':>9}")
    for dtype in _TYPES:
        for name, (rows, first, columns) in _SHARDS.items():
            data = torch.randint(0, 256, (rows * columns * dtype.itemsize,), dtype=torch.uint8)
            local, other = data.view(dtype).view(rows, columns), torch.empty_like(data)
            offsets, seed = (0, first), name_seed(name)
            raw = memoryview(data.numpy())
            spent = (
                median_s(lambda t=local, s=seed, o=offsets: weighted_sum(s, t, _SHAPE, o), options.rounds),
                median_s(lambda a=other, b=data: a.copy_(b), options.rounds),
                median_s(lambda r=raw: xxhash.xxh3_64_intdigest(r), options.rounds),
            )
            shown = " ".join(f"{local.nbytes / seconds / 2**30:9.2f}" for seconds in spent)
            print(f"{str(dtype).removeprefix('torch.'):10} {name:15} {shown}")


if __name__ == "__main__":
    main()
