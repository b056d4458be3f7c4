"""Section "aborts": 100 aborts and re-creations with flat memory; a rank killed in an all-reduce.

Without a GPU on gloo and on the backend that does what NCCL does. With a GPU on NCCL only: two ranks share one device.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.checked import run_tests
from tests.support import nccl_like

CHECKED = (
    "tests/e2e/elastic/test_aborted_a_hundred_times.py",
    "tests/e2e/elastic/test_aborted_collectives.py",
    "tests/e2e/elastic/test_lost_while_communicators_are_made.py",
)
ON_NCCL = (
    "100 aborts and re-creations of NCCL's communicators, memory flat",
    "a rank is killed inside an all-reduce of NCCL, bits compared",
)
_FAKES = ("gloo", nccl_like.NAME)


def run(device: str, out: Path, limit_s: float) -> None:
    """Run the tests of aborted communicators: on NCCL with a GPU, on fakes without one."""
    from tests.gpu.findings import record
    from tests.gpu.report import Check

    if device == "cpu":
        why = "no accelerator: tried on gloo and on a backend that does what NCCL does"
        record(out, *(Check(name, "not run", why=why) for name in ON_NCCL))
    run_tests(out, CHECKED, timeout_s=limit_s, leave_out=(lambda _item: "") if device == "cpu" else is_fake)


def is_fake(item: pytest.Item) -> str:
    """Return why a test is skipped on a GPU: it runs on a fake, as it does on every machine."""
    callspec = getattr(item, "callspec", None)
    backend = callspec.params.get("backend") if callspec is not None else None
    return "runs on a fake: make test covers it on any machine" if backend is None or backend in _FAKES else ""
