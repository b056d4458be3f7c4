"""The supervisor's server for the ranks of its node, over a Unix socket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from elastic.control.control_messages import (
    MAX_RANK_MESSAGE_BYTES,
    RANK_PROTOCOL,
    ExitReason,
    RankDesired,
    RankHello,
    RankStatus,
)
from peerstore.errors import ProtocolError
from peerstore.message_codec import decode_message, encode_message
from peerstore.transport.unix import UnixChannel, UnixListener

_HELLO_S = 10.0


class RankConnection:
    """Connection of one rank."""

    def __init__(self, channel: UnixChannel) -> None:
        self._channel = channel
        self._sending = threading.Lock()

    def send(self, desired: RankDesired) -> None:
        """Send a message without blocking. If the socket's buffer is full, end the connection."""
        with self._sending:
            if not self._channel.try_send(encode_message(desired)):
                self.close()

    def close(self) -> None:
        self._channel.shut()


class RankServer:
    """Unix-socket server for the ranks of one node.

    ``on_connect`` returns why a process is refused, or "". ``on_status`` receives each report of an accepted process,
    and ``on_disconnect`` runs after its connection has closed. All run on the connection's thread.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_connect: Callable[[str, RankConnection], str],
        on_status: Callable[[str, RankStatus], None],
        on_disconnect: Callable[[str, RankConnection], None],
    ) -> None:
        self.path = path
        self._on_connect, self._on_status, self._on_disconnect = on_connect, on_status, on_disconnect
        self._listener = UnixListener(path, self._serve, name="supervisor", describe_refusal=_encode_refusal)
        self._listener.start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self, channel: UnixChannel) -> None:
        channel.max_header_bytes, channel.max_payload_bytes = MAX_RANK_MESSAGE_BYTES, 0
        connection = RankConnection(channel)
        token = self._admit(channel, connection)
        if not token:
            return
        try:
            while (incoming := channel.receive()) is not None:
                self._on_status(token, decode_message(incoming.header, RankStatus))
        finally:
            self._on_disconnect(token, connection)

    def _admit(self, channel: UnixChannel, connection: RankConnection) -> str:
        incoming = channel.receive(within_s=_HELLO_S)
        if incoming is None:
            return ""
        hello = decode_message(incoming.header, RankHello)
        if hello.protocol != RANK_PROTOCOL:
            refused = f"protocol {hello.protocol} is not spoken here, this is {RANK_PROTOCOL}"
        else:
            refused = self._on_connect(hello.token, connection)
        if refused:
            connection.send(_refusal(refused))
            raise ProtocolError(refused)
        return hello.token


def _refusal(reason: str) -> RankDesired:
    return RankDesired(exit=ExitReason.REFUSED, reason=reason)


def _encode_refusal(error: ProtocolError) -> bytes:
    return encode_message(_refusal(str(error)))
