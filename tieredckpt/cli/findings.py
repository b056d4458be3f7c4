"""Findings of ``tieredckpt doctor`` from its measurements. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from peerstore.sizes_and_durations import show_size
from tieredckpt.cli.command_output import format_age
from tieredckpt.nccl_environment import NONBLOCKING_VARIABLE, NcclRuleState, check_nccl_environment, is_switched_on
from tieredckpt.settings import DurableSettings, Settings

_MAX_SKEW_S, _REFUSED_SKEW_S = 60.0, 900.0
_MAX_MEMORY_SHARE = 0.8


class CheckStatus(str, enum.Enum):
    PASSED = "good"
    WARNING = "note"
    FAILED = "bad"


@dataclass(frozen=True)
class CheckResult:
    subject: str
    status: CheckStatus
    message: str
    hint: str = ""
    measured: Mapping[str, float] | None = None
    """Measurements by name. The name ends with the unit."""

    def as_json(self) -> dict[str, Any]:
        found = {"what": self.subject, "verdict": self.status.value, "text": self.message, "advice": self.hint or None}
        return found if self.measured is None else {**found, "measured": dict(self.measured)}


def check_passed(what: str, text: str) -> CheckResult:
    return CheckResult(what, CheckStatus.PASSED, text)


def check_warning(what: str, text: str, advice: str = "") -> CheckResult:
    return CheckResult(what, CheckStatus.WARNING, text, advice)


def check_failed(what: str, text: str, advice: str) -> CheckResult:
    return CheckResult(what, CheckStatus.FAILED, text, advice)


@dataclass(frozen=True)
class MemoryMeasurements:
    """Memory of this node, in bytes."""

    budget: int
    total: int
    """Memory of the machine."""
    limit: int | None
    """Memory limit of the control group. ``None``: no limit."""
    file_system: str
    """Type of the arena's file system."""
    size: int
    free: int
    arena: int = 0
    """Bytes that slots already occupy."""


def check_memory(memory: MemoryMeasurements, place: str) -> list[CheckResult]:
    """Check whether the arena's budget fits its file system and the memory."""
    return [_about_file_system(memory, place), _about_budget(memory)]


def _about_file_system(memory: MemoryMeasurements, place: str) -> CheckResult:
    what = "shared memory"
    text = f"{place} is on {memory.file_system}, {show_size(memory.size)}, {show_size(memory.free)} free"
    if memory.file_system not in ("tmpfs", "ramfs"):
        return check_failed(
            what, text, "put agent.directory on a tmpfs (/dev/shm): on a disk saves are as slow as the disk is"
        )
    room = memory.free + memory.arena
    if memory.budget > room:
        return check_failed(
            what,
            f"{text}: less than the arena's budget of {show_size(memory.budget)}",
            f"enlarge it (Kubernetes: an emptyDir with medium Memory and a sizeLimit; Docker: --shm-size) or set "
            f"agent.budget to {show_size(room)} or less",
        )
    return check_passed(what, text)


def _about_budget(memory: MemoryMeasurements) -> CheckResult:
    what = "memory budget"
    usable = min(memory.total, memory.limit or memory.total)
    text = f"{show_size(memory.budget)} for shards, {100 * memory.budget / usable:.0f} % of {show_size(usable)}"
    text += " (the container's limit)" if memory.limit and memory.limit < memory.total else " of memory"
    if memory.budget > usable:
        return check_failed(what, text, "lower agent.budget: a process is killed before the arena is full")
    if memory.budget > _MAX_MEMORY_SHARE * usable:
        return check_warning(
            what, text, "little is left for the trainers themselves; pages of the arena count as their memory"
        )
    return check_passed(what, text)


def check_clock_skew(skew_s: float, *, signed: bool) -> CheckResult:
    """Check the clock. ``skew_s``: seconds that this node's clock is ahead of the store's."""
    text = f"this node's clock and the store's differ by {format_age(abs(skew_s))}"
    advice = "let the node's time service (chrony, ntpd) run"
    if signed and abs(skew_s) > _REFUSED_SKEW_S:
        return check_failed("clock", f"{text}: signed requests are refused", advice)
    return check_warning("clock", text, advice) if abs(skew_s) > _MAX_SKEW_S else check_passed("clock", text)


def about_nccl(environ: Mapping[str, str], *, needed: bool) -> CheckResult:
    """Check whether ``elastic.run`` can recover in process, and list the variables it would set.

    ``needed``: whether wrong variables are a failure instead of a warning.
    """
    what = "NCCL environment"
    found = check_nccl_environment(environ)
    wrong = [one for one in found if one.state is NcclRuleState.CONTRADICTED]
    if wrong:
        text = "; ".join(f"{one}: {one.why}" for one in wrong)
        advice = f"elastic.run refuses it where groups are NCCL's: unset {', '.join(one.name for one in wrong)}"
        return check_failed(what, text, advice) if needed else check_warning(what, text, advice)
    text = "; ".join(
        f"{state.value}: {', '.join(map(str, some))}"
        for state in (NcclRuleState.SET, NcclRuleState.UNSET)
        if (some := [one for one in found if one.state is state])
    )
    text += ", which elastic.run sets" if any(one.state is NcclRuleState.UNSET for one in found) else ""
    stays = is_switched_on(environ.get(NONBLOCKING_VARIABLE, ""))
    costs = "leaves their processes" if stays else f"costs their processes ({NONBLOCKING_VARIABLE} is not 1)"
    return check_passed(what, f"{text}; a fault while ranks make a communicator {costs}")


@dataclass(frozen=True)
class LossSurvival:
    """State that survives a loss."""

    loss: str
    survives: str
    jobs: str = ""
    """Jobs of this row. Empty: all jobs."""


def loss_survivals(settings: Settings, *, store_works: bool = True) -> list[LossSurvival]:
    """Return the state that survives each kind of loss, for these settings and the tested store."""
    if settings.enabled:
        return [*_memory_survivals(settings), *_durable_survivals(settings, store_works=store_works)]
    if not store_works:
        return [LossSurvival("anything", _broken(settings.durable))]
    left = f"plain checkpoints in {settings.durable.url}, {_share(settings.durable.every)}"
    return [LossSurvival("anything but the store", left), LossSurvival("the store", "nothing")]


def survivals_by_job(
    settings: Settings, tiers: Mapping[str, DurableSettings], broken: Collection[str]
) -> list[LossSurvival]:
    """Return the state that survives each kind of loss, separately for jobs with different durable tiers.

    ``tiers``: the durable tier of each job of the agent. ``broken``: URLs that failed a check.
    """
    jobs: dict[tuple[str, int], list[str]] = {}
    for job, durable in sorted(tiers.items()):
        jobs.setdefault((durable.url, durable.every), []).append(job)
    own = settings.durable
    if not settings.enabled or not jobs:
        return loss_survivals(settings, store_works=own.url not in broken)
    if own.url:
        jobs.setdefault((own.url, own.every), ["new jobs with these settings"])
    found = [
        replace(row, jobs=", ".join(names) if len(jobs) > 1 else "")
        for (url, every), names in jobs.items()
        for row in _durable_survivals(
            replace(settings, durable=replace(own, url=url, every=every)), store_works=url not in broken
        )
    ]
    order = list(dict.fromkeys(row.loss for row in found))
    return [*_memory_survivals(settings), *sorted(found, key=lambda row: order.index(row.loss))]


def _memory_survivals(settings: Settings) -> list[LossSurvival]:
    newest = _newest_sealed(settings)
    kept = f"{newest}, for {format_age(settings.agent.job_ttl_s)} after the last process exited"
    return [
        LossSurvival("a trainer, killed at any moment", kept),
        LossSurvival("the agent, killed", f"{newest}: the next agent checks and takes over what it finds"),
    ]


def _durable_survivals(settings: Settings, *, store_works: bool) -> list[LossSurvival]:
    durable = settings.durable
    if not durable.url:
        lost = "nothing: there is no durable tier"
    elif store_works:
        lost = f"the newest durable step ({_share(durable.every)} is uploaded) in {durable.url}"
    else:
        lost = _broken(durable)
    rows = [LossSurvival("this node or its memory", lost), LossSurvival("all nodes of the job", lost)]
    if durable.url:
        retried = f"{_newest_sealed(settings)}; uploads are tried again until it is back"
        rows.append(LossSurvival("the store", retried))
        rows.append(LossSurvival("the store and this node", "nothing"))
    return rows


def _newest_sealed(settings: Settings) -> str:
    return f"the newest sealed step ({_share(settings.memory.every)} is sealed), in this node's memory"


def _share(every: int) -> str:
    return "every step" if every == 1 else f"one step in {every}"


def _broken(durable: DurableSettings) -> str:
    return f"nothing as it is now: {durable.url} does not work (above)"
