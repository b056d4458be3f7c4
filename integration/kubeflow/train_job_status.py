"""Reports of the newest complete and the newest durable step to the status of a TrainJob."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist
from kubeflow.trainer import update_trainjob_status

from tieredckpt import Checkpointer
from tieredckpt.checkpointer.save_handle import StepInfo

log = logging.getLogger(__name__)

_SERVER_VARIABLE = "KUBEFLOW_TRAINER_SERVER_URL"
"""Kubeflow sets it if its feature gate TrainJobStatus is on."""
_SDK_INTERVAL_S = 5.0
"""Seconds after a report in which the SDK sends no other."""
_MAX_PAUSE_S = 600.0
_CLOSE_S = 20.0
"""Seconds for the last report: two requests of at most 5 s each, and the SDK's interval between them."""


@dataclass(frozen=True)
class RunProgress:
    """Contents of one report. ``None``: unknown."""

    complete_step: int | None
    """The newest step that all ranks have saved."""
    durable_step: int | None
    percent: int | None = None
    remaining_s: int | None = None

    def as_arguments(self) -> dict[str, Any]:
        """Return the arguments of the SDK's function. Kubeflow empties what a report does not have."""
        steps = {"newest_complete_step": self.complete_step, "newest_durable_step": self.durable_step}
        return {
            "progress_percent": self.percent,
            "estimated_remaining_seconds": self.remaining_s,
            "metrics": {name: step for name, step in steps.items() if step is not None},
        }


class ProgressEstimate:
    """Progress from the steps of a job and the times at which they were seen."""

    def __init__(self, total_steps: int | None) -> None:
        self._total = total_steps
        self._first: tuple[int, float] | None = None

    def progress(self, steps: Sequence[StepInfo], now: float) -> RunProgress:
        """Return the progress at the monotonic time ``now``. Step 0 is the first of ``total_steps`` steps."""
        complete = max((one.step for one in steps if one.is_complete and not one.quarantined), default=None)
        durable = max(
            (one.step for one in steps if one.is_complete and not one.quarantined and "durable" in one.tiers),
            default=None,
        )
        if complete is None or self._total is None:
            return RunProgress(complete, durable)
        if self._first is None or complete < self._first[0]:
            self._first = complete, now
        left = max(0, self._total - 1 - complete)
        made, within_s = complete - self._first[0], now - self._first[1]
        remaining_s = round(left * within_s / made) if made else 0 if not left else None
        return RunProgress(complete, durable, min(100, 100 * (complete + 1) // self._total), remaining_s)


class TrainJobStatus:
    """Reports the progress of a run to Kubeflow Trainer while it is open.

    ::

        with Checkpointer("tiered://llama") as ckpt, TrainJobStatus(ckpt, total_steps=1000):
            ...

    Rank 0 reports from a thread of its own, so no step waits for it. Errors do not reach the training loop: the first
    one of a row is logged. Outside a TrainJob, and if Kubeflow's feature gate is off, it does nothing.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        total_steps: int | None = None,
        *,
        interval_s: float = 30.0,
    ) -> None:
        """``total_steps``: steps of the complete run, for the percentage and the remaining time."""
        self._checkpointer, self._interval_s = checkpointer, interval_s
        self._estimate = ProgressEstimate(total_steps)
        self._ended, self._reports_end = threading.Event(), False
        self._has_failed = False
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._thread = (
            threading.Thread(target=self._run, name="kubeflow-status", daemon=True)
            if is_first and os.environ.get(_SERVER_VARIABLE)
            else None
        )

    def __enter__(self) -> TrainJobStatus:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report the last steps after a run without error. A recovery from an error does not wait."""
        self._reports_end = kind is None
        self._ended.set()
        if self._thread is not None and kind is None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        pause_s = self._interval_s
        while not self._ended.wait(pause_s):
            pause_s = self._interval_s if self._report() else min(2 * pause_s, _MAX_PAUSE_S)
        if self._reports_end and not self._report():
            time.sleep(_SDK_INTERVAL_S)
            self._report()

    def _report(self) -> bool:
        """Send one report and return whether Kubeflow has accepted it. Never raise."""
        try:
            progress = self._estimate.progress(self._checkpointer.steps(), time.monotonic())
            sent = bool(update_trainjob_status(**progress.as_arguments()))
        except Exception as error:  # noqa: BLE001 - nothing here may end a training
            if self._ended.is_set() and not self._reports_end:
                return False
            level = logging.DEBUG if self._has_failed else logging.WARNING
            log.log(level, "the progress of %s was not reported to Kubeflow: %s", self._checkpointer.job, error)
            self._has_failed = True
            return False
        self._has_failed = self._has_failed and not sent
        return sent
