"""The operator's client with slow, absent and invalid agents, and with invalid jobs."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import integration.hyperpod.demo
from elastic.errors import PolicyError
from integration.hyperpod.operator import (
    AgentState,
    RestartMode,
    ShutdownAgent,
    StartRequest,
    StopAgent,
    StopRequest,
    UpdateAgent,
    parse_job_resource,
)
from integration.hyperpod.operator.elastic_agent_client import ElasticAgentClient
from integration.hyperpod.operator.sim_cli import main
from integration.hyperpod.operator.sim_loop import SIM_DIRECTORY_ENV, SimDirectory, SimOverrides
from integration.hyperpod.operator.sim_pods import expand_variables

STATUS = {
    "status": "running", "transitions": {"INIT": "2026-01-01T00:00:00+00:00"}, "reason": "Running",
    "restartMode": "in_process_restart", "ipversion": "v+3", "assigned_rank": "1", "spare": "False",
    "progress": {"p": {"progressData": "tiered://j/step-4", "progressCount": 4}}, "something": ["new"],
}  # fmt: skip


@pytest.fixture
def agent() -> Iterator[Any]:
    """A server that sends the given answer and records its requests."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(body)

        def _answer(self, body: bytes | None) -> None:
            server.asked.append((self.command, self.path, self.headers.get("Content-Type"), body))
            self.send_response(server.code)
            self.end_headers()
            self.wfile.write(server.body)

        def log_message(self, *_: object) -> None:
            pass

    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.code, server.body = [], 200, json.dumps(STATUS).encode()
    server.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_answer_with_unknown_fields_is_read(agent):
    with ElasticAgentClient() as client:
        heard = client.poll_all({"a": agent.address})["a"]
    assert heard.error == ""
    answer = heard.status
    assert (answer.state, answer.rank, answer.version) == (AgentState.RUNNING, 1, "v+3")
    assert answer.restart_mode is RestartMode.IN_PROCESS
    assert answer.progress["p"].progress_count == 4


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"\xff", b'{"status": "asleep"}', b'{"status": "ready", "assigned_rank": "x"}', b'{"status": 1}'],
)
def test_malformed_answer_is_reported_as_an_error(agent, body):
    agent.body = body
    with ElasticAgentClient() as client:
        heard = client.poll_all({"a": agent.address})["a"]
    assert heard.status is None
    assert agent.address in heard.error


def test_unreachable_agents_do_not_delay_the_others(agent):
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        addresses = {"good": agent.address, "gone": gone, "silent": f"127.0.0.1:{silent.getsockname()[1]}"}
        with ElasticAgentClient(timeout_s=0.3) as client:
            heard = client.poll_all(addresses)
    assert {pod for pod, one in heard.items() if one.status is not None} == {"good"}
    assert "refused" in heard["gone"].error
    assert "timed out" in heard["silent"].error


def test_oversized_answer_is_not_read_completely(agent, monkeypatch):
    monkeypatch.setattr("integration.hyperpod.operator.elastic_agent_client._LIMIT_BYTES", 1000)
    agent.body = b" " * 5000
    with ElasticAgentClient() as client:
        heard = client.poll_all({"a": agent.address})["a"]
    assert heard.status is None
    assert "more than 1000 bytes" in heard.error


def test_requests_match_the_agent_api(agent, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    body = StartRequest(
        rank=0, nnodes=1, fault_count=2, master_addr="m", master_port="1", version="v", rank_ips=({"rank": 0},)
    )
    with ElasticAgentClient() as client:
        for action in (
            UpdateAgent("a", body),
            StopAgent("a", StopRequest(is_graceful=True, timeout=3)),
            ShutdownAgent("a"),
        ):
            assert client.send_all([action], {"a": agent.address}) == {}
        agent.code, agent.body = 422, b'{"detail": "no"}'
        problems = client.send_all([ShutdownAgent("a"), ShutdownAgent("unknown")], {"a": agent.address})
    update, stop, shutdown, _ = agent.asked
    assert update[:3] == ("POST", "/update", "application/json")
    assert json.loads(update[3])["faultCount"] == 2
    assert json.loads(stop[3]) == {"is_graceful": True, "timeout": 3}
    assert shutdown == ("POST", "/shutdown", None, b"")
    assert "422" in problems["a"]


# -- jobs and commands ------------------------------------------------------------------------------------------------


def test_demo_job_is_valid_for_aws():
    job = yaml.safe_load((Path(integration.hyperpod.demo.__file__).parent / "job.yaml").read_text())
    spec = parse_job_resource(job)
    assert spec.elastic
    assert spec.policy.sizes == (1, 2)
    models = pytest.importorskip("sagemaker.hyperpod.training.config.hyperpod_pytorch_job_unified_config")
    for part, model in (("runPolicy", models.RunPolicy), ("elasticPolicy", models.ElasticPolicy)):
        model.model_validate(job["spec"][part], by_alias=False, by_name=True)
    for group in job["spec"]["replicaSpecs"]:
        models.ReplicaSpec.model_validate(group, by_alias=False, by_name=True)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "replicaSpecs is empty"),
        ({"replicaSpecs": [{"name": "a", "replicas": 1}, {"name": "a", "replicas": 1}]}, "a name twice"),
        ({"replicaSpecs": [{"replicas": 2, "maxReplicas": 1}]}, "maxReplicas is 1, less than replicas"),
        ({"replicaSpecs": [{"name": "a", "replicas": 0}]}, "minReplicas is 0"),
        ({"replicaSpecs": [{"name": "a", "replicas": 1}], "runPolicy": {"cleanPodPolicy": "Some"}}, "cleanPodPolicy"),
        (
            {"replicaSpecs": [{"name": "a", "replicas": 1}], "runPolicy": {"activeDeadlineSeconds": "soon"}},
            "activeDeadlineSeconds is 'soon'",
        ),
        (
            {"replicaSpecs": [{"name": "a", "replicas": 1}], "runPolicy": {"logMonitoringConfiguration": [{"x": 1}]}},
            "name is missing; .*logPattern is missing",
        ),
        (
            {"replicaSpecs": [{"name": "a", "replicas": 1}], "elasticPolicy": {"minReplicas": 1, "maxReplicas": 9}},
            "maxReplicas is 9, but replicaSpecs allow 1",
        ),
    ],
)
def test_invalid_job_resource_is_refused_with_a_reason(spec, words):
    with pytest.raises(PolicyError, match=words):
        parse_job_resource({"kind": "HyperPodPyTorchJob", "spec": spec})


def test_names_in_a_command_are_those_of_the_pod():
    known = {"NODE": "n1", "A.B": "x"}
    assert expand_variables("$(NODE)/$(A.B) $(none) $$(NODE) $NODE", known) == "n1/x $(none) $(NODE) $NODE"


def test_commands_without_a_job_fail_with_a_message(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(SIM_DIRECTORY_ENV, str(tmp_path))
    job = tmp_path / "job.yaml"
    job.write_text("kind: Pod\n")
    assert main(["status"]) == 5
    assert main(["scale", "many"]) == 2
    assert main(["run", str(job)]) == 2
    assert main(["run", str(job), "--spawn", "1"]) == 2
    said = capsys.readouterr().err
    assert "no job is operated on this machine" in said
    assert "kind is 'Pod'" in said


def test_overrides_are_kept_until_withdrawn(monkeypatch, tmp_path):
    monkeypatch.setenv(SIM_DIRECTORY_ENV, str(tmp_path))
    place = SimDirectory("job")
    with place.lock():
        assert main(["scale", "3", "--job", "job"]) == 0
        assert main(["fault", "n1", "--job", "job"]) == 0
        assert place.load_overrides() == SimOverrides(3, {"n1": "UnschedulablePendingReplacement"})
        assert main(["fault", "n1", "--healthy", "--job", "job"]) == 0
        assert main(["scale", "max", "--job", "job"]) == 0
        assert place.load_overrides() == SimOverrides()
