"""Command that runs random schedules of faults: ``python -m tests.worlds``.

``--seed 7`` runs one schedule and prints its events. ``--seeds A B`` runs many until one fails. ``--break RULE`` breaks
a production rule on purpose.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.worlds.broken_rules import BROKEN, break_rule
from tests.worlds.schedules import find_violation, run, schedule_of, shrink_finding
from tests.worlds.simulated_supervisor import Violation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.worlds")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "STOP"), default=(0, 1000))
    parser.add_argument("--break", dest="rule", choices=sorted(BROKEN), metavar="RULE", help="break a production rule")
    options = parser.parse_args()
    with break_rule(options.rule):
        if options.seed is not None:
            return _run_one(options.seed)
        return _run_many(*options.seeds)


def _run_one(seed: int) -> int:
    schedule = schedule_of(seed)
    finding = find_violation(schedule)
    if finding is not None:
        schedule = shrink_finding(finding).schedule
    try:
        run(schedule, print)
    except Violation as violation:
        print(f"VIOLATION: {violation}")
        return 1
    return 0


def _run_many(first: int, stop: int) -> int:
    began = time.perf_counter()
    for seed in range(first, stop):
        finding = find_violation(schedule_of(seed))
        if finding is not None:
            print(f"{shrink_finding(finding)}\nreplay: python -m tests.worlds --seed {seed}")
            return 1
    print(f"{stop - first} schedules, {(stop - first) / (time.perf_counter() - began):.0f} schedules/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
