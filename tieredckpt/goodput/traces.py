"""Traces of saves, restores and transitions, from the events of a job. Pure.

All times are those of the event log. The same events always have the same trace and span IDs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, TypeVar

from tieredckpt.event_log.event_types import (
    STAGE_HYDRATE,
    FaultInjected,
    LogEvent,
    Protection,
    RestoreEvent,
    SaveEvent,
    StageEvent,
    event_time,
)
from tieredckpt.goodput.analysis import AnalysedTransition, analyse_transition, stage_span
from tieredckpt.goodput.analysis_result import TimeCategory
from tieredckpt.goodput.run_history import JobRun, split_into_runs, to_us

Attributes: TypeAlias = Mapping[str, str | int]
_Call = TypeVar("_Call", SaveEvent, RestoreEvent)
_CallKey: TypeAlias = tuple[int, int, int]
"""Epoch, step, and number of earlier calls with both."""
_TRACED = (TimeCategory.STARTUP, TimeCategory.RECOVERY, TimeCategory.RESIZE)
_ERROR = "error.type"
_FAILED_SAVE = "failed"
_FAILED_RESTORES = ("torn", "lost", "damaged")


@dataclass(frozen=True)
class Span:
    """One span of a trace. Times are in microseconds since 1970."""

    span_id: int
    parent_id: int
    """0: the span is the root."""
    name: str
    start_us: int
    end_us: int
    attributes: Attributes
    error: str = ""
    """Description of the failure. Empty: none."""


@dataclass(frozen=True)
class Trace:
    """The spans of one save, restore or transition."""

    trace_id: int
    spans: tuple[Span, ...]
    """The root comes first and covers the others. Each parent comes before its children."""

    @property
    def end_us(self) -> int:
        return self.spans[0].end_us


def job_traces(events: Iterable[LogEvent]) -> list[Trace]:
    """Return the traces of a job in order of their start.

    A transition has a trace once its first step or the end of its run is recorded.
    """
    traces: list[Trace] = []
    runs = split_into_runs(events)
    for run in runs:
        injections = [one for one in run.events if isinstance(one, FaultInjected)]
        restores: dict[int, list[RestoreEvent]] = {}
        for one in run.restores:
            restores.setdefault(one.epoch, []).append(one)
        for transition in run.transitions:
            if transition.category not in _TRACED:
                continue
            inside = []
            for epoch in filter(transition.enters, restores):
                inside += [one for one in restores[epoch] if to_us(one.began) <= transition.end]
                restores[epoch] = [one for one in restores[epoch] if to_us(one.began) > transition.end]
            if transition.next_epoch is not None or run.outcome or run is not runs[-1]:
                traces.append(_transition_trace(run, analyse_transition(run, transition, injections), inside))
        traces += [_restore_trace(run, key, calls) for key, calls in _by_call(chain(*restores.values()))]
        traces += _save_traces(run)
    return sorted(traces, key=lambda trace: trace.spans[0].start_us)


class _TraceBuilder:
    """A trace under construction. ``key`` identifies it among those of its name in the run."""

    def __init__(self, run: JobRun, name: str, key: Sequence[int], attributes: Attributes) -> None:
        self._run, self._name, self._attributes = run, name, attributes
        self._trace_id = _digest(16, run.job, run.start, name, *key)
        self._root_id = _digest(8, self._trace_id)
        self._spans: list[Span] = []

    def add(
        self, name: str, start_us: int, end_us: int, attributes: Attributes, *, parent_id: int = 0, error: str = ""
    ) -> int:
        """Add a span and return its ID. Its parent is the root by default."""
        span_id = _digest(8, self._trace_id, name, start_us, *attributes.items())
        named = self._named(attributes)
        self._spans.append(Span(span_id, parent_id or self._root_id, name, start_us, end_us, named, error))
        return span_id

    def add_call(
        self, call: SaveEvent | RestoreEvent, attributes: Attributes, *, parent_id: int = 0, error: str
    ) -> None:
        """Add the span of one rank's save or restore."""
        name = "save rank" if isinstance(call, SaveEvent) else "restore rank"
        own = {"rank": call.rank, "node.name": _node_of(self._run, call), "step": call.step, **attributes}
        self.add(name, to_us(call.began), to_us(event_time(call)), own, parent_id=parent_id, error=error)

    def build(self, *times_us: int) -> Trace:
        """Return the trace. Its root covers its spans and ``times_us``."""
        start_us = min(*times_us, *(one.start_us for one in self._spans))
        end_us = max(*times_us, *(one.end_us for one in self._spans))
        root = Span(self._root_id, 0, self._name, start_us, end_us, self._named(self._attributes))
        return Trace(self._trace_id, (root, *self._spans))

    def _named(self, attributes: Attributes) -> Attributes:
        """Return the known attributes with their names in the export."""
        values = {"job.name": self._run.job, **attributes}.items()
        return {key if key == _ERROR else f"tieredckpt.{key}": one for key, one in values if one not in ("", -1)}


def _transition_trace(run: JobRun, found: AnalysedTransition, restores: Sequence[RestoreEvent]) -> Trace:
    transition = found.transition
    to = transition.worlds[-1] if transition.worlds else None
    about: Attributes = {
        "epoch": -1 if transition.next_epoch is None else transition.next_epoch,
        "world.size": transition.next_ranks,
        **({} if to is None else {"transition.how": to.how, "transition.reason": to.reason}),
    }
    trace = _TraceBuilder(run, transition.category.value, (transition.epoch,), about)
    for fault in found.faults:
        about = {"node.name": fault.node, "local_rank": fault.local_rank, "epoch": fault.epoch, _ERROR: fault.kind}
        trace.add("fault", fault.at_us, fault.noticed_us, about, error=fault.reason or fault.kind or "fault")
    hydrates: dict[tuple[int, int], int] = {}
    for stage in found.stages:
        start, end = stage_span(stage, found.began_us, found.faults)
        if start == end and to_us(stage.began) < found.began_us:
            continue  # ended before the transition
        node = stage.node or _node_of(run, stage)
        about = {"rank": stage.rank, "node.name": node, "local_rank": stage.local_rank, "epoch": stage.epoch}
        span_id = trace.add(stage.name, start, end, about)
        if stage.name == STAGE_HYDRATE:
            hydrates[stage.epoch, stage.rank] = span_id
    for restore in restores:
        _add_restore(trace, restore, parent_id=hydrates.get((restore.epoch, restore.rank), 0))
    return trace.build(found.began_us, transition.end)


def _restore_trace(run: JobRun, key: _CallKey, calls: Sequence[RestoreEvent]) -> Trace:
    trace = _TraceBuilder(run, "restore", key, {"epoch": key[0], "step": key[1]})
    for call in calls:
        _add_restore(trace, call)
    return trace.build(to_us(calls[0].began))


def _node_of(run: JobRun, event: StageEvent | SaveEvent | RestoreEvent) -> str:
    """Return the node of the event's rank. Empty: the formation of its world is not recorded."""
    world = run.worlds.get(event.epoch)
    place = event.rank // max(1, world.nproc) if world is not None else -1
    return world.nodes[place] if world is not None and 0 <= place < len(world.nodes) else ""


def _add_restore(trace: _TraceBuilder, call: RestoreEvent, *, parent_id: int = 0) -> None:
    sizes = {f"restore.bytes.{tier}": size for tier, size in call.bytes_by_tier.items()}
    about: Attributes = {"restore.mode": call.mode, "restore.steps_redone": call.steps_redone, **sizes}
    trace.add_call(call, about, parent_id=parent_id, error=call.mode if call.mode in _FAILED_RESTORES else "")


def _save_traces(run: JobRun) -> Iterator[Trace]:
    """Yield a trace for each save, with the time until its step was reported as protected."""
    reports = [one for one in run.events if isinstance(one, Protection)]
    changes: dict[int, list[int]] = {}
    for before, report in zip([None, *reports], reports, strict=False):
        if before is None or before.step != report.step:
            changes.setdefault(report.step, []).append(to_us(report.at))
    saved_again: dict[int, int] = {}
    for key, calls in reversed(_by_call(run.saves)):
        step = key[1]
        trace = _TraceBuilder(run, "save", key, {"epoch": key[0], "step": step})
        for call in calls:
            error = "the save failed" if call.state == _FAILED_SAVE else ""
            trace.add_call(call, {"save.state": call.state}, error=error)
        began, staged = to_us(calls[0].began), max(to_us(event_time(call)) for call in calls)
        until = saved_again.get(step, run.end + 1)
        protected = next((at for at in changes.get(step, ()) if staged <= at < until), None)
        if protected is not None:
            trace.add("protect", staged, protected, {"step": step})
        saved_again[step] = began
        yield trace.build(began)


def _by_call(events: Iterable[_Call]) -> list[tuple[_CallKey, list[_Call]]]:
    """Return the events of all ranks by call, in order of time.

    The n-th event of a rank with the same epoch and step belongs to the n-th call.
    """
    calls: dict[_CallKey, list[_Call]] = {}
    seen: Counter[tuple[int, int, int]] = Counter()
    for event in sorted(events, key=lambda one: one.began):
        rank = (event.epoch, event.step, event.rank)
        calls.setdefault((event.epoch, event.step, seen[rank]), []).append(event)
        seen[rank] += 1
    return list(calls.items())


def _digest(size: int, *key: object) -> int:
    """Return an ID of ``size`` bytes for ``key``."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=size).digest(), "big")
