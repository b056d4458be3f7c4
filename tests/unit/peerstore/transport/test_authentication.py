"""Mutual authentication of peers, and the attacks that it prevents."""

import contextlib

import msgspec
import pytest

from peerstore.errors import InvalidNameError, PeerRefusedError, PeerUnreachableError, ProtocolError, RequestError
from peerstore.testing import MemoryNetwork, StepClock
from peerstore.transport.authentication import (
    Challenge,
    Hello,
    PeerIdentity,
    Proof,
    Welcome,
    authenticate_client,
    authenticate_to_server,
    hmac_proof,
)
from peerstore.transport.base import MAX_MESSAGE_HEADER_BYTES, MAX_PAYLOAD_BYTES
from peerstore.transport.framing import FRAME_PREFIX
from tests.support.channel_pairs import PATIENCE_S, ChannelPair, channel_pair

SECRET = b"the secret of the job"
OTHER = b"the secret of another"
NONCE = b"n" * 32
encode = msgspec.msgpack.encode


def decode(channel, kind):
    return msgspec.msgpack.decode(channel.receive(idle_s=PATIENCE_S).header, type=kind)


@pytest.fixture
def clock():
    return StepClock()


@pytest.fixture
def line(clock):
    network = MemoryNetwork(clock=clock)
    made = ChannelPair(network.transport("n1"), network.transport("n2"), "n2:0")
    yield made
    made.close()


def knows(job="job", secret=SECRET):
    return {job: secret}.get


def admitted(channel, **more):
    return authenticate_client(channel, **{"me": "n2", "secret_of": knows(), "version": "0.2", **more})


def greeted(channel, **more):
    return authenticate_to_server(channel, **{"job": "job", "me": "n1", "secret": SECRET, "version": "0.1", **more})


@pytest.mark.parametrize("kind", ["memory", "tcp", "tls"])
def test_both_sides_learn_the_peer_identity(kind, tmp_path):
    with channel_pair(kind, tmp_path) as line:
        near, far = line.connected_ends()
        server = line.run_in_background(admitted, far)
        assert greeted(near, expect="n2") == PeerIdentity("job", "n2", 3, "0.2")
        assert server.result(PATIENCE_S) == PeerIdentity("job", "n1", 3, "0.1")
        for channel in (near, far):
            assert (channel.max_header_bytes, channel.max_payload_bytes, channel.timeout_s) == (
                MAX_MESSAGE_HEADER_BYTES,
                MAX_PAYLOAD_BYTES,
                PATIENCE_S,
            )
        near.send(b"x" * 5000, [memoryview(b"payload")])
        assert far.receive(idle_s=PATIENCE_S).payload_bytes == 7


@pytest.mark.parametrize("secret_of", [knows(secret=OTHER), knows(job="other")], ids=["secret", "job"])
def test_an_unknown_job_and_another_secret_look_the_same(line, secret_of):
    near, far = line.connected_ends()
    server = line.run_in_background(admitted, far, secret_of=secret_of)
    with pytest.raises(PeerRefusedError) as refused:
        greeted(near)
    assert "could not prove that it belongs to job job: it does not know the job or its secret" in str(refused.value)
    near.close()
    with pytest.raises(PeerUnreachableError, match="closed the connection before"):
        server.result(PATIENCE_S)


@pytest.mark.parametrize("secret_of", [knows(secret=OTHER), knows(job="other"), knows()], ids=["secret", "job", "none"])
def test_client_without_proof_gets_a_uniform_refusal(line, secret_of):
    """A client that continues after a wrong server proof, or that has no secret."""
    near, far = line.connected_ends()
    server = line.run_in_background(admitted, far, secret_of=secret_of)
    hello = Hello(3, "job", "n1", NONCE)
    near.send(encode(hello))
    challenge = decode(near, Challenge)
    assert (len(challenge.nonce), len(challenge.proof), challenge.refused) == (32, 32, "")
    near.send(encode(Proof(hmac_proof(b"a guess of 16 bytes", "client", hello, challenge))))
    assert decode(near, Welcome).refused == "the job or its secret is another one here"
    with pytest.raises(PeerRefusedError, match="could not prove that it belongs to job job"):
        server.result(PATIENCE_S)


def test_unknown_job_cannot_be_entered_with_the_decoy_secret(line):
    """A client that guesses the random stand-in for the secret is still refused."""
    near, far = line.connected_ends()
    server = line.run_in_background(admitted, far, secret_of=lambda job: None, nonce=lambda size: NONCE)
    with pytest.raises(PeerRefusedError, match="another one here"):
        greeted(near, secret=NONCE)
    with pytest.raises(PeerRefusedError, match="not known here"):
        server.result(PATIENCE_S)


def test_client_refuses_an_unexpected_node(line):
    near, far = line.connected_ends()
    server = line.run_in_background(admitted, far)
    with pytest.raises(PeerRefusedError, match="is node n2, not n3"):
        greeted(near, expect="n3")
    near.close()
    with pytest.raises(PeerUnreachableError):
        server.result(PATIENCE_S)


def test_reflected_proof_is_refused(line):
    """The server sends its proof first; a client without the secret returns it as its own."""
    near, far = line.connected_ends()
    server = line.run_in_background(admitted, far)
    near.send(encode(Hello(3, "job", "n1", NONCE)))
    near.send(encode(Proof(decode(near, Challenge).proof)))
    assert decode(near, Welcome).refused
    with pytest.raises(PeerRefusedError):
        server.result(PATIENCE_S)


def test_relayed_nonce_gets_no_valid_proof(line):
    """An attacker that A contacts relays A's nonce to B and returns B's proof as its own."""
    to_attacker, attacker = line.connected_ends()
    to_b, b = line.connected_ends()
    client = line.run_in_background(greeted, to_attacker)
    server = line.run_in_background(admitted, b)
    hello = decode(attacker, Hello)
    to_b.send(encode(msgspec.structs.replace(hello, node="evil")))
    challenge = decode(to_b, Challenge)
    attacker.send(encode(challenge))
    with pytest.raises(PeerRefusedError, match="could not prove"):
        client.result(PATIENCE_S)
    to_b.close()
    with pytest.raises(PeerUnreachableError):
        server.result(PATIENCE_S)


def test_a_recorded_conversation_does_not_work_again(line):
    near, far = line.connected_ends()
    hello = Hello(3, "job", "n1", NONCE)
    said = []
    for turn in range(2):
        near, far = line.connected_ends()
        server = line.run_in_background(admitted, far)
        near.send(encode(hello))
        challenge = decode(near, Challenge)
        if not turn:
            said.append(encode(Proof(hmac_proof(SECRET, "client", hello, challenge))))
        near.send(said[0])
        assert bool(decode(near, Welcome).refused) == bool(turn)
        if turn:
            with pytest.raises(PeerRefusedError):
                server.result(PATIENCE_S)
        else:
            server.result(PATIENCE_S)


HELLO = Hello(3, "job", "n1", NONCE, "0.1")
CHALLENGE = Challenge(3, "n2", b"m" * 32, b"", "0.2")
SWAPPED_HELLO = Hello(3, "job", "n1", b"m" * 32, "0.1")
SWAPPED_CHALLENGE = Challenge(3, "n2", NONCE, b"", "0.2")


@pytest.mark.parametrize(
    "changed",
    [
        (SECRET, "server", HELLO, CHALLENGE),
        (OTHER, "client", HELLO, CHALLENGE),
        (SECRET, "client", HELLO, msgspec.structs.replace(CHALLENGE, nonce=b"o" * 32)),
        (SECRET, "client", HELLO, msgspec.structs.replace(CHALLENGE, protocol=1)),
        (SECRET, "client", HELLO, msgspec.structs.replace(CHALLENGE, node="n3")),
        (SECRET, "client", HELLO, msgspec.structs.replace(CHALLENGE, version="0.3")),
        (SECRET, "client", msgspec.structs.replace(HELLO, nonce=b"o" * 32), CHALLENGE),
        (SECRET, "client", SWAPPED_HELLO, SWAPPED_CHALLENGE),
        (SECRET, "client", msgspec.structs.replace(HELLO, job="jobn", node="1"), CHALLENGE),
        (SECRET, "client", msgspec.structs.replace(HELLO, node="n1n", version=""), CHALLENGE),
        (SECRET, "client", msgspec.structs.replace(HELLO, node="n2"), msgspec.structs.replace(CHALLENGE, node="n1")),
        (SECRET, "client", msgspec.structs.replace(HELLO, protocol=1), CHALLENGE),
    ],
)
def test_proof_covers_exactly_its_messages(changed):
    assert hmac_proof(*changed) != hmac_proof(SECRET, "client", HELLO, CHALLENGE)
    assert hmac_proof(SECRET, "client", HELLO, CHALLENGE) == hmac_proof(SECRET, "client", HELLO, CHALLENGE)


@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 15])
def test_short_secret_admits_no_client(line, secret):
    near, far = line.connected_ends()
    server = line.run_in_background(admitted, far, secret_of=knows(secret=secret))
    near.send(encode(HELLO))
    with pytest.raises(RequestError, match="at least 16"):
        server.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("hello", "error", "told"),
    [
        (msgspec.structs.replace(HELLO, protocol=1), ProtocolError, "protocol 1 is not spoken here"),
        (msgspec.structs.replace(HELLO, job="../../etc"), InvalidNameError, "job name"),
        (msgspec.structs.replace(HELLO, node="a/b"), ProtocolError, "name that no node has"),
        (msgspec.structs.replace(HELLO, node=""), ProtocolError, "name that no node has"),
        (msgspec.structs.replace(HELLO, nonce=b""), ProtocolError, "nonce of 0 bytes"),
        (msgspec.structs.replace(HELLO, nonce=b"n" * 33), ProtocolError, "nonce of 33 bytes"),
    ],
    ids=["protocol", "job", "node", "nobody", "no-nonce", "long-nonce"],
)
def test_invalid_hello_is_refused_with_a_reason(line, hello, error, told):
    near, far = line.connected_ends()
    server = line.run_in_background(admitted, far)
    near.send(encode(hello))
    challenge = decode(near, Challenge)
    assert told in challenge.refused
    assert challenge.proof == b""
    with pytest.raises(error, match=told):
        server.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("challenge", "error", "match"),
    [
        (Challenge(1, refused="protocol 2 is not spoken here"), ProtocolError, "speaks protocol 1, this is 3"),
        (Challenge(3, refused="x" * 1000), PeerRefusedError, "x'$"),
        (CHALLENGE, PeerRefusedError, "could not prove"),
        (msgspec.structs.replace(CHALLENGE, nonce=b""), ProtocolError, "nonce of 0 bytes"),
    ],
    ids=["protocol", "refused", "proof", "nonce"],
)
def test_a_client_does_not_believe_any_server(line, challenge, error, match):
    near, far = line.connected_ends()
    client = line.run_in_background(greeted, near)
    decode(far, Hello)
    far.send(encode(challenge))
    with pytest.raises(error, match=match) as raised:
        client.result(PATIENCE_S)
    assert len(str(raised.value)) < 300


def test_server_with_an_invalid_node_name_is_refused(line):
    near, far = line.connected_ends()
    client = line.run_in_background(greeted, near)
    hello = decode(far, Hello)
    odd = msgspec.structs.replace(CHALLENGE, node="../n2")
    far.send(encode(msgspec.structs.replace(odd, proof=hmac_proof(SECRET, "server", hello, odd))))
    with pytest.raises(ProtocolError, match="no node has"):
        client.result(PATIENCE_S)


@pytest.mark.parametrize("side", [admitted, greeted])
def test_unauthenticated_peer_is_limited_to_small_headers(line, side):
    for header, payload in ((b"x" * 4097, b""), (encode(HELLO), b"p")):
        near, far = line.connected_ends()
        work = line.run_in_background(side, far)
        near.send(header, [memoryview(payload)])
        with pytest.raises(ProtocolError, match="the limit is"):
            work.result(PATIENCE_S)


@pytest.mark.parametrize("side", [admitted, greeted])
def test_malformed_message_ends_the_handshake(line, side):
    for header in (b"", b"\xc1" * 50, b"\x91" * 4000, encode([1, 2, 3]), encode({"protocol": 3}), encode(None)):
        if side is greeted and header == encode({"protocol": 3}):
            continue  # a challenge that refuses nothing and proves nothing
        near, far = line.connected_ends()
        work = line.run_in_background(side, far)
        near.send(header)
        with pytest.raises(ProtocolError, match="not a"):
            work.result(PATIENCE_S)


def test_handshake_is_limited_to_ten_seconds_even_byte_by_byte(line, clock):
    near, far = line.connected_ends()
    server = line.run_in_background(admitted, far, clock=clock.now)
    message = encode(HELLO)
    dripping = FRAME_PREFIX.pack(b"tPS", 1, len(message), 0) + message
    for second in range(9):
        clock.until_waiting()
        clock.advance(1)
        near._stream.send([memoryview(dripping)[second : second + 1]], more=False, within_s=1)
    clock.until_waiting()
    assert not server.done()
    clock.advance(1.01)
    with pytest.raises(PeerUnreachableError, match=r"silent|too long"):
        server.result(PATIENCE_S)


def test_silence_between_its_messages_counts_too(line, clock):
    near, far = line.connected_ends()
    server = line.run_in_background(admitted, far, clock=clock.now)
    clock.until_waiting()
    clock.advance(6)
    near.send(encode(HELLO))
    decode(near, Challenge)
    clock.until_waiting()
    clock.advance(3.9)
    clock.until_waiting()
    assert not server.done()
    clock.advance(0.2)
    with pytest.raises(PeerUnreachableError, match="silent"):
        server.result(PATIENCE_S)


def test_handshake_with_a_peer_that_does_not_read_times_out(clock):
    network = MemoryNetwork(clock=clock, capacity_bytes=64)
    with contextlib.closing(ChannelPair(network.transport("n1"), network.transport("n2"), "n2:0")) as line:
        near, far = line.connected_ends()
        server = line.run_in_background(admitted, far, clock=clock.now)
        line.run_in_background(near.send, encode(HELLO)).result(PATIENCE_S)
        clock.until_waiting()
        clock.advance(9.9)
        clock.until_waiting()
        assert not server.done()
        clock.advance(0.2)
        with pytest.raises(PeerUnreachableError, match="silent"):
            server.result(PATIENCE_S)


def test_names_of_this_side_are_checked_before_anything_is_sent(line):
    near, _ = line.connected_ends()
    with pytest.raises(InvalidNameError):
        greeted(near, job="a/b")
    with pytest.raises(InvalidNameError):
        greeted(near, me="a/b")
