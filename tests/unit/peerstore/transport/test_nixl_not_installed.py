"""Nearly nobody has it: an extra."""

import pytest

from peerstore.errors import RequestError
from peerstore.transport import nixl
from peerstore.transport.nixl import NixlTransport


def test_without_nixl_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr(nixl, "_MODULES", ("nixl_of_nobody._bindings",))
    with pytest.raises(RequestError, match=r"pip install 'tieredckpt\[nixl\]'"):
        NixlTransport()
