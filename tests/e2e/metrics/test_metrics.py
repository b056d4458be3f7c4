"""The agent's metrics and status, compared with actual events."""

import contextlib
import json
import socket
import stat
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.support.agent_http import UnixSocketConnection, get_text
from tests.support.agents import agent_pid, stop_agent
from tests.support.bits import zeros_like_state
from tests.support.jobs import CheckpointJob, state_at
from tests.support.local_nodes import wait_until
from tieredckpt import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.cli import main
from tieredckpt.event_log import EVENT_LOG_ENV, read_event_log
from tieredckpt.event_log.event_types import Protection
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Agent:
    """The HTTP client of a running agent."""

    def __init__(self, directory):
        self.directory = directory

    def get(self, path):
        return get_text(self.directory, path)

    def connect(self):
        connection = UnixSocketConnection(self.directory)
        connection.connect()
        return connection.sock

    def status(self):
        return json.loads(self.get("/status"))

    def metrics(self):
        """Return the values by name, or by ``(name, *label values)`` for metrics with labels."""
        found = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            assert family.documentation
            for sample in family.samples:
                name = sample.name.removeprefix("tieredckpt_")
                labels = tuple(sample.labels.values())
                key = (name, *labels) if labels else name
                assert key not in found
                found[key] = sample.value
        return found


@pytest.fixture
def agent(agent_dir):
    return Agent(agent_dir)


@pytest.fixture
def durable(tmp_path):
    return DurableSettings(url=f"file://{tmp_path}/durable", every=2)


def test_metrics_match_the_events(agent_dir, agent, durable, tmp_path):
    job = CheckpointJob(agent_dir, durable)
    with job.checkpointer() as ckpt:
        records = []
        for step in range(5):
            saved = ckpt.save(state_at(step), step)
            saved.wait()
            records.append(saved.job.sealed.result())
            assert ckpt.wait("durable")
        assert ckpt.restore(zeros_like_state(state_at(0))) == 4
        loaded = ckpt.last_restore.bytes_by_tier["memory"]
    found = agent.metrics()
    trainer = {key[2]: value for key, value in found.items() if key[:2] == ("trainer_total", job.name)}
    assert trainer["saves"] == 5
    assert trainer["loads"] == 1
    assert trainer["loaded_memory_bytes"] == loaded
    assert trainer.get("skipped", 0) == trainer.get("failed", 0) == 0
    assert trainer["saved_bytes"] == found["sealed_bytes_total"] == sum(record.size_bytes for record in records)
    assert trainer["blocked_seconds"] > 0
    assert trainer["seal_seconds"] > 0
    assert found["seals_total"] == 5
    assert found["leases_total"] == 5
    assert found["drained_steps_total"] == 3
    stored = [path.stat().st_size for path in (tmp_path / "durable").rglob("*.safetensors")]
    assert found["drained_bytes_total"] == sum(stored)
    assert found["drain_seconds_total"] > 0
    assert found["drain_lag_seconds"] >= 0
    assert found["drain_errors_total"] == found["drain_skips_total"] == found["deleted_steps_total"] == 0
    assert found["newest_complete_step", job.name] == 4
    assert {found["job_epoch", job.name]} == {record.key.epoch for record in records}
    assert (
        found["damaged_copies_total"] == found["leases_lost_total"] == found["arena_leases"] == found["arena_pins"] == 0
    )


def test_page_for_browsers_shows_the_job(agent_dir, agent, durable):
    job = CheckpointJob(agent_dir, durable)
    with job.checkpointer() as ckpt:
        for step in range(3):
            ckpt.save(state_at(step), step).wait()
        assert ckpt.wait("durable")
        held = {shard.key.version for shard in ckpt.session.agent.store.list_shards(job.name)}
        page = agent.get("/")
    assert page.startswith("<!DOCTYPE html>")
    assert f"<h2>{job.name}</h2>" in page
    assert "protected up to step 2" in page
    assert page.count(">complete</td>") == len(held) > 0


def test_arena_metrics_match_the_files(agent_dir, agent, durable):
    job = CheckpointJob(agent_dir, durable)
    job.save(0, 1, 2)
    found = agent.metrics()
    slots = [path.stat() for path in (agent_dir / "slots").iterdir()]
    assert found["arena_slots"] == len(slots)
    assert found["arena_allocated_bytes"] == sum(slot.st_size for slot in slots)
    assert found["arena_budget_bytes"] == 2 << 30
    assert 0 < found["arena_sealed_bytes"] <= found["arena_allocated_bytes"] <= found["arena_budget_bytes"]
    assert found["seals_total"] - found["evictions_total"] + found["arena_free_slots"] == found["arena_slots"]


def test_status_matches_the_metrics(agent_dir, agent, durable):
    job = CheckpointJob(agent_dir, durable)
    job.save(0, 1)
    found, status = agent.metrics(), agent.status()
    assert status["store"]["arena"]["allocated_bytes"] == found["arena_allocated_bytes"]
    assert status["store"]["counters"]["sealed"] == found["seals_total"] == 2
    assert status["drain"]["totals"]["steps"] == found["drained_steps_total"] == 1
    (drained,) = status["drain"]["jobs"][job.name]
    assert drained["state"] == "done"
    assert drained["bytes_done"] == drained["bytes_total"] == found["drained_bytes_total"]
    assert status["trainers"][job.name]["saves"] == 2
    assert status["store"]["jobs"][0] | {"clients": 0, "expires_in_s": 0} == {
        "job": job.name,
        "epoch": found["job_epoch", job.name],
        "clients": 0,
        "versions": 2,
        "newest_committed": 1,
        "expires_in_s": 0,
        "newest_replicated": None,
    }


def test_skipped_and_failed_saves_are_counted(agent_dir, agent, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "16MiB")
    with Checkpointer("tiered://loop", on_sigterm="ignore") as ckpt:
        for step in range(3):
            ckpt.save(state_at(step), step).wait()
        store = ckpt.session.agent.store
        states = []
        for step in range(3, 7):
            for fact in store.list_shards("loop"):
                store.pin(fact.key)
            states.append(ckpt.save(state_at(step), step).state)
        failed = ckpt.save({"large": torch.zeros(8 << 20)}, 7)
    assert failed.state is SaveState.FAILED
    skips = states.count(SaveState.SKIPPED)
    assert skips >= 2
    found = agent.metrics()
    assert found["trainer_total", "loop", "skipped"] == skips
    assert found["trainer_total", "loop", "failed"] == 1
    assert found["trainer_total", "loop", "saves"] == 3 + len(states) - skips
    assert found["leases_over_budget_total"] >= 1
    assert found["leases_busy_total"] >= skips


def test_a_store_that_refuses_is_counted(agent_dir, agent, tmp_path):
    folder = tmp_path / "durable"
    job = CheckpointJob(agent_dir, DurableSettings(url=f"file://{folder}", retry_s=0.1))
    with job.checkpointer() as ckpt:
        ckpt.save(state_at(0), 0).wait("durable")
        before = agent.metrics()
        folder.rename(tmp_path / "away")
        folder.write_text("not a directory")
        ckpt.save(state_at(1), 1).wait()
        ckpt.wait("durable", timeout_s=2)
    found = agent.metrics()
    assert found["drain_errors_total"] >= 1
    for name in ("drained_steps_total", "drained_bytes_total"):
        assert found[name] == before[name]
    _, step = agent.status()["drain"]["jobs"][job.name]
    assert step["state"] in ("waiting", "failed")
    assert step["error"]


def test_restarted_agent_reports_recovered_shards(agent_dir, agent, durable):
    job = CheckpointJob(agent_dir, durable)
    job.save(0, 1)
    job.kill_agent()
    job.assert_restores(1, tiers={"memory"})
    found = agent.metrics()
    assert found["recovered_shards_total"] == 2
    assert found["seals_total"] == 0
    assert found["newest_complete_step", job.name] == 1


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x00\xff\xfe\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET //etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics/../status HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%2e%2e/slots HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n",
        b"DELETE /status HTTP/1.1\r\n\r\n",
        b"PUT /slots/x HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 500 + b"\r\n",
        b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=range(16),
)
def test_hostile_requests_get_an_error_and_the_agent_continues(agent_dir, agent, request_bytes):
    with Checkpointer("tiered://loop", on_sigterm="ignore") as ckpt:
        ckpt.save({"w": torch.ones(10)}, 0).wait()
        pid = agent_pid(agent_dir)
        with agent.connect() as sock:
            sock.sendall(request_bytes)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while data := sock.recv(65536):
                    answer += data
        assert b"root:" not in answer
        assert b" 200 " not in answer.split(b"\r\n")[0]
        assert json.loads(agent.get("/status"))["store"]["jobs"]
        assert agent.get("/health").startswith("ok")
        assert ckpt.save({"w": torch.ones(10)}, 1).wait() is SaveState.SEALED
        assert agent_pid(agent_dir) == pid


def test_hanging_clients_do_not_block_others(agent_dir, agent):
    with Checkpointer("tiered://loop", on_sigterm="ignore") as ckpt, contextlib.ExitStack() as open_sockets:
        ckpt.save({"w": torch.ones(10)}, 0).wait()
        for _ in range(30):
            sock = open_sockets.enter_context(agent.connect())
            sock.sendall(b"GET /metrics HT")
        assert "arena_slots" in agent.get("/metrics")
    stop_agent(agent_dir)  # a graceful stop, although clients still hang


def test_http_endpoint_can_be_disabled_or_moved(agent_dir, agent, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_HTTP", "off")
    with Checkpointer("tiered://loop", on_sigterm="ignore") as ckpt:
        assert ckpt.save({"w": torch.ones(10)}, 0).wait() is SaveState.SEALED
    assert (agent_dir / "http").read_text() == ""


def test_unknown_path_lists_the_known_ones(agent_dir, agent):
    with Checkpointer("tiered://loop", on_sigterm="ignore") as ckpt:
        ckpt.save({"w": torch.ones(10)}, 0).wait()
    with pytest.raises(urllib.error.HTTPError, match="404") as info:
        agent.get("/metric")
    assert b"/metrics" in info.value.read()


def test_protected_step_is_the_same_in_metrics_and_status(agent_dir, agent, tmp_path):
    with Checkpointer("tiered://kept", durable=str(tmp_path / "durable"), durable_every=2, on_sigterm="ignore") as ckpt:
        for step in (0, 2):
            ckpt.save(state_at(step), step).wait("durable")
        assert agent.metrics()["protected_step", "kept"] == 2
        assert agent.metrics()["unprotected_seconds", "kept"] == 0
        assert agent.status()["protected"]["kept"] == {
            "step": 2,
            "unprotected_since": None,
            "missed_saves": 0,
            "upload_problem": "",
        }
        store = ckpt.session.agent.store
        pins = []
        while ckpt.save(state_at(9), 9).ok and len(pins) < 9:  # until readers hold every slot; step 9 is not uploaded
            ckpt.wait()
            pins += [store.pin(fact.key).id for fact in store.list_shards("kept")]
        wait_until(lambda: agent.status()["protected"]["kept"]["missed_saves"] == 1, "the skipped save is counted")
        found = ckpt.session.agent.cluster_status("kept").protected
        assert found.unprotected_since is not None
        assert agent.metrics()["unprotected_seconds", "kept"] > 0
        assert "unprotected since" in (agent_dir / "agent.log").read_text()
        for pin in pins:
            store.unpin(pin)
        ckpt.save(state_at(10), 10).wait("durable")
        wait_until(
            lambda: agent.status()["protected"]["kept"]["unprotected_since"] is None, "the job is protected again"
        )
        assert agent.metrics()["protected_step", "kept"] == 10


def test_lone_copy_in_memory_is_not_protected(agent_dir, agent):
    with Checkpointer("tiered://lone", on_sigterm="ignore") as ckpt:
        ckpt.save(state_at(0), 0).wait()
        assert agent.status()["protected"]["lone"]["step"] == -1
        assert ckpt.session.agent.cluster_status("lone").protected.step == -1


def test_event_log_and_goodput_match_the_protection_of_the_agent(agent_dir, agent, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(EVENT_LOG_ENV, str(tmp_path / "ledger"))
    with Checkpointer("tiered://kept", on_sigterm="ignore") as ckpt:
        for step in range(3):
            ckpt.save(state_at(step), step).wait()
        store = ckpt.session.agent.store
        pins = []
        while ckpt.save(state_at(9), 9).ok and len(pins) < 9:  # until readers hold every slot; step 9 is not uploaded
            ckpt.wait()
            pins += [store.pin(fact.key).id for fact in store.list_shards("kept")]
        wait_until(lambda: agent.status()["protected"]["kept"]["missed_saves"] == 1, "the skipped save is counted")
        told = agent.status()["protected"]["kept"]
        for pin in pins:
            store.unpin(pin)
    events = read_event_log(tmp_path / "ledger").events
    said = [one for one in events if isinstance(one, Protection)]
    assert (said[-1].step, said[-1].since, said[-1].left_out) == (
        told["step"],
        told["unprotected_since"],
        told["missed_saves"],
    )
    since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(told["unprotected_since"]))
    assert main(["goodput", str(tmp_path / "ledger")]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"no step is protected yet, unprotected since {since} (1 saves skipped or failed)" in words
    assert told["step"] == -1


def listening(pid):
    """Return the TCP ports on which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(fd.readlink()))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes]


def test_metrics_are_on_a_user_socket_unless_an_address_is_configured(agent_dir, agent, monkeypatch):
    with Checkpointer("tiered://loop", on_sigterm="ignore") as ckpt:
        ckpt.save({"w": torch.ones(10)}, 0).wait()
    assert agent.status()["store"]["jobs"][0]["job"] == "loop"
    place = agent_dir / "http.sock"
    assert (agent_dir / "http").read_text() == f"unix:{place}"
    assert stat.S_IMODE(place.stat().st_mode) & 0o077 == 0
    assert listening(agent_pid(agent_dir)) == []
    close_sessions()
    stop_agent(agent_dir)
    assert not place.exists()
    monkeypatch.setenv("TIEREDCKPT_AGENT_HTTP", "127.0.0.1:0")
    with Checkpointer("tiered://loop", on_sigterm="ignore") as ckpt:
        ckpt.save({"w": torch.ones(10)}, 0).wait()
    address = (agent_dir / "http").read_text()
    with urllib.request.urlopen(f"http://{address}/status", timeout=20) as answer:
        assert json.load(answer)["store"]["jobs"]
    assert not place.exists()
