"""Command that runs random schedules of faults: ``python -m tests.simulation``.

``--seed 7`` runs one schedule and prints its events. ``--seeds A B`` runs many until one fails. ``--break RULE`` breaks
a production rule on purpose and runs the schedules for it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time

from tests.simulation.broken_rules import BROKEN, break_rule
from tests.simulation.schedule import Schedule, find_violation, run, schedule_of, shrink_finding
from tests.simulation.sealed_shards import Violation

_SCHEDULES_A_SWEEP = 50


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "STOP"), default=(0, 1000))
    parser.add_argument("--shrink", action="store_true", help="drop events while the schedule still fails")
    parser.add_argument("--keep-going", action="store_true", help="count failures instead of stopping at the first")
    parser.add_argument(
        "--break", dest="rule", choices=sorted(BROKEN), metavar="RULE", help="break a production rule on purpose"
    )
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with break_rule(options.rule):
        if options.seed is None:
            return _run_many(*options.seeds, rule=options.rule, keep_going=options.keep_going)
        return _run_one(_schedule(options.seed, options.rule), shrink=options.shrink)


def _schedule(seed: int, rule: str | None) -> Schedule:
    return schedule_of(seed) if rule is None else BROKEN[rule].schedule_of(seed)


def _run_one(schedule: Schedule, *, shrink: bool) -> int:
    if shrink and (finding := find_violation(schedule)) is not None:
        schedule = shrink_finding(finding).schedule
    print(f"{schedule.shape}")
    for event in schedule.events:
        print(f"  {event}")
    try:
        run(schedule, print)
    except Violation as violation:
        print(f"VIOLATION: {violation}")
        return 1
    return 0


def _run_many(first: int, stop: int, *, rule: str | None, keep_going: bool) -> int:
    began, failed = time.perf_counter(), 0
    gc.freeze()
    gc.disable()  # every schedule leaves many reference cycles, and one collection for many schedules is cheaper
    for seed in range(first, stop):
        if seed % _SCHEDULES_A_SWEEP == 0:
            gc.collect()
        finding = find_violation(_schedule(seed, rule))
        if finding is not None:
            failed += 1
            print(f"seed {seed}: {finding.violation}", flush=True)
            if not keep_going:
                again = f"python -m tests.simulation --seed {seed} --shrink" + (f" --break '{rule}'" if rule else "")
                report = f"{shrink_finding(finding)}\nreplay: {again}"
                print(report, flush=True)
                print(report, file=sys.stderr, flush=True)
                return 1
    seconds = time.perf_counter() - began
    print(f"{stop - first} schedules, {failed} broke a rule, {(stop - first) / seconds:.0f} schedules/s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
