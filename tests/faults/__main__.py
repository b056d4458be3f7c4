"""``python -m tests.faults --faults 100``: random faults, seed after seed. ``--seed 7``: one again, told as it happens.

Seeds that ``--out`` has already are not run again. The exit status is 1 where anything did not hold.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from tests.faults.figures import Record, summary
from tests.faults.job import unmount_leftovers
from tests.faults.judge import ReferenceStep
from tests.faults.schedule import make_plan
from tests.faults.seed import PREFIX, SeedOutcome, reference_steps, run_seed, stop_on_sigterm
from tests.support import forked_starts, namespaces
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import rclone_server


class Driver:
    """Runs seeds, one after the other, beside one store for all of them."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self._options, self._stack = options, stack
        self._proxy: FaultProxy | None = None
        options.out.mkdir(parents=True, exist_ok=True)
        self._record = Record(options.out / "faults.jsonl")
        self._known = self._reference_steps(options.out / f"undisturbed-{options.steps}.json")

    def run_all(self) -> list[SeedOutcome]:
        options = self._options
        done = {one.seed: one for one in self._record.read() if one.hosts is options.hosts}
        began, mine = time.monotonic(), list[SeedOutcome]()
        for seed in itertools.count(options.first):
            if sum(len(one.took) for one in mine) >= options.faults:
                break
            if seed not in done:
                if options.minutes and time.monotonic() - began > options.minutes * 60:
                    break
                done[seed] = self.run_one(seed, print if options.verbose else _print_nothing)
                self._record.add(done[seed])
            mine.append(done[seed])
        return mine

    def run_one(self, seed: int, tell: Callable[[str], None]) -> SeedOutcome:
        options = self._options
        plan = make_plan(seed, hosts=options.hosts, full=os.getuid() == 0, faults=options.per_seed)
        tell(f"seed {seed}: {plan.shape}")
        proxy = self._store() if plan.shape.durable == "s3" else None
        outcome = run_seed(plan, self._known, proxy=proxy, patience_s=options.patience, tell=tell, hosts=options.hosts)
        print(
            f"seed {seed}: {len(outcome.took)} faults in {outcome.seconds:.0f} s, load {outcome.load:.1f}", flush=True
        )
        for found in outcome.violations:
            print(f"  VIOLATION: {found.rule}: {found.words}")
        if outcome.folder:
            again = f"python -m tests.faults --seed {seed} --per-seed {options.per_seed}"
            print(f"  see {outcome.folder}; again: {again}{' --hosts' * options.hosts}", flush=True)
        return outcome

    def _store(self) -> FaultProxy:
        if self._proxy is None:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            server = self._stack.enter_context(rclone_server(Path(folder)))
            self._proxy = self._stack.enter_context(FaultProxy(server.port))
        return self._proxy

    def _reference_steps(self, path: Path) -> list[ReferenceStep]:
        if not path.exists():
            known = reference_steps(self._options.steps, self._options.patience)
            new = path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(known))
            new.replace(path)
        return msgspec.json.decode(path.read_bytes(), type=list[ReferenceStep])


def main(words: list[str] | None = None) -> int:
    options = _options(words)
    if options.hosts and (reason := namespaces.missing_reason()):
        sys.exit(f"there can be no hosts here: {reason}")
    if options.forked_starts:  # before there is a thread
        forked_starts.prepare()
        forked_starts.install()
    unmount_leftovers(PREFIX)
    with ExitStack() as stack:
        driver = Driver(options, stack)
        outcomes = [driver.run_one(seed, print) for seed in options.seed] if options.seed else driver.run_all()
    print(summary(outcomes))
    return int(any(one.violations for one in outcomes))


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="so many at least, over as many seeds as that takes")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of these seeds")
    parser.add_argument("--seed", type=int, nargs="+", help="only these, told as it happens")
    parser.add_argument(
        "--per-seed", type=int, default=6, metavar="N", help="faults of one job; part of what a seed is"
    )
    parser.add_argument("--hosts", action="store_true", help="nodes are hosts of a network that can be cut; needs root")
    parser.add_argument("--steps", type=int, default=1500, help="of the undisturbed run: as far as any seed may go")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no seed after so long")
    parser.add_argument("--patience", type=float, default=300.0, metavar="S", help="what takes longer hangs")
    parser.add_argument(
        "--out", type=Path, default=Path("build/faults"), help="the record, which a later run goes on with"
    )
    parser.add_argument("--forked-starts", action="store_true", help="processes are forks of one that has imported all")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args(words)


def _print_nothing(_words: str) -> None:
    pass


if __name__ == "__main__":
    stop_on_sigterm()
    sys.exit(main())
