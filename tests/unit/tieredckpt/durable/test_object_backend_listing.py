"""A listing reads only the objects under the requested prefix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tieredckpt.durable.filesystem_backends import DirectoryBackend, FsspecBackend
from tieredckpt.durable.object_backend import ObjectBackend
from tieredckpt.durable.obstore_backend import open_obstore_backend
from tieredckpt.settings import DurableSettings

NAMES = [
    "job/manifests/1.manifest",
    "job/step-1/.metadata",
    "job/step-1/deep/er/x",
    "job/step-12/.metadata",
    "job/step-file",
    "job/steps/1/a",
    "job/steps/1/b",
    "job/steps/2/a",
    "job2/step-1/.metadata",
    "step-1/.metadata",
]


@pytest.fixture(params=["directory", "memory", "fsspec"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectBackend]:
    made: ObjectBackend
    if request.param == "directory":
        made = DirectoryBackend(tmp_path)
    elif request.param == "memory":
        made = open_obstore_backend("memory://", DurableSettings())
    else:
        made = FsspecBackend(f"local://{tmp_path}", {})
    for name in NAMES:
        made.put(name, b"x", create_only=False)
    yield made
    made.close()


PREFIXES = ["job/step-", "job/step-1", "job/step-1/", "job/step-1/.m", "job/steps/", "step", "job", "job/", "no/s", ""]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_listing_reads_only_the_prefix(backend: ObjectBackend, prefix: str):
    assert sorted(info.name for info in backend.list(prefix)) == [name for name in NAMES if name.startswith(prefix)]
