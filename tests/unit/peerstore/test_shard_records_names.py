"""Names of jobs, incarnations and blobs: each is one plain file name."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerstore.errors import InvalidNameError
from peerstore.shard_records import validate_blob_name, validate_incarnation, validate_job_name


@given(st.text())
def test_accepted_name_is_a_file_name(text):
    for check in (validate_job_name, validate_incarnation, validate_blob_name):
        with contextlib.suppress(InvalidNameError):
            assert check(text) == text
            assert text.isascii()
            assert text
            assert not set(text) & set("/\0\n ")
            assert text not in (".", "..")
            assert len(text) <= 240


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "..a", "-", "x" * 128, "0"])
def test_job_names_that_are_fine(name):
    assert validate_job_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "...", "a/b", "a b", "ä", "x" * 129, "a\n", None, 7, b"a"])
def test_invalid_job_names_are_refused(name):
    with pytest.raises(InvalidNameError, match="1 to 128 letters"):
        validate_job_name(name)
