"""Every fault on the way to S3, by name: a class to inherit with a ``server`` fixture."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import (
    Answer,
    CutResponse,
    EarlyAnswer,
    FlipRequestBit,
    FlipResponseBit,
    Hang,
    LoseAnswer,
    ResetRequest,
    Trickle,
)
from tests.support.http_exchange import Exchange
from tests.support.upload_contract import ALL, MIB, Scene, part
from tieredckpt.durable.retrying_store import RetryingStore
from tieredckpt.errors import DurableRefusedError, StoreBusyError, TierUnavailableError

PASSING = {
    "internal error": Answer(500, "InternalError"),
    "bad gateway": Answer(502),
    "slow down": Answer(503, "SlowDown", retry_after=0.1),
    "too many requests": Answer(429, retry_after=0.1),
    "request timeout": Answer(400, "RequestTimeout"),
    "conflict": Answer(409, "OperationAborted"),
    "silence": Hang(),
    "reset before the answer": ResetRequest(0),
}
PASSING_FOR_PARTS = {
    **PASSING,
    "reset in the middle": ResetRequest(2 * MIB),
    "slow down before the end": EarlyAnswer(503, "SlowDown"),
    "damaged on the way": Answer(400, "BadDigest"),
    "answer lost": LoseAnswer(),
    "answer without an ETag": Answer(200),
}
REFUSED = {
    "access denied": (Answer(403, "AccessDenied"), "AccessDenied"),
    "expired token": (Answer(400, "ExpiredToken"), "log in again"),
    "wrong region": (Answer(301, "PermanentRedirect"), "region"),
    "wrong clock": (Answer(403, "RequestTimeTooSkewed"), "clock"),
    "no bucket": (Answer(404, "NoSuchBucket"), "Create the bucket"),
    "quota": (Answer(507), "Make room"),
}
DATA = random.Random(3).randbytes(300_000)


_IN_A_PUSH = {"slow down", "reset before the answer"}
"""Of the faults that all calls have in common: each of them is part of a push where a part fails."""


def by_name(faults: dict[str, object]) -> pytest.MarkDecorator:
    """All of the faults in a push."""
    return pytest.mark.parametrize("fault", faults.values(), ids=faults.keys())


def few_by_name(faults: dict[str, object]) -> pytest.MarkDecorator:
    """In a push those that only this call has, and two of the common ones; in a night all of them."""
    of_the_night = PASSING.keys() - _IN_A_PUSH
    marks = {name: pytest.mark.nightly if name in of_the_night else () for name in faults}
    return pytest.mark.parametrize("fault", [pytest.param(faults[n], id=n, marks=marks[n]) for n in faults])


class FaultContract:
    @pytest.fixture
    def hasty(self, open_scene: Callable[..., RetryingStore]) -> RetryingStore:
        """Takes a second of silence for an answer."""
        return open_scene(timeout_s=1.0)

    @by_name(PASSING_FOR_PARTS)
    def test_only_the_failed_part_is_sent_again(self, scene: Scene, hasty: RetryingStore, fault: object):
        part(scene.proxy, 2).fail(fault)
        told: list[int] = []
        scene.upload(hasty, progress=told.append)
        assert scene.stored() == scene.data
        assert scene.proxy.parts_sent() == sorted([*ALL, 2])
        assert sum(told) == len(scene.data)

    @few_by_name(PASSING_FOR_PARTS)
    def test_a_small_upload_is_sent_again(self, scene: Scene, hasty: RetryingStore, fault: object):
        scene.proxy.on("PUT", scene.name).fail(fault)
        hasty.upload(scene.name, scene.source, 3 * MIB, journal=scene.journal)
        assert scene.stored() == scene.data[: 3 * MIB]
        assert len(scene.proxy.seen("PUT", scene.name)) == 2

    @few_by_name(PASSING)
    def test_upload_begins_despite_a_fault(self, scene: Scene, hasty: RetryingStore, fault: object):
        scene.proxy.on("POST", query="^uploads").fail(fault)
        scene.upload(hasty)
        assert scene.stored() == scene.data
        assert scene.proxy.parts_sent() == ALL

    @few_by_name({**PASSING, "answer lost": LoseAnswer()})
    def test_upload_completes_despite_a_fault(self, scene: Scene, hasty: RetryingStore, fault: object):
        scene.proxy.on("POST", query="uploadId=").fail(fault)
        scene.upload(hasty)
        assert scene.stored() == scene.data
        assert scene.proxy.parts_sent() == ALL
        assert scene.unfinished() == []

    def test_upload_with_a_lost_create_response_is_aborted_later(self, scene: Scene, hasty: RetryingStore):
        scene.proxy.on("POST", query="^uploads").fail(LoseAnswer())
        scene.upload(hasty)
        assert scene.stored() == scene.data
        assert hasty.abort_stale_uploads("", older_than_s=0) == 1

    def test_every_part_fails_once(self, scene: Scene, hasty: RetryingStore):
        faults = (Answer(500), Hang(), ResetRequest(MIB), Answer(503, "SlowDown"), LoseAnswer())
        for number, fault in zip(ALL, faults, strict=True):
            part(scene.proxy, number).fail(fault)
        scene.upload(hasty)
        assert scene.stored() == scene.data
        assert scene.proxy.parts_sent() == sorted([*ALL, *ALL])

    @few_by_name({**PASSING, "answer lost": LoseAnswer()})
    def test_a_put_is_repeated(self, scene: Scene, hasty: RetryingStore, fault: object):
        scene.proxy.on("PUT", "small").fail(fault)
        hasty.put("small", DATA)
        assert hasty.get("small") == DATA
        assert len(scene.proxy.seen("PUT", "small")) == 2

    @few_by_name(
        {
            **PASSING,
            "cut answer": CutResponse(1000),
            "cut at once": CutResponse(0),
            "reset in the middle": CutResponse(1000, reset=True),
        }
    )
    def test_a_read_is_repeated(self, scene: Scene, hasty: RetryingStore, fault: object):
        hasty.put("small", DATA)
        scene.proxy.on("GET", "small").fail(fault)
        assert hasty.get("small") == DATA
        scene.proxy.on("GET", "small").fail(fault)
        (got,) = hasty.get_ranges("small", [(5, 200_005)])
        assert bytes(got) == DATA[5:200_005]

    @few_by_name(PASSING)
    def test_list_and_delete_are_repeated(self, scene: Scene, hasty: RetryingStore, fault: object):
        hasty.put("a/1", b"1")
        scene.proxy.on("GET", query="list-type=2").fail(fault)
        assert [info.name for info in hasty.list("a/")] == ["a/1"]
        scene.proxy.on("POST", query="^delete").fail(fault)
        hasty.delete(["a/1"])
        assert list(hasty.list("a/")) == []

    def test_slow_response_is_awaited(self, scene: Scene, hasty: RetryingStore):
        hasty.put("small", DATA)
        scene.proxy.on("GET", "small").fail(Trickle())
        assert hasty.get("small") == DATA
        assert len(scene.proxy.seen("GET", "small")) == 1

    def test_bit_flipped_in_a_response_reaches_the_caller(self, scene: Scene, hasty: RetryingStore):
        hasty.put("small", DATA)
        scene.proxy.on("GET", "small").fail(FlipResponseBit(1000))
        got = hasty.get("small")
        assert len(got) == len(DATA)
        assert [i for i in range(len(DATA)) if got[i] != DATA[i]] == [1000]

    def test_bit_flipped_in_a_part_is_refused_and_sent_again(
        self, scene: Scene, open_scene: Callable[..., RetryingStore]
    ):
        store = open_scene(options={"checksum": "md5"})
        part(scene.proxy, 4).fail(FlipRequestBit(MIB))
        scene.upload(store)
        assert scene.stored() == scene.data
        assert scene.proxy.parts_sent() == sorted([*ALL, 4])

    # -- faults that do not pass ------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("fault", "error"),
        [
            (Answer(500, "InternalError"), TierUnavailableError),
            (Answer(503, "SlowDown"), StoreBusyError),
            (ResetRequest(0), TierUnavailableError),
        ],
        ids=["internal error", "slow down", "reset"],
    )
    def test_unreachable_store_is_unavailable(
        self, scene: Scene, open_scene: Callable[..., RetryingStore], fault: object, error: type[Exception]
    ):
        store = open_scene(retry_s=0.5)
        for method in ("GET", "PUT", "POST"):
            scene.proxy.on(method, times=1000).fail(fault)
        for call in (
            lambda: store.get("x"),
            lambda: store.put("x", b""),
            lambda: list(store.list("")),
            lambda: scene.upload(store),
        ):
            with pytest.raises(error, match="tried"):
                call()

    def test_repeatedly_failing_part_ends_the_upload_and_keeps_the_rest(
        self, scene: Scene, open_scene: Callable[..., RetryingStore]
    ):
        part(scene.proxy, 5).hold()  # takes part in nothing: the upload must end without it

        def once_the_others_are_there(exchange: Exchange) -> None:
            scene.proxy.wait_for(
                lambda proxy: {1, 2, 3} <= {each.part for each in proxy.seen("PUT") if each.status == 200}
            )
            Answer(500, "InternalError")(exchange)

        rule = scene.proxy.on("PUT", query="partNumber=4(&|$)", times=1000).fail(once_the_others_are_there)
        with pytest.raises(TierUnavailableError, match="part 4"):
            scene.upload(open_scene(retry_s=0.3))
        assert rule.met > 1
        scene.proxy.drop_held()
        scene.proxy.clear()
        scene.upload(open_scene())
        assert scene.stored() == scene.data
        assert scene.proxy.parts_sent() == [4, 5]

    @pytest.mark.parametrize(("fault", "advice"), REFUSED.values(), ids=REFUSED.keys())
    def test_refusal_is_final_and_has_advice(self, scene: Scene, store: RetryingStore, fault: object, advice: str):
        for method, call in (
            ("GET", lambda: store.get("x")),
            ("PUT", lambda: store.put("x", b"")),
            ("GET", lambda: list(store.list(""))),
            ("POST", lambda: store.delete(["x"])),
            ("POST", lambda: scene.upload(store)),
        ):
            scene.proxy.clear()
            scene.proxy.on(method, times=1000).fail(fault)
            with pytest.raises(DurableRefusedError, match=advice) as caught:
                call()
            assert scene.url in str(caught.value)
            assert len(scene.proxy.seen(method)) == 1

    def test_refused_part_ends_the_upload_at_once(self, scene: Scene, open_scene: Callable[..., RetryingStore]):
        part(scene.proxy, 3).fail(Answer(403, "AccessDenied"))
        with pytest.raises(DurableRefusedError, match="part 3"):
            scene.upload(open_scene(concurrency=1))
        assert scene.proxy.parts_sent() == [1, 2, 3]
        scene.proxy.clear()
        scene.upload(open_scene())
        assert scene.proxy.parts_sent() == [3, 4, 5]
        assert scene.stored() == scene.data

    def test_missing_bucket_is_named(self, scene: Scene, open_scene: Callable[..., RetryingStore], tmp_path: Path):
        scene.bucket = "no-such-bucket"
        store = open_scene()
        for call in (
            lambda: store.get("x"),
            lambda: store.get_ranges("x", [(0, 1)]),
            lambda: store.put("x", b""),
            lambda: list(store.list("")),
            lambda: store.delete(["x"]),
            lambda: scene.upload(store),
            lambda: store.upload("x", scene.source, 1, journal=scene.journal),
        ):
            with pytest.raises(DurableRefusedError, match="no-such-bucket"):
                call()

    def test_wrong_credentials(
        self, scene: Scene, open_scene: Callable[..., RetryingStore], monkeypatch: pytest.MonkeyPatch
    ):
        if not scene.server.checks_credentials:
            pytest.skip(f"{scene.server.name} takes any credentials")
        for name, value in (("AWS_SECRET_ACCESS_KEY", "wrong-secret"), ("AWS_ACCESS_KEY_ID", "AKWRONGWRONG")):
            monkeypatch.setenv(name, value)
            store = open_scene()
            for call in (
                lambda store=store: store.get("x"),
                lambda store=store: store.put("x", b""),
                lambda store=store: list(store.list("")),
                lambda store=store: scene.upload(store),
                lambda store=store: store.upload("x", scene.source, 1, journal=scene.journal),
            ):
                with pytest.raises(DurableRefusedError, match=r"[Cc]redentials"):
                    call()

    def test_replaced_credentials_are_used(
        self,
        scene: Scene,
        open_scene: Callable[..., RetryingStore],
        credentials_file: Callable[[str], None],
    ):
        if not scene.server.checks_credentials:
            pytest.skip(f"{scene.server.name} takes any credentials")
        credentials_file("wrong-secret")
        store = open_scene()
        with pytest.raises(DurableRefusedError):
            store.put("x", b"1")
        held = scene.proxy.on("POST", query="^uploads").hold()
        credentials_file("")
        held.release()
        scene.upload(store)
        assert scene.stored() == scene.data
        store.put("x", b"1")
        assert store.get("x") == b"1"
