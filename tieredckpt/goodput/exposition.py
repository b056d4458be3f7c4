"""An analysis in Prometheus' text format: a page that a node exporter's textfile collector can serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tieredckpt.goodput.model import Analysis, Category

_Sample = tuple[Mapping[str, str], float]


def exposition(found: Analysis) -> str:
    """Seconds and shares are gauges: the same ledger, read again, may say that less was productive than before."""
    lines: list[str] = []
    for name, help_text, samples in _families(found):
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels({'job': found.job, **labels})} {value!r}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _families(found: Analysis) -> Iterator[tuple[str, str, list[_Sample]]]:
    def one(name: str, help_text: str, value: float) -> tuple[str, str, list[_Sample]]:
        return f"tieredckpt_{name}", help_text, [({}, float(value))]

    yield one("ettr_ratio", "Share of the time that went into steps that count.", found.ettr)
    yield one("goodput_ratio", "The same of the capacity of the largest world.", found.goodput)
    yield (
        "tieredckpt_job_seconds",
        "The job's time by what it was spent on.",
        [({"category": name}, us / 1e6) for name, us in found.wall.by.items()],
    )
    yield (
        "tieredckpt_rank_seconds",
        "Time of ranks by what it was spent on.",
        [({"category": name}, us / 1e6) for name, us in found.capacity.by.items()],
    )
    yield (
        "tieredckpt_job_steps",
        "Steps that count, and that were lost.",
        [({"kind": "counted"}, float(found.steps_counted)), ({"kind": "lost"}, float(found.steps_lost))],
    )
    yield one("job_faults", "Faults of the job.", found.faults)
    yield one("job_worlds", "Worlds that were formed.", found.worlds)
    yield one("job_live", "Whether it has no end yet.", found.live)
    for name, help_text, value in (
        ("mttr_seconds", "Mean time from a fault to the next step.", found.mttr_s),
        ("mtbf_seconds", "Time of steps per interruption.", found.mtbf_s),
    ):
        if value is not None:
            yield one(name, help_text, value)
    if found.protected_step is not None:
        yield one("job_protected_step", "The newest step that is protected; -1: none is.", found.protected_step)
        unprotected_us = sum(part.end_us - part.start_us for part in found.unprotected)
        yield one("job_unprotected_seconds", "Time in which newer saves were not.", unprotected_us / 1e6)
    for share in ("p50", "p99"):
        samples: list[_Sample] = [
            ({"category": stage.category.value, "stage": stage.name}, getattr(stage, f"{share}_s"))
            for stage in found.stages
            if stage.category in (Category.STARTUP, Category.RECOVERY, Category.RESIZE)
        ]
        if samples:
            yield f"tieredckpt_stage_{share}_seconds", f"A rank's way into a world, by stage: {share}.", samples


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
