"""``make demo-hyperpod`` runs completely and gives the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hyperpod_agents import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1800)]
pytest.importorskip("hyperpod_elastic_agent")


def test_the_demo_is_equal_bit_for_bit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "integration.hyperpod.demo", "--json", "--keep", str(tmp_path / "kept")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    told = json.loads(done.stdout)
    assert told["equal"]
    assert told["worlds"] >= 5
    assert [act["what"] for act in told["acts"]][1:3] == [
        "a rank gets SIGKILL; its agent tells the operator",
        "a node is said to be bad, and its memory is gone",
    ]
