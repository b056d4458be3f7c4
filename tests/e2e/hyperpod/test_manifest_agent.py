"""The agent, started with the DaemonSet's arguments, follows the cluster's configuration flag."""

import contextlib
import json
import os
import signal
import subprocess
import urllib.request

import pytest

from peerstore.settings import parse_budget
from tests.support.agents import agent_pid
from tests.support.local_nodes import wait_until
from tests.support.manifest_agent import agent_command, config_map, plugged

pytestmark = pytest.mark.e2e


@pytest.fixture
def node(agent_dir, tmp_path, monkeypatch):
    """Return ``node(Mode="Enable")``, which starts the agent on a node of such a cluster."""
    for name in [name for name in os.environ if name.startswith("TIEREDCKPT_")]:
        monkeypatch.delenv(name)
    labels = tmp_path / "labels"
    labels.write_text('app.kubernetes.io/name="node-agent"\ntopology.kubernetes.io/zone="us-west-2a"\n')
    with contextlib.ExitStack() as stack:

        def start(*more, **flag):
            config = config_map(tmp_path / "cluster", **flag)
            process = subprocess.Popen(
                [*agent_command(agent_dir, config, labels), *more],
                stderr=subprocess.PIPE,
                text=True,
                env=plugged(tmp_path / "site"),
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def wait_serving(process):
    for line in process.stderr:
        if " serves " in line:
            return
    pytest.fail("the agent ended before it served")


def get_http(agent_dir, path):
    address = (agent_dir / "http").read_text()
    with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
        return answer.status, answer.read()


def test_manifest_agent_sizes_its_arena_and_answers_probes(node, agent_dir):
    process = node(Mode="Enable", InstanceMemoryAllocationPercentage=3)
    wait_serving(process)
    assert agent_pid(agent_dir) == process.pid
    assert get_http(agent_dir, "/health")[0] == 200
    said = json.loads(get_http(agent_dir, "/status")[1])
    assert said["store"]["arena"]["budget_bytes"] == parse_budget("3%")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_command_line_overrides_the_cluster_config(node, agent_dir):
    process = node("--budget=64MiB", Mode="Enable", InstanceMemoryAllocationPercentage=3)
    wait_serving(process)
    assert json.loads(get_http(agent_dir, "/status")[1])["store"]["arena"]["budget_bytes"] == 64 << 20
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def update_config_map(folder, **flag):
    """Replace the files of a ConfigMap one after the other, as Kubernetes does."""
    for name, value in flag.items():
        (folder / f".{name}").write_text(f"{value}\n")
        (folder / f".{name}").replace(folder / name)


def test_running_agent_follows_the_configuration_flag(node, agent_dir, tmp_path):
    process = node("--cluster-every-s=0.1", Mode="Enable", InstanceMemoryAllocationPercentage=3)
    wait_serving(process)

    def status_value(name):
        return json.loads(get_http(agent_dir, "/status")[1])[name]

    update_config_map(tmp_path / "cluster", InstanceMemoryAllocationPercentage=2)
    wait_until(
        lambda: status_value("store")["arena"]["budget_bytes"] == parse_budget("2%"), "the arena has the new share"
    )
    update_config_map(tmp_path / "cluster", InstanceMemoryAllocationPercentage="lots")
    wait_until(lambda: status_value("cluster")["problem"], "the agent reports the unreadable value")
    assert status_value("store")["arena"]["budget_bytes"] == parse_budget("2%")
    update_config_map(tmp_path / "cluster", Mode="Disable", InstanceMemoryAllocationPercentage=2)
    wait_until(
        lambda: status_value("cluster")["needs_restart"] == ["enabled"], "the agent reports that it needs a restart"
    )
    assert status_value("cluster")["problem"] is None
    update_config_map(tmp_path / "cluster", Mode="Enable", InstanceMemoryAllocationPercentage=4)
    wait_until(lambda: status_value("cluster")["needs_restart"] == [], "the agent no longer needs a restart")
    wait_until(
        lambda: status_value("store")["arena"]["budget_bytes"] == parse_budget("4%"), "the arena has another share"
    )
    assert agent_pid(agent_dir) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_disabled_tier_starts_no_agent(node, agent_dir):
    process = node(Mode="Disable", InstanceMemoryAllocationPercentage=3)
    said = process.communicate(timeout=200)[1]
    assert process.returncode == 0
    assert "not started" in said
    assert "durable tier directly" in said
    assert not agent_dir.exists()


def test_invalid_config_flag_ends_the_agent_with_a_message(node):
    process = node(Mode="Enable", InstanceMemoryAllocationPercentage=300)
    said = process.communicate(timeout=200)[1]
    assert process.returncode == 2
    assert "InstanceMemoryAllocationPercentage" in said
    assert "Traceback" not in said
