"""The namespace of a leader lease whose URL names none."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from elastic.errors import PolicyError
from integration.kubernetes import leadership

URL = urlsplit("kubernetes:///lease")


def test_namespace_comes_from_the_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "namespace").write_text("training\n")
    monkeypatch.setattr(leadership, "_NAMESPACE", tmp_path / "namespace")
    assert leadership._own_namespace(URL) == "training"


def test_missing_namespace_is_not_an_unreadable_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "_NAMESPACE", tmp_path / "namespace")
    with pytest.raises(PolicyError, match="this is no pod"):
        leadership._own_namespace(URL)
    (tmp_path / "namespace").mkdir()
    with pytest.raises(PolicyError, match="cannot read this pod's namespace"):
        leadership._own_namespace(URL)
