"""Every fault on the way to S3, by name: a class to inherit with a ``server`` fixture."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import (
    CutResponse,
    DropResponse,
    FlipRequestBit,
    FlipResponseBit,
    Hang,
    ReplyBeforeBody,
    ReplyWithStatus,
    ResetRequest,
    TrickleResponse,
)
from tests.support.http_exchange import Exchange
from tests.support.upload_contract import ALL, MIB, UploadCase, part_rule
from tieredckpt.durable.retrying_store import RetryingStore
from tieredckpt.errors import DurableRefusedError, StoreBusyError, TierUnavailableError

PASSING = {
    "internal error": ReplyWithStatus(500, "InternalError"),
    "bad gateway": ReplyWithStatus(502),
    "slow down": ReplyWithStatus(503, "SlowDown", retry_after=0.1),
    "too many requests": ReplyWithStatus(429, retry_after=0.1),
    "request timeout": ReplyWithStatus(400, "RequestTimeout"),
    "conflict": ReplyWithStatus(409, "OperationAborted"),
    "silence": Hang(),
    "reset before the answer": ResetRequest(0),
}
PASSING_FOR_PARTS = {
    **PASSING,
    "reset in the middle": ResetRequest(2 * MIB),
    "slow down before the end": ReplyBeforeBody(503, "SlowDown"),
    "damaged on the way": ReplyWithStatus(400, "BadDigest"),
    "answer lost": DropResponse(),
    "answer without an ETag": ReplyWithStatus(200),
}
REFUSED = {
    "access denied": (ReplyWithStatus(403, "AccessDenied"), "AccessDenied"),
    "expired token": (ReplyWithStatus(400, "ExpiredToken"), "log in again"),
    "wrong region": (ReplyWithStatus(301, "PermanentRedirect"), "region"),
    "wrong clock": (ReplyWithStatus(403, "RequestTimeTooSkewed"), "clock"),
    "no bucket": (ReplyWithStatus(404, "NoSuchBucket"), "Create the bucket"),
    "quota": (ReplyWithStatus(507), "Make room"),
}
DATA = random.Random(3).randbytes(300_000)


_IN_A_PUSH = {"slow down", "reset before the answer"}
"""Of the faults that all calls have in common: each of them is part of a push where a part fails."""


def each_fault(faults: dict[str, object]) -> pytest.MarkDecorator:
    """All of the faults in a push."""
    return pytest.mark.parametrize("fault", faults.values(), ids=faults.keys())


def common_faults(faults: dict[str, object]) -> pytest.MarkDecorator:
    """In a push those that only this call has, and two of the common ones; in a night all of them."""
    of_the_night = PASSING.keys() - _IN_A_PUSH
    marks = {name: pytest.mark.nightly if name in of_the_night else () for name in faults}
    return pytest.mark.parametrize("fault", [pytest.param(faults[n], id=n, marks=marks[n]) for n in faults])


class FaultContract:
    @pytest.fixture
    def hasty(self, open_scene: Callable[..., RetryingStore]) -> RetryingStore:
        """Takes a second of silence for an answer."""
        return open_scene(timeout_s=1.0)

    @each_fault(PASSING_FOR_PARTS)
    def test_only_the_failed_part_is_sent_again(self, scene: UploadCase, hasty: RetryingStore, fault: object):
        part_rule(scene.proxy, 2).fail(fault)
        told: list[int] = []
        scene.upload(hasty, progress=told.append)
        assert scene.stored() == scene.data
        assert scene.proxy.parts_sent() == sorted([*ALL, 2])
        assert sum(told) == len(scene.data)

    @common_faults(PASSING_FOR_PARTS)
    def test_a_small_upload_is_sent_again(self, scene: UploadCase, hasty: RetryingStore, fault: object):
        scene.proxy.on("PUT", scene.name).fail(fault)
        hasty.upload(scene.name, scene.source, 3 * MIB, journal=scene.journal)
        assert scene.stored() == scene.data[: 3 * MIB]
        assert len(scene.proxy.seen("PUT", scene.name)) == 2

    @common_faults(PASSING)
    def test_upload_begins_despite_a_fault(self, scene: UploadCase, hasty: RetryingStore, fault: object):
        scene.proxy.on("POST", query="^uploads").fail(fault)
        scene.upload(hasty)
        assert scene.stored() == scene.data
        assert scene.proxy.parts_sent() == ALL

    @common_faults({**PASSING, "answer lost": DropResponse()})
    def test_upload_completes_despite_a_fault(self, scene: UploadCase, hasty: RetryingStore, fault: object):
        scene.proxy.on("POST", query="uploadId=").fail(fault)
        scene.upload(hasty)
        assert scene.stored() == scene.data
        assert scene.proxy.parts_sent() == ALL
        assert scene.unfinished() == []

    def test_upload_with_a_lost_create_response_is_aborted_later(self, scene: UploadCase, hasty: RetryingStore):
        scene.proxy.on("POST", query="^uploads").fail(DropResponse())
        scene.upload(hasty)
        assert scene.stored() == scene.data
        assert hasty.abort_stale_uploads("", older_than_s=0) == 1

    def test_every_part_fails_once(self, scene: UploadCase, hasty: RetryingStore):
        faults = (ReplyWithStatus(500), Hang(), ResetRequest(MIB), ReplyWithStatus(503, "SlowDown"), DropResponse())
        for number, fault in zip(ALL, faults, strict=True):
            part_rule(scene.proxy, number).fail(fault)
        scene.upload(hasty)
        assert scene.stored() == scene.data
        assert scene.proxy.parts_sent() == sorted([*ALL, *ALL])

    @common_faults({**PASSING, "answer lost": DropResponse()})
    def test_a_put_is_repeated(self, scene: UploadCase, hasty: RetryingStore, fault: object):
        scene.proxy.on("PUT", "small").fail(fault)
        hasty.put("small", DATA)
        assert hasty.get("small") == DATA
        assert len(scene.proxy.seen("PUT", "small")) == 2

    @common_faults(
        {
            **PASSING,
            "cut answer": CutResponse(1000),
            "cut at once": CutResponse(0),
            "reset in the middle": CutResponse(1000, reset=True),
        }
    )
    def test_a_read_is_repeated(self, scene: UploadCase, hasty: RetryingStore, fault: object):
        hasty.put("small", DATA)
        scene.proxy.on("GET", "small").fail(fault)
        assert hasty.get("small") == DATA
        scene.proxy.on("GET", "small").fail(fault)
        (got,) = hasty.get_ranges("small", [(5, 200_005)])
        assert bytes(got) == DATA[5:200_005]

    @common_faults(PASSING)
    def test_list_and_delete_are_repeated(self, scene: UploadCase, hasty: RetryingStore, fault: object):
        hasty.put("a/1", b"1")
        scene.proxy.on("GET", query="list-type=2").fail(fault)
        assert [info.name for info in hasty.list("a/")] == ["a/1"]
        scene.proxy.on("POST", query="^delete").fail(fault)
        hasty.delete(["a/1"])
        assert list(hasty.list("a/")) == []

    def test_slow_response_is_awaited(self, scene: UploadCase, hasty: RetryingStore):
        hasty.put("small", DATA)
        scene.proxy.on("GET", "small").fail(TrickleResponse())
        assert hasty.get("small") == DATA
        assert len(scene.proxy.seen("GET", "small")) == 1

    def test_bit_flipped_in_a_response_reaches_the_caller(self, scene: UploadCase, hasty: RetryingStore):
        hasty.put("small", DATA)
        scene.proxy.on("GET", "small").fail(FlipResponseBit(1000))
        got = hasty.get("small")
        assert len(got) == len(DATA)
        assert [i for i in range(len(DATA)) if got[i] != DATA[i]] == [1000]

    def test_bit_flipped_in_a_part_is_refused_and_sent_again(
        self, scene: UploadCase, open_scene: Callable[..., RetryingStore]
    ):
        store = open_scene(options={"checksum": "md5"})
        part_rule(scene.proxy, 4).fail(FlipRequestBit(MIB))
        scene.upload(store)
        assert scene.stored() == scene.data
        assert scene.proxy.parts_sent() == sorted([*ALL, 4])

    # -- faults that do not pass ------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("fault", "error"),
        [
            (ReplyWithStatus(500, "InternalError"), TierUnavailableError),
            (ReplyWithStatus(503, "SlowDown"), StoreBusyError),
            (ResetRequest(0), TierUnavailableError),
        ],
        ids=["internal error", "slow down", "reset"],
    )
    def test_unreachable_store_is_unavailable(
        self, scene: UploadCase, open_scene: Callable[..., RetryingStore], fault: object, error: type[Exception]
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
        self, scene: UploadCase, open_scene: Callable[..., RetryingStore]
    ):
        part_rule(scene.proxy, 5).hold()  # takes part in nothing: the upload must end without it

        def once_the_others_are_there(exchange: Exchange) -> None:
            scene.proxy.wait_for(
                lambda proxy: {1, 2, 3} <= {each.part for each in proxy.seen("PUT") if each.status == 200}
            )
            ReplyWithStatus(500, "InternalError")(exchange)

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
    def test_refusal_is_final_and_has_advice(self, scene: UploadCase, store: RetryingStore, fault: object, advice: str):
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

    def test_refused_part_ends_the_upload_at_once(self, scene: UploadCase, open_scene: Callable[..., RetryingStore]):
        part_rule(scene.proxy, 3).fail(ReplyWithStatus(403, "AccessDenied"))
        with pytest.raises(DurableRefusedError, match="part 3"):
            scene.upload(open_scene(concurrency=1))
        assert scene.proxy.parts_sent() == [1, 2, 3]
        scene.proxy.clear()
        scene.upload(open_scene())
        assert scene.proxy.parts_sent() == [3, 4, 5]
        assert scene.stored() == scene.data

    def test_missing_bucket_is_named(self, scene: UploadCase, open_scene: Callable[..., RetryingStore], tmp_path: Path):
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
        self, scene: UploadCase, open_scene: Callable[..., RetryingStore], monkeypatch: pytest.MonkeyPatch
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
        scene: UploadCase,
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
