"""Options of ``elastic run`` for the address of the job's store."""

from __future__ import annotations

import pytest

from elastic.cli.run import _store
from elastic.errors import PolicyError
from elastic.settings import wants_rootless_store
from peerstore.errors import RequestError


def test_option_overrides_the_environment(monkeypatch):
    monkeypatch.setenv("ELASTIC_ROOTLESS", "1")
    assert [_store(said) for said in ("", "single", "rootless", "head:29500")] == [
        "rootless",
        "",
        "rootless",
        "head:29500",
    ]
    monkeypatch.setenv("ELASTIC_ROOTLESS", "0")
    assert [_store(said) for said in ("", "rootless")] == ["", "rootless"]


def test_invalid_store_address_is_refused():
    with pytest.raises(RequestError, match="host:port"):
        _store("rotless")


def test_store_switch_is_on_or_off():
    assert not wants_rootless_store({})
    with pytest.raises(PolicyError, match="0 or 1"):
        wants_rootless_store({"ELASTIC_ROOTLESS": "yes"})
