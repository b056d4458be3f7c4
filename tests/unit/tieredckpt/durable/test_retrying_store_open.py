from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import UsageError
from tieredckpt.settings import DurableSettings


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("relative/path", {}, "neither a URL .* nor an absolute path"),
        ("", {}, "neither a URL .* nor an absolute path"),
        ("s3:///prefix", {}, "names no bucket"),
        ("file://elsewhere/path", {}, "file:///path"),
        ("/path", {"endpoint": "x"}, "takes none, found endpoint"),
        ("gs://bucket/x", {"nonsense": "1"}, "nonsense"),
        ("az://container/x", {}, "[Aa]ccount"),
        ("nonsense://x", {}, "no file system is installed for nonsense://"),
        ("missing://x", {}, "pip install no_such_module_anywhere"),
    ],
)
def test_unopenable_store_is_refused_with_a_reason(url: str, options: dict[str, str], message: str):
    fsspec.register_implementation("missing", "no_such_module_anywhere.FS", clobber=True)
    with pytest.raises(UsageError, match=message):
        open_store(url, DurableSettings(options=options))


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}"])
def test_directory_matches_any_of_its_names(form: str, tmp_path: Path):
    store = open_store(form.format(f"{tmp_path}/a b"), DurableSettings())
    store.put("x", b"1")
    assert (tmp_path / "a b" / "x").read_bytes() == b"1"
    store.close()


def test_an_escaped_file_url(tmp_path: Path):
    store = open_store(f"file://{tmp_path}/a%20b", DurableSettings())
    store.put("x", b"1")
    assert (tmp_path / "a b" / "x").read_bytes() == b"1"
    store.close()
