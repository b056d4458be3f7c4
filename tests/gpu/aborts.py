"""Section "aborts": 100 aborts and re-creations with flat memory; a rank killed in an all-reduce.

With a GPU both run on NCCL: two ranks share one device. Without one 25 aborts run on gloo and on a fake of NCCL.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.checked import run_tests
from tests.gpu.findings import record
from tests.gpu.report import Check
from tests.support import nccl_like

CHECKED = (
    "tests/e2e/elastic/test_repeated_aborts.py",
    "tests/e2e/elastic/test_aborted_collectives.py",
)
ON_NCCL = (
    "100 aborts and re-creations of NCCL's communicators, memory flat",
    "a rank is killed inside an all-reduce of NCCL, bits compared",
)
_FAKES = ("gloo", nccl_like.NAME)


def run(device: str, out: Path, limit_s: float) -> None:
    """Run the tests of aborted communicators: on NCCL with a GPU, on fakes without one."""
    if device == "cpu":
        why = "no accelerator: aborts run on gloo and on a fake of NCCL, make test kills the rank"
        record(out, *(Check(name, "not run", why=why) for name in ON_NCCL))
        run_tests(out, CHECKED[:1], timeout_s=limit_s)
    else:
        run_tests(out, CHECKED, timeout_s=limit_s, leave_out=is_fake)


def is_fake(item: pytest.Item) -> str:
    """Return why a test is skipped on a GPU: it runs on a fake, as it does on every machine."""
    callspec = getattr(item, "callspec", None)
    backend = callspec.params.get("backend") if callspec is not None else None
    return "runs on a fake: make test covers it on any machine" if backend is None or backend in _FAKES else ""
