"""``tieredckpt simulate``: the goodput a job will have."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tieredckpt.cli.exits import Exit
from tieredckpt.cli.measured import Measured, measure
from tieredckpt.cli.options import pass_screen, printing, with_exits
from tieredckpt.cli.quantities import MtbfType, Share, StageTime, Time
from tieredckpt.cli.screen import Screen
from tieredckpt.errors import UsageError
from tieredckpt.goodput.failing import Mtbf
from tieredckpt.goodput.intervals import best, curve, has_best
from tieredckpt.goodput.scheme import Faults, Scheme, restarting
from tieredckpt.ledger.events import STAGES

if TYPE_CHECKING:
    from tieredckpt.goodput.histories import Nodes

_STALL_S = 0.5


@click.command("simulate", short_help="The goodput a job will have, and how often to save.")
@click.option("--gpus", type=click.IntRange(1), help="GPUs of the job.")
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--mtbf",
    type=MtbfType(),
    default="llama-3",
    show_default=True,
    help="Mean time between failures: 3h/job, 5y/gpu, 200d/node, or llama-3.",
)
@click.option("--interval", type=Time(), help="Work from save to save. [default: the best one]")
@click.option("--stall", type=Time(zero=True), help="What a save holds training up. [default: --from, 500ms]")
@click.option("--step", type=Time(), help="The length of a step: intervals are whole steps, a live fault repeats one.")
@click.option("--recovery", type=Time(zero=True), help="From a fault to training again.")
@click.option(
    "--stage", "stages", multiple=True, type=StageTime(STAGES), help="The recovery by stages; may be repeated."
)
@click.option(
    "--from",
    "ledger",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The ledger of a run: its stages and its saves' stalls, where none are said here.",
)
@click.option("--live", type=Share(), default="0", help="Share of faults that lose nothing: survivors hold it all.")
@click.option("--durable", type=Share(), default="0", help="Share of faults that need the durable tier.")
@click.option("--durable-every", type=click.IntRange(1), default=1, show_default=True, help="Saves, to a durable one.")
@click.option("--durable-recovery", type=Time(zero=True), help="Recovery from there. [default: --recovery]")
@click.option("--broken", type=Share(), default="0", help="Share of faults after which the node is away.")
@click.option("--repair", type=Time(), default="1d", show_default=True, help="How long it is away, on average.")
@click.option("--spares", type=click.IntRange(0), default=0, show_default=True, help="Nodes that stand by.")
@click.option("--min-nodes", type=click.IntRange(1), help="Go on with as few. [default: wait for all]")
@click.option("--resize", type=Time(zero=True), default="5s", show_default=True, help="A pause to take a node back in.")
@click.option(
    "--restart", type=Time(zero=True), default="5min", show_default=True, help="Recovery of a job that is restarted."
)
@click.option("--work", type=Time(), default="30d", show_default=True, help="How long it would take without faults.")
@click.option("--runs", type=click.IntRange(2, 100_000), default=200, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@printing
@pass_screen
@with_exits
def simulate(screen: Screen, /, **given: Any) -> Exit:
    """Predict the goodput of a job: the share of its time that is work that stays.

    Faults strike at random, also while the job recovers. Many runs are played event by event; beside them stands what
    the closed form says. How long a recovery takes is up to you: --recovery, or --stage for each of its stages.
    """
    from tieredckpt.cli.simulated import as_json, show
    from tieredckpt.goodput.foretold import foretell

    asked = Asked(**given)
    recovery_s = asked.recovery_s
    nodes = asked.nodes()
    scheme = asked.scheme(nodes.mtbf_s, recovery_s)
    policies = {name: one for name, one in asked.policies(scheme, nodes.mtbf_s).items() if one != scheme}
    with screen.waiting("playing the runs"):
        forecast = foretell(scheme, nodes, work_s=asked.work, runs=asked.runs, seed=asked.seed)
        others = {
            name: foretell(one, nodes, work_s=asked.work, runs=asked.runs, seed=asked.seed)
            for name, one in policies.items()
        }
    at_best = best(scheme, nodes.mtbf_s) if has_best(scheme) else None
    around = curve(at_best or scheme, nodes.mtbf_s)
    answer = {"as asked": forecast, **others}
    screen.result(as_json(asked, answer, at_best, around), lambda out: show(out, asked, answer, at_best, around))
    return Exit.OK


@dataclass(frozen=True)
class Asked:
    """The options, as they were given."""

    gpus: int | None
    gpus_per_node: int
    mtbf: Mtbf
    interval: float | None
    stall: float | None
    step: float | None
    recovery: float | None
    stages: tuple[tuple[str, float], ...]
    ledger: Path | None
    live: float
    durable: float
    durable_every: int
    durable_recovery: float | None
    broken: float
    repair: float
    spares: int
    min_nodes: int | None
    resize: float
    restart: float
    work: float
    runs: int
    seed: int

    @cached_property
    def measured(self) -> Measured | None:
        return None if self.ledger is None else measure(self.ledger)

    @property
    def stall_s(self) -> float:
        if self.stall is not None:
            return self.stall
        known = None if self.measured is None else self.measured.stall_s
        return _STALL_S if known is None else known

    @property
    def recovery_s(self) -> float:
        if self.recovery is not None and (self.stages or self.ledger is not None):
            raise UsageError("--recovery says it as a whole: leave out --stage and --from")
        if self.recovery is None and not self.stages and self.ledger is None:
            raise UsageError(
                "say how long a recovery takes: --recovery TIME, --stage NAME=TIME for each stage, --from DIR"
            )
        return self.recovery if self.recovery is not None else math.fsum(self.by_stage.values())

    @property
    def by_stage(self) -> dict[str, float]:
        """The recovery's stages in their order; what is said here holds, and of a stage what is said last."""
        known = {} if self.measured is None else self.measured.stages
        said = {**known, **dict(self.stages)}
        names = (*STAGES, *sorted(said.keys() - set(STAGES)))
        return {name: said[name] for name in names if name in said}

    @property
    def node_count(self) -> int:
        if self.gpus is None:
            return 1
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise UsageError(f"--gpus {self.gpus} is no whole number of nodes: say --gpus-per-node")
        return max(1, self.gpus // self.gpus_per_node)

    def nodes(self) -> Nodes:
        from tieredckpt.goodput.failing import Per
        from tieredckpt.goodput.histories import Nodes

        if self.gpus is None and (self.mtbf.per is not Per.JOB or self.broken):
            raise UsageError("say how large the job is: --gpus N (without it --mtbf has to be of the job: 3h/job)")
        if (self.spares or self.min_nodes is not None) and not self.broken:
            raise UsageError("--spares and --min-nodes play a part where nodes break: say --broken SHARE")
        count = self.node_count
        least = count if self.min_nodes is None else self.min_nodes
        if least > count:
            raise UsageError(f"--min-nodes {least} is more than the {count} nodes there are")
        return Nodes(
            mtbf_s=self.mtbf.of_job(self.gpus or 1, min(self.gpus_per_node, self.gpus or 1)),
            count=count,
            spares=self.spares,
            least=least,
            broken=self.broken,
            repair_s=self.repair,
            resize_s=self.resize,
        )

    def scheme(self, mtbf_s: float, recovery: float) -> Scheme:
        if self.live + self.durable > 1:
            raise UsageError(f"--live and --durable are {self.live + self.durable:.0%} together, more than all faults")
        if self.durable_every > 1 and not self.durable:
            raise UsageError("--durable-every plays a part where memory is lost: say --durable SHARE")
        scheme = Scheme(
            interval_s=self.step or 1.0,
            stall_s=self.stall_s,
            snapshot=Faults(max(0.0, 1 - self.live - self.durable), recovery),
            live=Faults(self.live, recovery),
            durable=Faults(self.durable, recovery if self.durable_recovery is None else self.durable_recovery),
            durable_every=self.durable_every,
            step_s=self.step or 0.0,
        )
        if self.interval is not None:
            return scheme.every(self.interval)
        if not has_best(scheme):
            why = "no fault costs work" if self.live == 1 else "saves cost nothing (--stall 0)"
            raise UsageError(f"no interval is best where {why}: say --interval TIME")
        return best(scheme, mtbf_s)

    def policies(self, scheme: Scheme, mtbf_s: float) -> dict[str, Scheme]:
        """What to compare with: nothing else changed, or every fault a restart at the interval that is best for it."""
        nothing, memory = scheme.live.recovery_s, scheme.snapshot.recovery_s
        left = 1 - scheme.durable.share
        restart = replace(restarting(scheme.interval_s, scheme.stall_s, self.restart), step_s=scheme.step_s)
        return {
            "in process, nothing lost": replace(scheme, live=Faults(left, nothing), snapshot=Faults(0.0, memory)),
            "in process, from memory": replace(scheme, live=Faults(0.0, nothing), snapshot=Faults(left, memory)),
            "restart and load": best(restart, mtbf_s) if has_best(restart) else restart,
        }
