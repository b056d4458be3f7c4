from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tieredckpt.durable.object_store import UploadSource
from tieredckpt.errors import UsageError

DATA = random.Random(5).randbytes(20_000)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bounds=st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))).map(sorted))
def test_any_window(tmp_path: Path, bounds: list[int]):
    path = tmp_path / "file"
    path.write_bytes(DATA)
    start, stop = bounds
    with UploadSource(path, len(DATA)) as source, source.window(start, stop) as view:
        assert bytes(view) == DATA[start:stop]
        assert view.readonly


def test_shrunk_file_is_detected_before_it_is_read(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with UploadSource(path, len(DATA)) as source:
        path.write_bytes(b"short")
        with pytest.raises(UsageError, match="5 bytes"), source.window(0, 10):
            pass


def test_a_view_does_not_outlive_its_window(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with UploadSource(path, len(DATA)) as source:
        with source.window(0, 100) as view:
            pass
        with pytest.raises(ValueError, match="released"):
            view[0]
