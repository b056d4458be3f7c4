"""Progress of a run in the status of a TrainJob, sent by Kubeflow's SDK to a local server."""

from __future__ import annotations

import http.server
import json
import logging
import queue
import threading

import pytest

pytest.importorskip("kubeflow.trainer", reason="Kubeflow's SDK is not installed: pip install tieredckpt[kubeflow]")

from kubeflow.trainer.backends.kubernetes import utils as sdk
from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest

from integration.kubeflow import TrainJobStatus
from integration.kubeflow.train_job_status import ProgressEstimate, RunProgress
from tests.support.doc_pages import DocPage
from tests.support.jobs import state_at
from tieredckpt import Checkpointer
from tieredckpt.checkpointer.save_handle import StepInfo

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SECONDS = 30


class StatusServer(http.server.ThreadingHTTPServer):
    """Kubeflow's endpoint: checks the token and the fields, and stores the reports."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), StatusHandler)
        self.reports, self.status = queue.Queue(), 200

    def next_report(self):
        return self.reports.get(timeout=SECONDS)


class StatusHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
        assert request.to_dict()["trainerStatus"].keys() == body["trainerStatus"].keys()
        assert self.headers["Authorization"] == "Bearer token-of-a-pod"
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.server.reports.put(body["trainerStatus"])

    def log_message(self, *args):
        """Print nothing."""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Yield an endpoint as a TrainJob's pod finds it. The SDK sends every report."""
    token = tmp_path / "token"
    token.write_text("token-of-a-pod\n")
    with StatusServer() as made:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{made.server_port}/status")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(token))
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setattr(sdk, "_MIN_UPDATE_INTERVAL_SECONDS", 0.0)
        monkeypatch.setattr(sdk, "_http_session", None)
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()
        if sdk._http_session is not None:
            sdk._http_session.close()


def metrics(report):
    return {one["name"]: one["value"] for one in report.get("metrics", ())}


def checkpointer(tmp_path):
    return Checkpointer("tiered://reported", durable=f"file://{tmp_path}/durable", durable_every=2, on_sigterm="ignore")


def save(ckpt, steps):
    for step in steps:
        assert ckpt.save(state_at(step), step).error is None
        assert ckpt.wait("memory")
    assert ckpt.wait("durable")


def fail_in(status, first=lambda: None):
    """Leave the block of ``status`` with an error, after ``first``."""
    with pytest.raises(ZeroDivisionError), status:  # noqa: PT012
        first()
        raise ZeroDivisionError
    status._thread.join(SECONDS)
    assert not status._thread.is_alive()


def test_page_example_reports_its_last_step(agent_dir, tmp_path, server):
    names = {"durable": f"file://{tmp_path}/durable", "state": state_at(0), "total": 3, "train_one_step": lambda: None}
    code = DocPage("how-to/kubeflow.md", tmp_path, paths={}).block("from integration.kubeflow")
    exec(
        code.replace("ckpt.save(state, step)", "ckpt.save(state, step).wait()"), names | {"Checkpointer": Checkpointer}
    )
    report = server.next_report()
    assert (report["progressPercentage"], metrics(report)["newest_complete_step"]) == (100, "2")


def test_newest_complete_and_durable_steps_are_reported(agent_dir, tmp_path, server):
    with checkpointer(tmp_path) as ckpt, TrainJobStatus(ckpt, 10, interval_s=0.01):
        save(ckpt, [0, 1, 2, 3])
        report = server.next_report()
        while metrics(report) != {"newest_complete_step": "3", "newest_durable_step": "2"}:
            report = server.next_report()
        assert report["progressPercentage"] == 40


def test_last_report_follows_the_last_step(agent_dir, tmp_path, server):
    with checkpointer(tmp_path) as ckpt, TrainJobStatus(ckpt, 4):
        save(ckpt, [0, 1, 2, 3])
    report = server.next_report()
    assert (report["progressPercentage"], report["estimatedRemainingSeconds"]) == (100, 0)
    assert server.reports.empty()


def test_failed_run_reports_nothing_and_does_not_wait(agent_dir, tmp_path, server):
    with checkpointer(tmp_path) as ckpt:
        save(ckpt, [0])
        fail_in(TrainJobStatus(ckpt, 4))
    assert server.reports.empty()


def test_refused_report_stops_nothing(agent_dir, tmp_path, server, monkeypatch):
    monkeypatch.setattr("integration.kubeflow.train_job_status._SDK_INTERVAL_S", 0.0)
    server.status = 403
    with checkpointer(tmp_path) as ckpt, TrainJobStatus(ckpt, interval_s=0.01):
        save(ckpt, [0])
        server.next_report()
        server.status = 200
        while "newest_durable_step" not in metrics(server.next_report()):
            pass


def test_unknown_steps_are_one_warning(server, caplog):
    tries = threading.Semaphore(0)

    class Unavailable:
        job = "reported"

        def steps(self):
            tries.release()
            raise OSError("no agent answers")

    fail_in(TrainJobStatus(Unavailable(), interval_s=0.001), lambda: [tries.acquire() for _ in range(3)])
    warnings = [one for one in caplog.records if one.levelno >= logging.WARNING and "Kubeflow" in one.getMessage()]
    assert len(warnings) == 1
    assert "reported was not reported to Kubeflow: no agent answers" in warnings[0].getMessage()


def test_nothing_runs_outside_a_train_job(monkeypatch):
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    with TrainJobStatus(None) as status:
        assert status._thread is None


def step(number, *tiers, is_complete=True, quarantined=""):
    return StepInfo(number, tiers, is_complete, quarantined)


def test_incomplete_and_quarantined_steps_do_not_count():
    steps = [step(1, "durable"), step(2, "memory"), step(3, "durable", is_complete=False), step(4, quarantined="NaN")]
    assert ProgressEstimate(None).progress(steps, 0.0) == RunProgress(complete_step=2, durable_step=1)
    assert ProgressEstimate(10).progress([], 0.0) == RunProgress(None, None)


def test_remaining_time_follows_the_rate_since_the_first_report():
    estimate = ProgressEstimate(100)
    assert estimate.progress([step(9)], 50.0) == RunProgress(9, None, percent=10)
    assert estimate.progress([step(19)], 70.0) == RunProgress(19, None, percent=20, remaining_s=160)
    assert estimate.progress([step(14)], 80.0).remaining_s == 510
    assert estimate.progress([step(4)], 90.0) == RunProgress(4, None, percent=5)  # an earlier step was restored
    assert estimate.progress([step(120)], 99.0) == RunProgress(120, None, percent=100, remaining_s=0)
