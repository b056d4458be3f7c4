"""The namespace of a leader lease whose URL names none."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from elastic.errors import PolicyError
from integration.kubernetes import leader_lease

URL = urlsplit("kubernetes:///lease")


def test_namespace_comes_from_the_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "namespace").write_text("training\n")
    monkeypatch.setattr(leader_lease, "_NAMESPACE", tmp_path / "namespace")
    assert leader_lease._own_namespace(URL) == "training"


def test_missing_namespace_differs_from_an_unreadable_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_lease, "_NAMESPACE", tmp_path / "namespace")
    with pytest.raises(PolicyError, match="not in a pod"):
        leader_lease._own_namespace(URL)
    (tmp_path / "namespace").mkdir()
    with pytest.raises(PolicyError, match="cannot read this pod's namespace"):
        leader_lease._own_namespace(URL)
