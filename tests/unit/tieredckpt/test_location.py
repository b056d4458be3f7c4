"""Names from outside: jobs, steps, and the URLs that contain them."""

import re
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peerstore.errors import InvalidNameError
from peerstore.shard_records import VersionId, validate_job_name
from tieredckpt.errors import UsageError
from tieredckpt.location import Location, check_step, location_for_checkpoint_id, parse_location, parse_step


@pytest.mark.parametrize(
    ("target", "job", "step"),
    [
        ("tiered://llama-8b", "llama-8b", None),
        ("tiered://llama-8b/", "llama-8b", None),
        ("tiered://llama-8b/step-120", "llama-8b", 120),
        ("tiered://llama-8b/step-120/", "llama-8b", 120),
        ("tiered://j/step-0", "j", 0),
        ("tiered://j/step-000000000007", "j", 7),
        ("llama_8b.v2", "llama_8b.v2", None),
        ("llama/step-3", "llama", 3),
        (Path("tiered://llama-8b/step-5"), "llama-8b", 5),
        (PurePosixPath("llama-8b"), "llama-8b", None),
        (".hidden", ".hidden", None),
        ("-dash", "-dash", None),
        ("..a", "..a", None),
        ("x" * 128, "x" * 128, None),
    ],
)
def test_a_location(target, job, step):
    assert parse_location(target) == Location(job, step)


@pytest.mark.parametrize("target", ["llama/step-3@17", "tiered://llama/step-3@17", Path("tiered://llama/step-3@17/")])
def test_epoch_follows_the_step(target):
    location = parse_location(target)
    assert location == Location("llama", 3, 17)
    assert str(location) == "tiered://llama/step-3@17"
    assert parse_location(str(location)) == location
    assert location.includes(VersionId(17, 3, 0, "a"))
    assert not location.includes(VersionId(18, 3, 0, "a"))
    assert not location.includes(VersionId(17, 4, 0, "a"))


def test_location_without_epoch_includes_all_attempts():
    assert all(parse_location("llama/step-3").includes(VersionId(epoch, 3, 0, "a")) for epoch in (1, 2))
    assert parse_location("llama").includes(VersionId(1, 9, 0, "a"))


def test_checkpoint_id_keeps_the_epoch_of_the_reader():
    reader = parse_location("llama/step-3@17")
    assert location_for_checkpoint_id("tiered://llama", reader, None) == reader
    assert location_for_checkpoint_id("tiered://other", reader, None) == Location("other")
    assert location_for_checkpoint_id("tiered://llama/step-4", reader, None) == Location("llama", 4)


@pytest.mark.parametrize(("text", "step"), [("7", (7, None)), ("7@3", (7, 3)), ("0@0", (0, 0))])
def test_step_with_epoch_is_parsed(text, step):
    assert parse_step(text) == step


@pytest.mark.parametrize("text", ["", "-1", "x", "3@", "@3", "3@-1", "3@1@2", "step-3", "3@x"])
def test_text_that_names_no_step_is_refused(text):
    with pytest.raises(UsageError, match="write STEP or STEP@EPOCH"):
        parse_step(text)


@pytest.mark.parametrize(
    "target",
    [
        "",
        "a@3",
        "tiered://a/step-1@",
        "tiered://a/step-@1",
        "tiered://a/step-1@-1",
        "/",
        ".",
        "..",
        "...",
        "tiered://",
        "tiered:///",
        "tiered://.",
        "tiered://..",
        "tiered://../x",
        "tiered://a/../b",
        "tiered://a/step-1/..",
        "tiered://a//step-1",
        "tiered:////etc",
        "tiered://a/step-",
        "tiered://a/step--1",
        "tiered://a/step-+1",
        "tiered://a/step-1.5",
        "tiered://a/step-1 ",
        "tiered://a/STEP-1",
        "tiered://a/step-" + "9" * 19,
        "tiered://a/step-\u0661",  # a digit, but not one of ours
        "tiered://user@a",
        "tiered://a:80",
        "tiered://a?b=c",
        "tiered://a#b",
        "tiered://a%2e%2e",
        "tiered://a b",
        "tiered://a\n",
        "tiered://a\0b",
        "tiered://a\\b",
        "tiered://ünïcode",
        "tiered://\u202ea",
        "tiered://a\u0300",
        "tiered://" + "x" * 129,
        "s3://bucket/x",
        "file:///etc",
        "TIERED://a",
        "tiered:a",
        "a\ud800",
        b"tiered://a",
        None,
        7,
        ["tiered://a"],
    ],
)
def test_invalid_location_is_refused(target):
    with pytest.raises(UsageError) as info:
        parse_location(target)
    assert repr(target)[:20] in str(info.value)


@given(st.text(max_size=140))
@example("a/b")
@example("..")
def test_job_name_is_a_plain_file_name(text):
    allowed = re.fullmatch(r"[A-Za-z0-9._-]{1,128}", text) is not None and bool(text.strip("."))
    try:
        name = validate_job_name(text)
    except InvalidNameError:
        assert not allowed
    else:
        assert allowed
        assert Path("/arena", name).name == name == text
        assert Path("/arena", name).resolve().parent == Path("/arena")


@given(st.text(max_size=40) | st.text("tiered:/.step-0129", max_size=30))
def test_any_text_is_a_location_or_a_usage_error(text):
    try:
        found = parse_location(text)
    except UsageError:
        return
    assert parse_location(str(found)) == found
    assert validate_job_name(found.job) == found.job


@given(st.integers(0, 10**18 - 1))
def test_location_round_trips(step):
    assert parse_location(str(Location(validate_job_name("j"), step))).step == step


@pytest.mark.parametrize("step", [0, 1, (1 << 62) - 1])
def test_steps(step):
    assert check_step(step) == step


@pytest.mark.parametrize("step", [-1, 1 << 62, True, False, 1.0, "1", None, float("nan")])
def test_invalid_step_is_refused(step):
    with pytest.raises(UsageError, match="pass an integer from 0 to"):
        check_step(step)
