"""The command line reports no step of an unresponsive node as lost, incomplete or absent."""

from __future__ import annotations

import json

import pytest

from tests.e2e.peers.test_export_from_peers import ONCE, flip_shard_bits
from tests.e2e.peers.test_node_lost import save
from tests.support.local_nodes import wait_until
from tieredckpt.cli import main
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.session.session import close_sessions

pytestmark = pytest.mark.e2e


@pytest.fixture
def halves(cluster, monkeypatch):
    """Put one half of a step on each of two nodes, and use the first node's agent."""
    cluster.run(["n1", "n2"], save, [7], 1, environ=ONCE)
    for name, value in cluster["n1"].environ.items():
        monkeypatch.setenv(name, value)
    yield cluster
    close_sessions()


@pytest.fixture
def said(capsys):
    def run(*words):
        code = main([*words, "--json"])
        out = capsys.readouterr()
        return code, json.loads(out.out) if out.out else None, out.err

    return run


def test_silent_node_is_neither_lost_nor_incomplete(halves, said, capsys):
    job = halves.job
    code, found, _ = said("ls", job)
    assert (code, [step["state"] for step in found["steps"]]) == (0, ["complete"])
    halves["n2"].suspend_agent()

    code, found, _ = said("ls", job)
    assert (code, [step["state"] for step in found["steps"]]) == (ExitCode.UNAVAILABLE, ["unknown"])
    assert "n2" in found["unreachable"]["peer"]
    main(["ls", job])
    assert "1 of 2 parts are not in the tiers that answered" in " ".join(capsys.readouterr().out.split())

    code, found, _ = said("status", job, "--cluster")
    assert (code, [step["state"] for step in found["steps"]]) == (ExitCode.UNAVAILABLE, ["unknown"])

    code, found, _ = said("whatif", job, "--lose", "node:n1")
    assert code == ExitCode.UNAVAILABLE
    assert "n2" in found["unknown"]

    code, _, error = said("inspect", job)
    assert code == ExitCode.UNAVAILABLE
    assert "n2" in error
    assert "was complete once" not in error

    halves["n2"].resume_agent()
    wait_until(lambda: said("ls", job)[0] == 0, "n2 answers again")
    assert [step["state"] for step in said("ls", job)[1]["steps"]] == ["complete"]


def test_verify_checks_all_nodes_and_names_unreachable_ones(halves, said, capsys):
    job = halves.job
    code, found, _ = said("verify", job)
    assert (code, found["good"]) == (0, True)
    assert {(one["part"], one["tier"], one["node"], one["result"]) for one in found["checks"]} == {
        (0, "memory", "n1", "good"),
        (1, "peer", "n2", "good"),
    }
    flip_shard_bits(halves["n2"], job)
    code, found, _ = said("verify", job)
    assert code == ExitCode.DAMAGED
    assert [one["node"] for one in found["checks"] if one["result"] == "damaged"] == ["n2"]

    halves["n2"].suspend_agent()
    code, found, _ = said("verify", job)
    assert (code, found["good"]) == (ExitCode.UNAVAILABLE, False)
    assert [one["node"] for one in found["checks"] if one["result"] == "good"] == ["n1"]
    assert "n2" in found["not_asked"]
    main(["verify", job])
    assert "n2 is unavailable" in " ".join(capsys.readouterr().out.split())
