"""The alert rules and the dashboard's queries on a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.support.agent_http import get_text
from tests.support.agent_jobs import agent_job
from tests.support.bits import zeros_like_state
from tests.support.event_logs import EventLogBuilder
from tests.support.jobs import CheckpointJob, state_at
from tests.support.local_nodes import SECRET, wait_until
from tests.support.ports import free_port
from tieredckpt import Checkpointer
from tieredckpt.cli.goodput import prometheus_text
from tieredckpt.goodput import analyse
from tieredckpt.metrics_dashboard import ALERTS, ROWS
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings, override_settings

ROOT = Path(__file__).parents[2]
RULES = ROOT / "examples/monitoring/prometheus-alerts.yaml"
MISSING = [program for program in ("prometheus", "promtool") if shutil.which(program) is None]
SIZE = 4 << 20
"""Numbers in a state. Transfers of less than 8 MiB are not measured."""
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
AGENT = '{instance="n1",job="tieredckpt"}'
SAVES = 'tieredckpt_trainer_total{instance="n1",job="llama",what="saves"}'
UNPROTECTED = 'tieredckpt_unprotected_seconds{instance="n1",job="llama"}'
TWO_AGENTS = {
    'tieredckpt_job_epoch{instance="n1",job="llama"}': "5x10 stale",
    'tieredckpt_job_epoch{instance="n2",job="llama"}': "5x90",
    f"up{AGENT}": "1x10 0x80",
    'up{instance="n2",job="tieredckpt"}': "1x90",
}


@dataclass(frozen=True)
class Case:
    """Series with one value a minute, and the alert that fires after them."""

    name: str
    alert: str
    minutes: int
    series: dict[str, str]
    fires: dict[str, str] | None = None
    """Labels of the alert. ``None``: it does not fire."""
    value: str = ""
    """The expression's value as the summary shows it."""


CASES = [
    Case("unprotected", "Unprotected", 15, {UNPROTECTED: "0+60x30", SAVES: "0+1x30"}, {"job": "llama"}, value="15m 0s"),
    Case("unprotected for a short time", "Unprotected", 8, {UNPROTECTED: "0+60x30", SAVES: "0+1x30"}),
    Case("unprotected after the job", "Unprotected", 90, {UNPROTECTED: "0+60x120", SAVES: "9x120"}),
    Case("save failed", "SavesFail", 7, {SAVES.replace("saves", "failed"): "0x5 1x9"}, {"job": "llama"}),
    Case("saves succeed", "SavesFail", 7, {SAVES: "0+1x20", SAVES.replace("saves", "failed"): "1x20"}),
    Case(
        "uploads fail",
        "UploadsFail",
        30,
        {f"tieredckpt_drain_errors_total{AGENT}": "0+1x40"},
        {"instance": "n1", "job": "tieredckpt"},
    ),
    Case("one failed upload", "UploadsFail", 20, {f"tieredckpt_drain_errors_total{AGENT}": "0x5 1x40"}),
    Case(
        "uploads stopped",
        "NoNewDurableStep",
        150,
        {f"tieredckpt_drained_steps_total{AGENT}": "0+1x30 30x200", f"tieredckpt_seals_total{AGENT}": "0+1x230"},
        {"instance": "n1", "job": "tieredckpt"},
    ),
    Case(
        "no durable tier",
        "NoNewDurableStep",
        150,
        {f"tieredckpt_drained_steps_total{AGENT}": "0x230", f"tieredckpt_seals_total{AGENT}": "0+1x230"},
    ),
    Case(
        "saves ended with uploads",
        "NoNewDurableStep",
        200,
        {f"tieredckpt_drained_steps_total{AGENT}": "0+1x30 30x200", f"tieredckpt_seals_total{AGENT}": "0+1x30 30x200"},
    ),
    Case("agent down", "AgentDown", 15, TWO_AGENTS, {"instance": "n1", "job": "llama"}),
    Case("agent away for an hour", "AgentDown", 80, TWO_AGENTS),
    Case(
        "job ended",
        "AgentDown",
        15,
        {**TWO_AGENTS, 'tieredckpt_job_epoch{instance="n2",job="llama"}': "5x10 stale"},
    ),
    Case(
        "agent not scraped",
        "AgentNotScraped",
        15,
        {
            'tieredckpt_peers_alive{instance="n1",job="llama"}': "2x20",
            'tieredckpt_job_epoch{instance="n1",job="llama"}': "5x20",
        },
        {"job": "llama"},
    ),
    Case(
        "all agents scraped",
        "AgentNotScraped",
        15,
        {
            'tieredckpt_peers_alive{instance="n1",job="llama"}': "2x20",
            'tieredckpt_job_epoch{instance="n1",job="llama"}': "5x20",
            'tieredckpt_job_epoch{instance="n2",job="llama"}': "5x20",
        },
    ),
    Case(
        "arena full",
        "ArenaNearlyFull",
        20,
        {f"tieredckpt_arena_allocated_bytes{AGENT}": "96x30", f"tieredckpt_arena_budget_bytes{AGENT}": "100x30"},
        {"instance": "n1", "job": "tieredckpt"},
        value="96%",
    ),
    Case(
        "arena half full",
        "ArenaNearlyFull",
        20,
        {f"tieredckpt_arena_allocated_bytes{AGENT}": "50x30", f"tieredckpt_arena_budget_bytes{AGENT}": "100x30"},
    ),
    Case(
        "shard damaged",
        "DamagedShard",
        10,
        {f"tieredckpt_damaged_copies_total{AGENT}": "0x5 1x30"},
        {"instance": "n1", "job": "tieredckpt"},
    ),
    Case(
        "shard damaged before the first scrape",
        "DamagedShard",
        10,
        {f"tieredckpt_damaged_copies_total{AGENT}": "_x5 1x30"},
        {"instance": "n1", "job": "tieredckpt"},
    ),
    Case("damage of hours ago", "DamagedShard", 150, {f"tieredckpt_damaged_copies_total{AGENT}": "1x200"}),
    Case(
        "recoveries repeat",
        "RecoveriesRepeat",
        10,
        {'tieredckpt_job_epoch{instance="n1",job="llama"}': "1 2 3 4 5x20"},
        {"job": "llama"},
        value="4",
    ),
    Case("one recovery", "RecoveriesRepeat", 10, {'tieredckpt_job_epoch{instance="n1",job="llama"}': "1 2x20"}),
]


def promtool(*words):
    done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def expected(case):
    """Return the alert of a case with its labels and annotations, as promtool's tests write it."""
    (rule,) = [one for one in ALERTS if one.name == f"Tieredckpt{case.alert}"]
    shown = {"summary": rule.summary, "description": rule.description}
    for name, text in shown.items():
        filled = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: case.fires[found[1]], text)
        shown[name] = re.sub(r"{{ \$value[^}]*}}", case.value, filled)
    annotations = {**shown, "runbook": f"docs/troubleshooting.md#{rule.name.lower()}"}
    return {"exp_labels": {**case.fires, "severity": rule.severity}, "exp_annotations": annotations}


def test_every_alert_has_a_case_that_fires_and_one_that_does_not():
    for fires in (True, False):
        assert {f"Tieredckpt{case.alert}" for case in CASES if (case.fires is not None) is fires} == {
            alert.name for alert in ALERTS
        }


def test_promtool_accepts_the_rules():
    promtool("check", "rules", RULES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_alert_fires_only_for_its_condition(case, tmp_path):
    alerts = [expected(case)] if case.fires is not None else []
    rule_test = {"eval_time": f"{case.minutes}m", "alertname": f"Tieredckpt{case.alert}", "exp_alerts": alerts}
    series = [{"series": name, "values": values} for name, values in case.series.items()]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": [rule_test]}
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", tmp_path / "test.yaml")


def test_promtool_accepts_the_scrape_configurations_of_the_page(tmp_path):
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    found = [one for one in blocks if "scrape_configs" in one]
    assert len(found) == 2
    # Debian builds Prometheus without the discovery of Kubernetes.
    found[1] = found[1].replace("kubernetes_sd_configs: [{role: pod}]", "static_configs: []")
    shutil.copy(RULES, tmp_path / "tieredckpt-alerts.yaml")
    for number, text in enumerate(found):
        (tmp_path / f"{number}.yaml").write_text(text)
        promtool("check", "config", tmp_path / f"{number}.yaml")


@contextlib.contextmanager
def metrics_server(read):
    """Serve the text that ``read`` returns as a scrape target. Yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(read().encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Prometheus:
    """HTTP API of a Prometheus."""

    def __init__(self, address):
        self._address = address

    def get(self, path, **arguments):
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"http://{self._address}/api/v1/{path}?{query}", timeout=20) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def query(self, expr):
        return self.get("query", query=expr)["result"]

    def was_scraped(self, job, step):
        return self.query(f'tieredckpt_newest_complete_step{{job="{job}"}} == {step}')

    def is_ready(self):
        with contextlib.suppress(OSError):
            return self.query("vector(1)")


@contextlib.contextmanager
def prometheus_server(directory, **targets):
    """Run a Prometheus that scrapes the targets, each a job's name and addresses."""
    jobs = [
        {"job_name": name, "honor_labels": True, "static_configs": [{"targets": addresses}]}
        for name, addresses in targets.items()
    ]
    document = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": jobs,
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(document))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={directory}/prometheus.yaml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        server = Prometheus(address)
        wait_until(server.is_ready, "Prometheus answers")
        yield server
    finally:
        process.terminate()
        process.wait(60)


def test_prometheus_scrapes_an_agent_by_its_address(agent_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_HTTP", "127.0.0.1:0")
    job = CheckpointJob(agent_dir, DurableSettings(url=f"file://{tmp_path}/durable"))
    with job.checkpointer() as ckpt:
        ckpt.save({"w": 1}, 1).wait()
        address = (agent_dir / "http").read_text()
        with prometheus_server(tmp_path, tieredckpt=[address]) as server:
            wait_until(partial(server.was_scraped, job.name, 1), "Prometheus has the step")
            jobs = server.get("label/job/values", **{"match[]": "tieredckpt_job_epoch"})
            nodes = server.get("label/instance/values", **{"match[]": "tieredckpt_arena_budget_bytes"})
    assert jobs == [job.name]
    assert nodes == [address]


def test_prometheus_answers_every_query_of_the_dashboard(tmp_path):
    queries = [query.expr for row in ROWS.values() for panel in row for query in panel.queries]
    with agent_job("n1", "n2") as job, contextlib.ExitStack() as stack:
        goodput = goodput_text(job.job)
        readers = [partial(get_text, host.directory, "/metrics") for host in job.hosts.values()]
        *agents, node = [stack.enter_context(metrics_server(read)) for read in (*readers, lambda: goodput)]
        server = stack.enter_context(prometheus_server(tmp_path, tieredckpt=agents, node=[node]))
        peers = ",".join(f"{name}={one.address}" for name, one in job.nodes.items())
        settings = override_settings(
            job["n1"].settings,
            peer={"discovery": f"static:{peers}", "secret": SECRET.decode()},
            durable={"url": f"file://{tmp_path}/durable", "every": 1},
        )
        stack.callback(close_sessions)
        ckpt = stack.enter_context(Checkpointer(job.job, settings=settings, on_sigterm="ignore"))
        ckpt.restore(zeros_like_state(state_at(0, SIZE)))
        for step in range(1, 5):
            ckpt.save(state_at(step, SIZE), step).wait(copies=2, timeout_s=60)
            wait_until(partial(server.was_scraped, job.job, step), "Prometheus has the step")
        assert ckpt.restore(zeros_like_state(state_at(0, SIZE))) == 4
        variables = {"$job": job.job, "$instance": ".*", "$__rate_interval": "1h"}
        for expr in queries:
            filled = re.sub(r"\$\w+", lambda name: variables[name[0]], expr)
            wait_until(partial(server.query, filled), f"an answer to {filled}", timeout_s=30)
        rules = server.get("rules")["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert len(rules) == len(ALERTS)


def goodput_text(job):
    run = EventLogBuilder().process_began(0, job=job).world_formed(1, ranks=2).steps(0, 5, at=2)
    run.fault(7.6, since=7.5, node="n1", local_rank=0, reason="it was ended by SIGKILL").world_formed(8, epoch=1)
    return prometheus_text(analyse(run.steps(4, 6, at=10, epoch=1).events))
