"""Run directories: messages on a machine without running jobs, and peer secrets."""

from __future__ import annotations

import stat

import pytest

from elastic.cli.common import ElasticScreen
from elastic.control.run_directory import LastRun, RunDirectory, derive_peer_secret, describe_no_job
from elastic.errors import JobNotFoundError
from tieredckpt.cli.exit_codes import ExitCode, exit_code_for


def test_machine_without_jobs_says_how_to_start_one(tmp_path):
    with pytest.raises(JobNotFoundError, match="job 'a' does not run on this machine") as caught:
        RunDirectory(tmp_path, "a").read()
    assert exit_code_for(caught.value, ElasticScreen.codes_by_error) == ExitCode.NOT_FOUND
    assert ElasticScreen("elastic").advice_for(caught.value) == ""
    assert describe_no_job(tmp_path).endswith("Start one with: elastic run SCRIPT")


def test_job_that_ended_last_is_named(tmp_path):
    for name, at in (("a", 100.0), ("b", 200.0)):
        place = RunDirectory(tmp_path, name)
        place.prepare()
        place.write_last_run(LastRun(name, "job failed", at, f"elastic run {name}.py"))
        place.remove()
    said = describe_no_job(tmp_path)
    assert said.startswith(
        f"no job runs on this machine (looked in {tmp_path}). Job 'b' was the last one. It ended at "
    )
    assert said.endswith("(job failed). The same command starts it again: elastic run b.py")
    assert "Its last run ended at" in describe_no_job(tmp_path, "a")


def test_peer_secret_is_the_same_on_every_node_and_differs_by_job():
    control = b"the control secret of the job"
    secret = derive_peer_secret(control, "a")
    assert secret == derive_peer_secret(control, "a")
    assert len({secret, control, derive_peer_secret(control, "b"), derive_peer_secret(b"another secret", "a")}) == 4
    assert control not in secret


def test_peer_secret_file_is_private_and_follows_a_given_control_secret(tmp_path):
    place = RunDirectory(tmp_path, "a")
    place.prepare()
    for control in (b"the first control secret", b"the second control secret"):
        path = place.write_peer_secret(control)
        assert path.read_bytes() == derive_peer_secret(control, "a")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_peer_secret_outlives_a_generated_control_secret(tmp_path):
    """Agents of stopped nodes hold steps that the next run reads with another control secret."""
    place = RunDirectory(tmp_path, "a")
    place.prepare()
    before = place.write_peer_secret(b"the first control secret", keep=True).read_bytes()
    place.remove()
    assert place.write_peer_secret(b"the second control secret", keep=True).read_bytes() == before
