"""A supervisor's line to the coordinator: kept up, made again where it broke, and always telling the newest state."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from elastic.control.changes import NodeEnd
from elastic.control.leadership import address_of, is_url, leadership_at
from elastic.control.messages import MAX_NODE_BYTES, Answer, NodeHears, NodeSays, Question
from elastic.errors import ControlLostError, RefusedError
from peerstore.cluster.nodes import NodeId
from peerstore.errors import PeerRefusedError, PeerStoreError
from peerstore.frames import decode
from peerstore.transport.handshake import greet
from peerstore.transport.seam import Channel
from peerstore.transport.tcp import TcpTransport

log = logging.getLogger(__name__)

COORDINATOR = NodeId("coordinator")
ASKING = NodeId("command")
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_CONNECT_S = 5.0
_SEND_S = 10.0
_FLUSH_S = 1.0
_encode = msgspec.msgpack.Encoder().encode


def open_channel(address: str, *, job: str, me: NodeId, secret: bytes) -> Channel:
    """A connection to the coordinator; both have proven that they know the job's secret."""
    channel = TcpTransport(timeout_s=_SEND_S).connect(address, timeout_s=_CONNECT_S)
    try:
        greet(channel, job=job, me=me, secret=secret, expect=COORDINATOR)
    except BaseException:
        channel.close()
        raise
    channel.max_header_bytes, channel.max_payload_bytes = MAX_NODE_BYTES, 0
    return channel


def ask(address: str, question: Question, *, job: str, secret: bytes, timeout_s: float = 30.0) -> Answer:
    """One question of a command line, and its answer. ``address``: also a URL of where it is noted who leads."""
    if is_url(address):
        with contextlib.closing(leadership_at(address)) as leadership:
            address = address_of(leadership.read())
    try:
        channel = open_channel(address, job=job, me=ASKING, secret=secret)
        try:
            channel.send(_encode(question))
            incoming = channel.receive(within_s=timeout_s)
        finally:
            channel.close()
    except PeerRefusedError as error:
        raise RefusedError(f"the coordinator of job {job} refused: {error}") from error
    except PeerStoreError as error:
        raise ControlLostError(f"the coordinator of job {job} on {address} does not answer: {error}") from error
    if incoming is None:
        raise ControlLostError(f"the coordinator of job {job} closed the connection without an answer")
    answer = decode(incoming.header, Answer)
    if answer.refused:
        raise RefusedError(answer.refused)
    return answer


class Link:
    """``where`` says where the coordinator is, before every attempt, or raises :class:`ControlLostError`.

    ``heard`` gets its orders, ``came`` is told when it was reached, ``cut_off`` when it cannot be, ``refused`` when it
    has not wanted this node so many times in a row; all from threads of the link.
    """

    def __init__(
        self,
        where: Callable[[], str],
        *,
        job: str,
        node: NodeId,
        secret: bytes,
        refusals: int,
        heard: Callable[[NodeHears], None],
        came: Callable[[], None],
        cut_off: Callable[[str], None],
        refused: Callable[[str], None],
    ) -> None:
        self._where, self._job, self._node, self._secret = where, job, node, secret
        self._heard, self._came, self._cut_off, self._refused = heard, came, cut_off, refused
        self._refusals = refusals
        self._changed = threading.Condition()
        self._latest: NodeSays | None = None
        self._sent = 0
        """Number of the newest message that went out on this connection."""
        self._channel: Channel | None = None
        self._end = NodeEnd()
        """Of this connection."""
        self._stopping = False
        self._cut_until = 0.0
        self._threads = [
            threading.Thread(target=self._talk, name="elastic-link", daemon=True),
            threading.Thread(target=self._write, name="elastic-link-write", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def say(self, says: NodeSays) -> None:
        with self._changed:
            self._latest = says
            self._changed.notify_all()

    def cut(self, seconds: float) -> None:
        """Let go of the coordinator, and do not come back for so long."""
        with self._changed:
            self._cut_until = time.monotonic() + seconds
        self.drop()

    def drop(self) -> None:
        """Let go of this coordinator, and look again where it is."""
        with self._changed:
            channel = self._channel
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """What was said last goes out first, where it can."""
        with self._changed:
            self._changed.wait_for(lambda: self._channel is None or not self._is_due, _FLUSH_S)
            self._stopping = True
            channel = self._channel
            self._changed.notify_all()
        if channel is not None:
            channel.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    @property
    def _is_due(self) -> bool:
        return self._latest is not None and self._latest.number > self._sent

    def _talk(self) -> None:
        pause_s, refused = _FIRST_PAUSE_S, 0
        while self._may_connect():
            try:
                channel = open_channel(self._where(), job=self._job, me=self._node, secret=self._secret)
            except (PeerStoreError, ControlLostError) as error:
                refused = refused + 1 if isinstance(error, PeerRefusedError) else 0
                if refused >= self._refusals:
                    self._refused(str(error))
                    return
                self._cut_off(str(error))
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s, refused = _FIRST_PAUSE_S, 0
            if not self._takes(channel):
                channel.close()
                return
            self._came()
            try:
                while (incoming := channel.receive()) is not None:
                    self._heard(self._end.decode(incoming.header))
                why = "the coordinator closed the connection"
            except PeerStoreError as error:
                why = str(error)
            with self._changed:
                self._channel = None
                self._changed.notify_all()
            channel.close()
            if not self._stopping:
                self._cut_off(why)

    def _may_connect(self) -> bool:
        """Whether this link is still wanted, once it is not cut on purpose any more."""
        with self._changed:
            while not self._stopping and (left_s := self._cut_until - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return not self._stopping

    def _takes(self, channel: Channel) -> bool:
        """Whether this is the connection from now on: not when the link was closed while it was made."""
        with self._changed:
            if not self._stopping:
                self._channel, self._end, self._sent = channel, NodeEnd(), 0
                self._changed.notify_all()
            return not self._stopping

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or (self._channel is not None and self._is_due))
                if self._stopping:
                    return
                says, channel, end = self._latest, self._channel, self._end
                assert says is not None  # noqa: S101 - what was waited for
                assert channel is not None  # noqa: S101
            try:
                channel.send(end.encode(says))
            except PeerStoreError as error:
                log.info("the coordinator did not take a message: %s", error)
                channel.close()
            with self._changed:
                if self._channel is channel:
                    self._sent = says.number
                    self._changed.notify_all()
