"""Two machines that resolve their own name to 127.0.1.1, as on Debian, but announce another address."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.elastic_runs import ROOT
from tests.support.local_nodes import wait_until
from tests.support.machines import on_machine, write_names

pytestmark = pytest.mark.system
RANK = ROOT / "tests/e2e/control/rank.py"


def test_named_coordinator_and_its_store_are_reachable(net, tmp_path):
    machines = {name: net.host(name) for name in ("n1", "n2")}
    write_names(tmp_path, machines)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("known to both of these machines")
    known = ("--coordinator", "n1:7400", "--secret", f"file:{secret}", "--nnodes", "2", "--job", "job")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(name, *options):
        words = (sys.executable, "-m", "elastic", "run", *known, "--no-agent", "--log-dir", tmp_path / "logs", *options)
        command = on_machine(tmp_path, name, [*words, RANK, tmp_path])
        with (tmp_path / f"{name}.out").open("wb") as out:
            return machines[name].start(command, cwd=tmp_path, env=environ, stdout=out, stderr=subprocess.STDOUT)

    def worlds():
        lines = [line for log in (tmp_path / "logs").glob("*/*.log") for line in log.read_text().splitlines()]
        return [one for one in map(json.loads, lines) if one["what"] == "in"]

    runs = [start("n1", "--coordinator-here"), start("n2")]
    wait_until(lambda: len(worlds()) == 2, "both are in a world")
    stores = {one["store"] for one in worlds()}
    (tmp_path / "finish").touch()
    assert [run.wait(60) for run in runs] == [0, 0]
    assert {store.rpartition(":")[0] for store in stores} <= {host.address for host in machines.values()}
