"""NullCheckpointer: the interface of Checkpointer without any storage."""

from __future__ import annotations

import os
from collections.abc import Collection
from types import TracebackType
from typing import Literal

from tieredckpt.checkpointer.restore_with_fallback import OnLost
from tieredckpt.checkpointer.save_handle import SaveHandle, SaveState, StepInfo
from tieredckpt.dcp.restore_report import RestoreReport
from tieredckpt.location import check_step
from tieredckpt.resolve_step import Candidate
from tieredckpt.tensors.state_dict import StateDict


class NullCheckpointer:
    """Checkpointer that saves and restores nothing, for code that runs without checkpoints."""

    job = ""
    last_restore: RestoreReport | None = None

    def save(
        self, state: StateDict, step: int, *, force: bool = False, keep: bool = False, durable: bool = False
    ) -> SaveHandle:
        del state, force, keep, durable
        return SaveHandle(check_step(step), SaveState.NOT_DUE)

    def prepare(self, state: StateDict) -> None:
        del state

    def drop(self, step: int) -> bool:
        del step
        return False

    def record_boundary(self, state: StateDict, step: int) -> None:
        del state, step

    def seal(self, state: StateDict, step: int, *, durable: bool = False, timeout_s: float = 600.0) -> SaveHandle:
        del durable, timeout_s
        return self.save(state, step)

    def restore(
        self,
        state: StateDict,
        step: int | None = None,
        *,
        strict: bool = True,
        on_lost: OnLost = "raise",
        exclude_from_proof: Collection[str] = (),
        timeout_s: float | None = None,
    ) -> int:
        del state, step, strict, on_lost, exclude_from_proof, timeout_s
        return -1

    def save_directory(
        self,
        path: str | os.PathLike[str],
        step: int,
        *,
        keep: bool = False,
        durable: bool = False,
    ) -> SaveHandle:
        del path
        return self.save({}, step, keep=keep, durable=durable)

    def restore_directory(
        self,
        path: str | os.PathLike[str],
        step: int | None = None,
        *,
        overwrite: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        del path, step, overwrite, timeout_s
        return -1

    def wait(self, tier: Literal["memory", "durable"] = "memory", *, timeout_s: float = 600.0) -> bool:
        del tier, timeout_s
        return True

    def steps(self) -> list[StepInfo]:
        return []

    def loadable_versions(self) -> tuple[Candidate, ...]:
        return ()

    def close(self) -> None:
        pass

    def __enter__(self) -> NullCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
