"""Requests and responses: errors by name, payloads, deadlines, one-way requests, and the pool."""

import contextlib
import logging
import math
import os
import socket
import threading

import pytest

from peerstore import deadlines
from peerstore.errors import (
    FencedError,
    PeerStoreError,
    PeerUnreachableError,
    ProtocolError,
    RequestError,
    ShardDamagedError,
    UnavailableError,
)
from peerstore.rpc import Connection, ConnectionPool, Dispatcher, Operation, Reply
from peerstore.transport.unix import UnixChannel

PATIENCE_S = 200.0
NOTHING = type(None)


class OwnError(Exception):
    """An error that only this server's clients know."""


class Calls:
    """A connection between a client and a dispatcher on a thread, which ends with the test."""

    def __init__(self, operations, **options):
        here, there = socket.socketpair()
        self.line, self.server = Connection(UnixChannel(here, "server")), UnixChannel(there, "client")
        self.error = None
        dispatcher = Dispatcher(operations, version="7", **options)

        def serve():
            try:
                dispatcher.serve(self.server, "the context")
            except PeerStoreError as error:
                self.error = error
            finally:
                self.server.close()

        self.thread = threading.Thread(target=serve)
        self.thread.start()

    def call(self, op, body=None, result=NOTHING, **options):
        return self.line.call(op, body, result, timeout_s=PATIENCE_S, **options)

    def close(self):
        self.line.close()
        self.thread.join(PATIENCE_S)


@pytest.fixture
def serving():
    with contextlib.ExitStack() as cleanup:
        yield lambda operations, **options: cleanup.enter_context(contextlib.closing(Calls(operations, **options)))


def raising(error):
    def answer(_args, _context):
        raise error

    return Operation(NOTHING, NOTHING, answer)


def test_handler_gets_arguments_and_context(serving):
    calls = serving({"join": Operation(list[str], str, lambda args, context: " ".join([*args, context]))})
    assert calls.call("join", ["a", "b"], str) == "a b the context"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (FencedError("newer"), FencedError, "^newer$"),
        (ProtocolError("odd"), ProtocolError, "^odd$"),
        (PeerUnreachableError("the third node is silent"), PeerUnreachableError, "^the third node is silent$"),
        (OSError(28, "No space left"), UnavailableError, "raise: OSError: .*No space left"),
        (MemoryError(), UnavailableError, "raise: MemoryError"),
        (KeyError("x"), PeerStoreError, "internal error: KeyError: 'x'"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), RequestError, "invalid start byte"),
    ],
)
def test_error_of_a_handler_is_raised_by_name_and_the_connection_stays(serving, error, kind, message, caplog):
    calls = serving({"raise": raising(error), "fine": Operation(NOTHING, int, lambda *_: 7)})
    with caplog.at_level(logging.CRITICAL), pytest.raises(kind, match=message) as found:
        calls.call("raise")
    assert type(found.value) is kind
    assert calls.call("fine", None, int) == 7


def test_errors_of_the_servers_own_are_sent_by_name(serving):
    calls = serving({"raise": raising(OwnError("mine"))}, errors=(OwnError,))
    with pytest.raises(PeerStoreError, match="OwnError: mine"):
        calls.call("raise")


def test_refused_request_leaves_the_connection_usable(serving):
    calls = serving({"fine": Operation(int, int, lambda number, _: number)})
    with pytest.raises(ProtocolError, match="not a int"):
        calls.call("fine", "text", int)
    with pytest.raises(RequestError, match=r"this agent \(7\) has no operation 'other'"):
        calls.call("other")
    with pytest.raises(ProtocolError, match="'fine' came with 3 bytes that belong to nothing"):
        calls.call("fine", 7, int, payload=[memoryview(b"abc")])
    assert calls.call("fine", 7, int) == 7


def test_malformed_envelope_is_answered_and_ends_the_connection(serving):
    calls = serving({})
    calls.line.channel.send(b"\xc1")
    with pytest.raises(ProtocolError, match="not a Request"):
        calls.line.receive_response("nothing", NOTHING, timeout_s=PATIENCE_S)
    assert calls.line.channel.receive(idle_s=PATIENCE_S) is None
    assert isinstance(calls.error, ProtocolError)


def test_payloads_go_both_ways_and_an_unread_one_is_dropped(serving):
    server = []

    def echo(_args, _context, payload_bytes):
        data = bytearray(payload_bytes)
        server[0].receive_into([memoryview(data)])
        return Reply(None, [memoryview(data)])

    calls = serving({
        "echo": Operation(NOTHING, NOTHING, echo, takes_payload=True),
        "ignore": Operation(NOTHING, int, lambda _args, _context, size: size, takes_payload=True),
    })  # fmt: skip
    server.append(calls.server)
    found = bytearray(1 << 20)
    sent = os.urandom(1 << 20)
    calls.call("echo", payload=[memoryview(sent)], into=[memoryview(found)])
    assert found == sent
    assert calls.call("ignore", None, int, payload=[memoryview(sent)]) == 1 << 20
    assert calls.call("ignore", None, int) == 0


def test_a_response_of_another_size_is_refused(serving):
    calls = serving({"bytes": Operation(NOTHING, NOTHING, lambda *_: Reply(None, [memoryview(b"abc")]))})
    with pytest.raises(ProtocolError, match="3 bytes instead of the requested 2 bytes"):
        calls.call("bytes", into=[memoryview(bytearray(2))])


def test_error_of_a_one_way_request_ends_the_connection(serving):
    seen = []
    calls = serving({
        "note": Operation(int, NOTHING, lambda number, _: seen.append(10 // number), is_one_way=True),
        "noted": Operation(NOTHING, list[int], lambda *_: seen),
        "damage": Operation(NOTHING, NOTHING, raising(ShardDamagedError("bad")).answer, is_one_way=True),
    })  # fmt: skip
    calls.line.send("note", 5)
    calls.line.send("note", 2)
    assert calls.call("noted", None, list[int]) == [2, 5]
    calls.line.send("damage", None)
    assert calls.line.channel.receive(idle_s=PATIENCE_S) is None
    assert isinstance(calls.error, ShardDamagedError)


def test_reply_is_told_once_whether_it_was_sent(serving):
    told = []
    calls = serving({
        "fine": Operation(NOTHING, int, lambda *_: Reply(1, done=told.append)),
        "refused": Operation(NOTHING, int, lambda *_: Reply(None, error=FencedError("no"), done=told.append)),
        "odd": Operation(NOTHING, int, lambda *_: Reply("\udc80", done=told.append)),
        "closing": Operation(NOTHING, int, lambda *_: (calls.server.close(), Reply(1, done=told.append))[1]),
    })  # fmt: skip
    assert calls.call("fine", None, int) == 1
    with pytest.raises(FencedError):
        calls.call("refused", None, int)
    with pytest.raises(PeerStoreError, match="internal error"):
        calls.call("odd", None, int)
    with pytest.raises(PeerUnreachableError):
        calls.call("closing", None, int)
    calls.close()
    assert told == [True, True, False, False]


def test_response_above_the_limit_is_an_error_and_the_connection_stays(serving):
    calls = serving({
        "long": Operation(NOTHING, str, lambda *_: "x" * 10_000),
        "short": Operation(NOTHING, str, lambda *_: "x"),
    })  # fmt: skip
    calls.server.max_header_bytes = 1000
    with pytest.raises(PeerStoreError, match="above the limit of 1000"):
        calls.call("long", None, str)
    assert calls.call("short", None, str) == "x"


@pytest.mark.parametrize("result", [object(), "a name that is not UTF-8: \udc80", Reply("\udc80")])
def test_unencodable_result_is_an_error(serving, result, caplog):
    calls = serving({"odd": Operation(NOTHING, str, lambda *_: result), "fine": Operation(NOTHING, int, lambda *_: 7)})
    with caplog.at_level(logging.CRITICAL), pytest.raises(PeerStoreError, match="internal error"):
        calls.call("odd", None, str)
    assert calls.call("fine", None, int) == 7


def test_error_about_an_undecodable_file_name_is_sent(serving):
    calls = serving({"raise": raising(FencedError("file \udc80 is newer"))})
    with pytest.raises(FencedError, match=r"file .* is newer"):
        calls.call("raise")


def test_request_carries_the_remaining_time(serving):
    calls = serving({"left": Operation(NOTHING, float, lambda *_: deadlines.remaining_s())})
    assert 0 < calls.line.call("left", None, float, timeout_s=50.0) <= 50.0
    with deadlines.timeout_scope(20.0):
        assert 0 < calls.line.call("left", None, float, timeout_s=50.0) <= 20.0
    calls.line.send("left", None)
    assert math.isinf(calls.line.receive_response("left", float, timeout_s=PATIENCE_S))


# -- the pool ----------------------------------------------------------------------------------------------------------


class Server:
    """Connections of a pool, with their other ends."""

    def __init__(self):
        self.ends, self.greeted = [], []
        self.pool = ConnectionPool(self.connect, lambda line, _until: self.greeted.append(line), "n1")

    def connect(self, _until):
        here, there = socket.socketpair()
        there.settimeout(PATIENCE_S)
        self.ends.append(there)
        return UnixChannel(here, "n1")

    def close(self):
        self.pool.close(busy=True)
        for end in self.ends:
            end.close()


@pytest.fixture
def server():
    with contextlib.closing(Server()) as one:
        yield one


def test_connections_are_greeted_once_and_used_again(server):
    with server.pool.connection() as first:
        assert server.pool.take() is None
    with server.pool.connection() as second:
        assert second is first
    with server.pool.connection(fresh=True) as third:
        assert third is not first
    assert server.greeted == [first, third]


@pytest.mark.parametrize(("error", "kept"), [(PeerUnreachableError, 0), (ProtocolError, 0), (FencedError, 1)])
def test_only_a_usable_connection_is_kept(server, error, kept):
    with pytest.raises(error), server.pool.connection():
        raise error("it ended like this")
    assert len(server.pool._idle) == kept
    if not kept:
        assert server.ends[0].recv(1) == b""


def test_closing_ends_connections_in_use_at_once_or_after_their_call(server):
    used = server.pool.open()
    server.pool.close(busy=False)
    used.channel.send(b"still open")
    server.pool.put(used)
    assert server.ends[0].recv(100).endswith(b"still open")
    assert server.ends[0].recv(1) == b""
    with pytest.raises(PeerUnreachableError, match="n1: this client was closed"):
        server.pool.open()


def test_connection_with_a_failed_greeting_is_closed(server):
    def refuse(_line, _until):
        raise RequestError("not you")

    server.pool._greet = refuse
    with pytest.raises(RequestError, match="not you"), server.pool.connection():
        """It is never reached."""
    assert server.ends[0].recv(1) == b""


def test_a_forked_process_uses_none_of_its_parents_connections(server):
    with server.pool.connection() as line:
        """Leave it idle."""
    child = os.fork()
    if not child:
        os._exit(0 if server.pool.take() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    line.channel.send(b"still the parent's")
    assert server.ends[0].recv(100).endswith(b"still the parent's")
