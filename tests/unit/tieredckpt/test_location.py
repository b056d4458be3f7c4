"""Names that enter from outside: jobs, steps, and the URLs that carry them."""

import re
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peerstore.errors import InvalidNameError
from peerstore.shard_records import validate_job_name
from tieredckpt.errors import UsageError
from tieredckpt.location import Location, check_step, parse_location


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


@pytest.mark.parametrize(
    "target",
    [
        "",
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
    with pytest.raises(UsageError, match="an integer from 0 on"):
        check_step(step)
