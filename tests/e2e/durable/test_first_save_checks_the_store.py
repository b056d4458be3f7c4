"""The first save of a run checks whether the durable tier is refused, absent, unreachable or usable."""

import logging
from dataclasses import replace

import pytest
import torch

import tieredckpt
from tests.support.faults import ReplyWithStatus
from tests.support.jobs import CheckpointJob, bucket_url, durable_settings, list_objects, state_at
from tests.support.ports import free_port
from tests.support.s3 import REGION
from tieredckpt.errors import DurableRefusedError, TieredCheckpointError, TierUnavailableError
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings, load_settings

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]

ALWAYS = 10**6


def first_save(agent_dir, settings, **arguments):
    with CheckpointJob(agent_dir, settings).checkpointer(**arguments) as ckpt:
        return ckpt.save(state_at(0), 0).wait()


def unreachable(**changes):
    endpoint = f"http://127.0.0.1:{free_port()}"
    return DurableSettings(url=bucket_url(), options={"endpoint": endpoint, "region": REGION}, **changes), endpoint


def test_store_in_order_is_checked_once_and_keeps_no_probe(agent_dir, rclone, rclone_proxy):
    settings = durable_settings(rclone)
    behind = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": rclone_proxy.endpoint}})
    with CheckpointJob(agent_dir, behind).checkpointer() as ckpt:
        for step in range(3):
            ckpt.save(state_at(step), step).wait()
        assert ckpt.wait("durable", timeout_s=60)
    probes = [(one.method, one.path) for one in rclone_proxy.requests() if ".probe-" in one.path]
    (read,) = [path for method, path in probes if method == "GET"]
    assert [method for method, path in probes if path == read][:2] == ["PUT", "GET"]
    assert [name for name in list_objects(rclone, settings) if ".probe-" in name] == []


def test_absent_bucket_is_refused(agent_dir, moto):
    settings = moto.settings(url="s3://no-such-bucket/prefix")
    with pytest.raises(DurableRefusedError, match=r"durable\.url s3://no-such-bucket/prefix.*NoSuchBucket.*Create the"):
        first_save(agent_dir, settings)


def remembered_durable(agent_dir, name):
    """Return the durable tier that a later run would inherit from the agent."""
    with CheckpointJob(agent_dir, DurableSettings(), name).checkpointer() as ckpt:
        ckpt.save(state_at(9), 9).wait()
        return ckpt.session.agent.list_steps(name).durable


def test_refused_bucket_is_not_inherited_by_a_later_run(agent_dir, moto):
    job = CheckpointJob(agent_dir, moto.settings(url="s3://no-such-bucket/prefix"))
    with job.checkpointer() as ckpt, pytest.raises(DurableRefusedError, match="NoSuchBucket"):
        ckpt.save(state_at(0), 0).wait()
    close_sessions()
    assert remembered_durable(agent_dir, job.name) is None


def test_bucket_that_no_save_has_checked_is_not_inherited_by_a_later_run(agent_dir, moto):
    job = CheckpointJob(agent_dir, moto.settings(url="s3://no-such-bucket/prefix"))
    with job.checkpointer() as ckpt, pytest.raises(TieredCheckpointError, match="NoSuchBucket"):
        ckpt.restore(state_at(0))
    close_sessions()
    assert remembered_durable(agent_dir, job.name) is None


def test_checked_bucket_is_inherited_by_a_later_run(agent_dir, rclone):
    job = CheckpointJob(agent_dir, durable_settings(rclone))
    job.save(0)
    close_sessions()
    assert remembered_durable(agent_dir, job.name).url == job.settings.durable.url


def test_pending_upload_stays_with_its_bucket_after_another_one_is_refused(agent_dir, rclone, rclone_proxy):
    good = rclone.settings(url=bucket_url(), endpoint=rclone_proxy.endpoint)
    job = CheckpointJob(agent_dir, good)
    rclone_proxy.add_rule("PUT", path=r"/steps/", times=ALWAYS).fail(ReplyWithStatus(503, "SlowDown"))
    with job.checkpointer() as ckpt:
        ckpt.save(state_at(0), 0).wait()
        assert ckpt.session.agent.drain_status(job.name)[0].state != "done"
    close_sessions()
    absent = CheckpointJob(agent_dir, rclone.settings(url="s3://no-such-bucket/x"), job.name)
    with absent.checkpointer() as ckpt, pytest.raises(DurableRefusedError):
        ckpt.save(state_at(1), 1).wait()
    close_sessions()
    rclone_proxy.clear()
    with CheckpointJob(agent_dir, DurableSettings(), job.name).checkpointer() as ckpt:
        status = ckpt.session.agent.wait_durable(job.name, None, 60.0)
        assert (status.version_id.version, status.state) == (0, "done")
        assert ckpt.session.agent.list_steps(job.name).durable.url == good.url


def test_wrong_secret_is_refused(agent_dir, rclone, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(DurableRefusedError, match=r"403 SignatureDoesNotMatch.*Check the credentials"):
        first_save(agent_dir, durable_settings(rclone))


def test_absent_credentials_are_refused(agent_dir, rclone, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(DurableRefusedError, match=r"Unable to locate credentials.*`tieredckpt agent restart`"):
        first_save(agent_dir, durable_settings(rclone))


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_forbidden_request_is_refused(agent_dir, rclone, rclone_proxy, method):
    rclone_proxy.add_rule(method, path=r"\.probe-", times=ALWAYS).fail(ReplyWithStatus(403, "AccessDenied"))
    settings = rclone.settings(url=bucket_url(), endpoint=rclone_proxy.endpoint)
    with pytest.raises(DurableRefusedError, match=r"403 AccessDenied.*Allow s3:GetObject, PutObject"):
        first_save(agent_dir, settings)


def test_role_that_may_not_delete_passes(agent_dir, rclone, rclone_proxy):
    rclone_proxy.add_rule("POST", query="delete", times=ALWAYS).fail(ReplyWithStatus(403, "AccessDenied"))
    rclone_proxy.add_rule("DELETE", times=ALWAYS).fail(ReplyWithStatus(403, "AccessDenied"))
    settings = rclone.settings(url=bucket_url(), endpoint=rclone_proxy.endpoint)
    with CheckpointJob(agent_dir, settings).checkpointer() as ckpt:
        ckpt.save(state_at(0), 0).wait()
        assert ckpt.wait("durable", timeout_s=60)


def test_busy_store_passes_the_check(agent_dir, rclone, rclone_proxy):
    rclone_proxy.add_rule("PUT", path=r"\.probe-").fail(ReplyWithStatus(503, "SlowDown"))
    settings = rclone.settings(url=bucket_url(), endpoint=rclone_proxy.endpoint)
    with CheckpointJob(agent_dir, settings).checkpointer() as ckpt:
        ckpt.save(state_at(0), 0).wait()
        assert ckpt.wait("durable", timeout_s=60)


def test_store_that_fails_once_passes(agent_dir, rclone, rclone_proxy):
    rclone_proxy.add_rule("PUT", path=r"\.probe-").fail(ReplyWithStatus(500, "InternalError"))
    settings = rclone.settings(url=bucket_url(), endpoint=rclone_proxy.endpoint)
    with CheckpointJob(agent_dir, settings).checkpointer() as ckpt:
        ckpt.save(state_at(0), 0).wait()
        assert ckpt.wait("durable", timeout_s=60)


def test_unreachable_endpoint_is_named(agent_dir):
    settings, endpoint = unreachable()
    with pytest.raises(TierUnavailableError) as raised:
        first_save(agent_dir, settings)
    said = str(raised.value)
    assert f"does not answer ({settings.url} at {endpoint})" in said
    assert "durable.on_unreachable=continue" in said


def test_unreachable_endpoint_is_a_warning_on_request(agent_dir, caplog):
    settings, endpoint = unreachable(on_unreachable="continue")
    with caplog.at_level(logging.WARNING):
        first_save(agent_dir, settings)
    (said,) = [text for text in caplog.messages if "continues in memory" in text]
    assert endpoint in said


def test_run_that_restored_a_step_continues_without_the_store(agent_dir, caplog):
    settings, endpoint = unreachable()
    CheckpointJob(agent_dir, DurableSettings(), "resumed").save(1, durable=False)
    with caplog.at_level(logging.WARNING), CheckpointJob(agent_dir, settings, "resumed").checkpointer() as ckpt:
        assert ckpt.restore(state_at(0)) == 1
        ckpt.save(state_at(2), 2).wait()
    (said,) = [text for text in caplog.messages if "continues in memory" in text]
    assert endpoint in said


def test_save_in_one_call_checks_the_store(agent_dir, moto):
    settings = replace(load_settings(), durable=moto.settings(url="s3://no-such-bucket/prefix"))
    with pytest.raises(DurableRefusedError, match="NoSuchBucket"):
        tieredckpt.save("tiered://one-call", {"w": torch.ones(3)}, 0, settings=settings)
