"""A restore, a job start and ``doctor`` report which durable tier fails, why, and what to do."""

import dataclasses
import re
import socket
import time

import pytest

from tests.support.faults import ReplyWithStatus
from tests.support.jobs import CheckpointJob, bucket_url, durable_settings, state_at
from tests.support.ports import free_port
from tests.support.s3 import REGION
from tieredckpt.cli import main
from tieredckpt.errors import TierUnavailableError
from tieredckpt.settings import DurableSettings

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


def at(endpoint, url=""):
    """Return settings of an endpoint with the default timeouts."""
    return DurableSettings(url=url or bucket_url(), options={"endpoint": endpoint, "region": REGION})


@pytest.fixture
def wrong_bucket(rclone):
    return at(rclone.endpoint, "s3://no-such-bucket/prefix"), "NoSuchBucket.*Create the bucket, or correct durable.url"


@pytest.fixture
def wrong_secret(rclone, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    return at(rclone.endpoint), "SignatureDoesNotMatch.*Check the credentials"


@pytest.fixture
def no_credentials(rclone, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    return at(rclone.endpoint), "Unable to locate credentials|finds no credentials"


@pytest.fixture
def wrong_region(rclone, rclone_proxy):
    rclone_proxy.add_rule("GET", times=10**6).fail(ReplyWithStatus(301, "PermanentRedirect"))
    rclone_proxy.add_rule("PUT", times=10**6).fail(ReplyWithStatus(301, "PermanentRedirect"))
    return at(rclone_proxy.endpoint), "(301|PermanentRedirect).*another region: set `region`"


@pytest.fixture
def refused():
    return at(f"http://127.0.0.1:{free_port()}"), "Could not connect|Connection refused|error sending request"


@pytest.fixture
def black_hole():
    """A port that silently drops new connections because its backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
            waiting.append(one)
        yield at(f"http://127.0.0.1:{listener.getsockname()[1]}"), "[Tt]imeout|timed out"
        for one in waiting:
            one.close()


@pytest.fixture
def silent():
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        yield at(f"http://127.0.0.1:{listener.getsockname()[1]}"), "[Tt]imeout|timed out|error sending request"


KINDS = ["wrong_bucket", "wrong_secret", "no_credentials", "wrong_region", "refused", "silent", "black_hole"]


@pytest.fixture(params=KINDS)
def broken(request):
    return request.getfixturevalue(request.param)


@pytest.mark.timeout(60)
def test_failed_restore_names_the_store_the_cause_and_advice(agent_dir, broken):
    settings, cause = broken
    with CheckpointJob(agent_dir, settings).checkpointer() as ckpt, pytest.raises(TierUnavailableError) as raised:
        ckpt.restore(state_at(0))
    said = str(raised.value)
    assert settings.url in said
    assert re.search(cause, said), said
    assert "Whether a checkpoint exists is unknown" in said
    assert "`tieredckpt doctor`" in said


@pytest.mark.timeout(90)
def test_job_that_starts_from_memory_reports_the_store_error(agent_dir, broken, caplog):
    settings, cause = broken
    CheckpointJob(agent_dir, DurableSettings(), "from-memory").save(1, durable=False)
    CheckpointJob(agent_dir, settings, "from-memory").assert_restores(1, tiers={"memory"})
    said = next(one for one in caplog.messages if "the durable tier is unavailable" in one)
    assert settings.url in said
    assert re.search(cause, said), said
    assert "`tieredckpt doctor`" in said


@pytest.mark.timeout(60)
def test_restore_and_wait_end_at_their_deadline_and_name_the_silent_store(agent_dir, black_hole, caplog):
    settings = dataclasses.replace(black_hole[0], on_unreachable="continue")
    with CheckpointJob(agent_dir, settings).checkpointer() as ckpt:
        ckpt.session.agent.store.status()  # the agent is alive
        began = time.monotonic()
        with pytest.raises(TierUnavailableError) as raised:
            ckpt.restore(state_at(0), timeout_s=2.0)
        took_s = time.monotonic() - began
        assert took_s < 2.0 + 1.0 + 2.0, "one second for the round trip, two for a busy machine"
        assert f"{settings.url} has not answered in the time that was given" in str(raised.value)
        ckpt.save(state_at(1), 1)
        began = time.monotonic()
        assert not ckpt.wait("durable", timeout_s=2.0)
        assert time.monotonic() - began < 2.0 + 1.0 + 2.0
    assert re.search(r"not all saves are in the durable tier after 2\.0 s: step 1 is (waiting|running)", caplog.text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("broken", KINDS[:-1], indirect=True)
def test_doctor_reports_the_store_error(agent_dir, broken, monkeypatch, capsys):
    settings, cause = broken
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", settings.url)
    monkeypatch.setenv("TIEREDCKPT_DURABLE_OPTIONS", ",".join(f"{k}={v}" for k, v in settings.options.items()))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert settings.url in said
    assert re.search(cause, said, re.DOTALL), said
    assert re.search("set AWS_ACCESS_KEY_ID|must allow listing|check the URL, the endpoint", said)


def test_absent_step_is_distinguished_from_store_errors(agent_dir, rclone):
    with CheckpointJob(agent_dir, durable_settings(rclone)).checkpointer() as ckpt:
        assert ckpt.restore(state_at(0)) == -1
