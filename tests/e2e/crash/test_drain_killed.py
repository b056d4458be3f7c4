"""After SIGKILL of the agent at any point of a drain, the next agent finishes without resending."""

import json
import signal

import pytest

from tests.support.agent_http import get_text
from tests.support.agents import agent_pid, stop_agent
from tests.support.crashes import crash_environ
from tests.support.jobs import CheckpointJob, durable_settings, list_objects, state_at
from tieredckpt.session.session import open_session
from tieredckpt.settings import DurableSettings, load_settings

SIZE = 6 << 20
"""Elements of four bytes: five parts per step."""
SMALL = 11 << 18
"""Three parts."""


def start_agent(say):
    """Start an embedded agent that outlives this process."""
    open_session("nobody", load_settings()).agent.list_steps("nobody")


def settings_through(proxy, server, **changes):
    settings = durable_settings(server, **changes)
    return DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": proxy.endpoint}})


def kill_points(point, in_a_push):
    """Return parameters for the first and the second pass of each point, at most one of them in a push."""
    return [
        pytest.param(point, count, marks=() if count == in_a_push else pytest.mark.nightly, id=f"{point}-{count}")
        for count in (1, 2)
    ]


@pytest.mark.parametrize(
    ("point", "count"),
    [
        *kill_points("drain.began", None),
        *kill_points("drain.uploaded", 2),
        *kill_points("drain.indexed", 1),
        *kill_points("drain.noted", 2),
        *kill_points("drain.complete", None),
        *kill_points("drain.committed", 2),
    ],
)
def test_agent_killed_during_a_drain_resumes_it(agent_dir, rclone, rclone_proxy, zygote, point, count):
    zygote.run(start_agent, environ=crash_environ(f"{point}:{count}"))
    doomed = agent_pid(agent_dir)
    job = CheckpointJob(agent_dir, settings_through(rclone_proxy, rclone, on_busy="wait"))
    job.save(0, 1, size=SMALL)
    assert agent_pid(agent_dir) not in (None, doomed), "the agent was not killed"
    sent = rclone_proxy.parts_sent()
    assert sent == [1, 1, 2, 2, 3, 3], "the agent resent a part of a finished upload"
    job.lose_memory()
    job.assert_restores(1, tiers={"durable"}, size=SMALL)
    job.assert_restores(0, tiers={"durable"}, size=SMALL, named=0)


def test_agent_killed_between_two_parts_resumes_the_upload(agent_dir, rclone, rclone_proxy):
    """The next agent finishes the same upload and does not resend parts that the store confirmed."""
    held = rclone_proxy.add_rule("PUT", query="partNumber=4").hold()
    job = CheckpointJob(agent_dir, settings_through(rclone_proxy, rclone, concurrency=1))
    with job.checkpointer() as ckpt:
        ckpt.save(state_at(0, SIZE), 0).wait()
        rclone_proxy.wait_for(lambda proxy: 4 in proxy.parts_sent())
        stop_agent(agent_dir, signal.SIGKILL)
        held.drop()
        assert ckpt.wait("durable", timeout_s=60)
    sent = rclone_proxy.parts_sent()
    assert sent[:3] == [1, 2, 3]
    assert set(sent[3:]) == {4, 5}
    assert len(rclone_proxy.requests("POST", query="uploads")) == 1
    job.lose_memory()
    job.assert_restores(0, tiers={"durable"}, size=SIZE)


def test_next_agent_continues_the_drain_of_a_stopped_one(agent_dir, rclone, rclone_proxy):
    held = rclone_proxy.add_rule("PUT", query="partNumber=4").hold()
    job = CheckpointJob(agent_dir, settings_through(rclone_proxy, rclone, concurrency=1))
    with job.checkpointer() as ckpt:
        ckpt.save(state_at(0, SIZE), 0).wait()
        rclone_proxy.wait_for(lambda proxy: 4 in proxy.parts_sent())
        held.drop()
        stop_agent(agent_dir)
        assert ckpt.wait("durable", timeout_s=60)
    assert set(rclone_proxy.parts_sent()) == {1, 2, 3, 4, 5}
    job.lose_memory()
    job.assert_restores(0, tiers={"durable"}, size=SIZE)


def test_bucket_contains_only_the_steps(agent_dir, rclone, rclone_proxy, zygote):
    """After any number of kills the bucket has two objects per shard and one manifest per step."""
    zygote.run(start_agent, environ=crash_environ("drain.indexed:1"))
    settings = settings_through(rclone_proxy, rclone, on_busy="wait")
    job = CheckpointJob(agent_dir, settings)
    job.save(0, 1, 2)
    kinds = sorted(name.rpartition(".")[2] for name in list_objects(rclone, settings))
    assert kinds == ["index"] * 3 + ["manifest"] * 3 + ["safetensors"] * 3
    assert json.loads(get_text(agent_dir, "/status"))["drain"]["totals"]["errors"] == 0
