from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.durable.object_backend import BACKOFF_CAP_S, HttpStatusError, RetryPolicy, backoff_s
from tieredckpt.durable.object_store import ObjectExistsError, ObjectNotFoundError, UploadCancelledError
from tieredckpt.errors import DurableRefusedError, StoreBusyError, TierUnavailableError


class Clock:
    """A clock on which time passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def retry(clock: Clock) -> RetryPolicy:
    return RetryPolicy(60.0, clock=clock, sleep=clock.sleep, uniform=lambda _, most: most)


class Fails:
    """An operation that raises these errors in turn and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


AWAY, BUSY = HttpStatusError(500, "InternalError", "oops"), HttpStatusError(503, "SlowDown", "later")


@given(attempt=st.integers(0, 10_000), low=st.floats(0, 1), asked=st.floats(0, 100))
def test_backoff_is_jittered_capped_and_at_least_retry_after(attempt: int, low: float, asked: float):
    pause = backoff_s(attempt, lambda least, most: least + (most - least) * low, asked)
    assert asked <= pause <= asked + BACKOFF_CAP_S


def test_pauses_double_up_to_the_cap():
    assert [backoff_s(n, lambda _, most: most) for n in range(9)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 20, 20]


def test_transient_errors_are_retried(retry: RetryPolicy, clock: Clock):
    operation = Fails(AWAY, ConnectionResetError(), TimeoutError(), BUSY)
    assert retry.run("x", operation) == "done"
    assert clock.slept == [0.2, 0.4, 0.8, 1.6]


def test_retry_after_is_respected(retry: RetryPolicy, clock: Clock):
    assert retry.run("x", Fails(HttpStatusError(503, "SlowDown", "", retry_after_s=7.0))) == "done"
    assert clock.slept == [7.2]


@pytest.mark.parametrize(("error", "kind"), [(AWAY, TierUnavailableError), (BUSY, StoreBusyError)])
def test_retries_end_in_time_and_report_their_count(
    retry: RetryPolicy, clock: Clock, error: Exception, kind: type[Exception]
):
    with pytest.raises(kind, match=r"reading s3://b/x: .*tried 9 times; raise durable.retry_s") as caught:
        retry.run("reading s3://b/x", Fails(*[error] * 99))
    assert clock.now <= 60.0
    assert type(caught.value) is kind


def test_time_counts_from_the_first_failure(retry: RetryPolicy, clock: Clock):
    def slow() -> None:
        clock.now += 1_000.0
        raise AWAY

    with pytest.raises(TierUnavailableError, match="tried 2 times"):
        retry.run("x", slow)


def test_retry_wait_beyond_the_deadline_is_skipped(retry: RetryPolicy, clock: Clock):
    with pytest.raises(StoreBusyError):
        retry.run("x", Fails(HttpStatusError(503, "SlowDown", "", retry_after_s=61.0)))
    assert clock.slept == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (HttpStatusError(403, "AccessDenied", ""), DurableRefusedError),
        (HttpStatusError(412, "PreconditionFailed", ""), ObjectExistsError),
        (HttpStatusError(404, "NoSuchKey", ""), ObjectNotFoundError),
        (UploadCancelledError("by us"), UploadCancelledError),
        (TypeError("a bug"), TypeError),
    ],
)
def test_the_rest_is_raised_at_once(retry: RetryPolicy, clock: Clock, error: Exception, kind: type[Exception]):
    operation = Fails(error)
    with pytest.raises(kind):
        retry.run("x", operation, absent=ObjectNotFoundError)
    assert operation.calls == 1
    assert clock.slept == []


def test_an_absent_object_where_there_can_be_none_is_a_refusal(retry: RetryPolicy):
    with pytest.raises(DurableRefusedError):
        retry.run("writing", Fails(HttpStatusError(404, "", "")))


def test_refused_credentials_are_replaced_once(retry: RetryPolicy, clock: Clock):
    answers = [True, True]
    renewing = replace(retry, refresh_credentials=answers.pop)
    assert renewing.run("x", Fails(HttpStatusError(400, "ExpiredToken", ""))) == "done"
    with pytest.raises(DurableRefusedError, match="log in again"):
        renewing.run("x", Fails(*[HttpStatusError(400, "ExpiredToken", "")] * 2))
    assert answers == []
    assert clock.slept == []


def test_refused_credentials_are_final_without_others(retry: RetryPolicy):
    with pytest.raises(DurableRefusedError):
        retry.run("x", Fails(HttpStatusError(403, "InvalidAccessKeyId", "")))
