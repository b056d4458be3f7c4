"""Command that applies random faults to real jobs: ``python -m tests.faults``.

``--faults 100`` runs one seed after the other, and skips seeds recorded in ``--out``. ``--seed 7`` repeats one seed and
prints its events. The exit status is 1 if a job broke a rule.
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
    """A runner of seeds, one after the other, with one object store for all of them."""

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

    def run_one(self, seed: int, log: Callable[[str], None]) -> SeedOutcome:
        options = self._options
        plan = make_plan(seed, hosts=options.hosts, full=os.getuid() == 0, faults=options.per_seed)
        log(f"seed {seed}: {plan.shape}")
        proxy = self._store() if plan.shape.durable == "s3" else None
        outcome = run_seed(plan, self._known, proxy=proxy, patience_s=options.patience, log=log, hosts=options.hosts)
        print(
            f"seed {seed}: {len(outcome.took)} faults in {outcome.seconds:.0f} s, load {outcome.load:.1f}", flush=True
        )
        for found in outcome.violations:
            print(f"  VIOLATION: {found.rule}: {found.words}")
        if outcome.folder:
            again = f"python -m tests.faults --seed {seed} --per-seed {options.per_seed}"
            print(f"  files: {outcome.folder}; repeat: {again}{' --hosts' * options.hosts}", flush=True)
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
        sys.exit(f"Cannot create network namespaces for --hosts: {reason}")
    if options.forked_starts:  # before the first thread starts
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
    parser.add_argument("--faults", type=int, default=100, help="run seeds until they have had this many faults")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="start with this seed")
    parser.add_argument("--seed", type=int, nargs="+", help="run only these seeds, and print their events")
    parser.add_argument("--per-seed", type=int, default=6, metavar="N", help="plan N faults per job; part of the seed")
    parser.add_argument(
        "--hosts", action="store_true", help="run each node in its own network namespace, which can be cut; needs root"
    )
    parser.add_argument(
        "--steps", type=int, default=1500, help="steps of the undisturbed run, and limit of every job's steps"
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="start no seed after this many minutes")
    parser.add_argument("--patience", type=float, default=300.0, metavar="S", help="report a hang after S seconds")
    parser.add_argument(
        "--out", type=Path, default=Path("build/faults"), help="folder of the record that a later run continues"
    )
    parser.add_argument(
        "--forked-starts", action="store_true", help="fork processes from one that has imported all modules"
    )
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args(words)


def _print_nothing(_words: str) -> None:
    pass


if __name__ == "__main__":
    stop_on_sigterm()
    sys.exit(main())
