"""NIXL is an optional extra that few installations have."""

import pytest

from peerstore.errors import RequestError
from peerstore.transport import nixl
from peerstore.transport.nixl import NixlTransport


def test_missing_nixl_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(nixl, "_MODULES", ("nixl_of_nobody._bindings",))
    with pytest.raises(RequestError, match=r"pip install 'tieredckpt\[nixl\]'"):
        NixlTransport()
