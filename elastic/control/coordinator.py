"""The coordinator: one process per job, the shell around :class:`~elastic.control.desk.Desk`.

It keeps nothing that it cannot learn again from the supervisors. While it is away the ranks train on.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec

from elastic.control import showing
from elastic.control.desk import Desk, DeskSettings
from elastic.control.link import COORDINATOR
from elastic.control.messages import MAX_NODE_BYTES, Answer, NodeHears, NodeSays, Over, Question, Said
from elastic.control.ordering import for_node, refusal
from elastic.control.recording import Recorder
from elastic.control.runs import write_private
from peerstore.errors import PeerRefusedError, PeerStoreError, ProtocolError
from peerstore.frames import decode
from peerstore.transport.handshake import admit
from peerstore.transport.seam import Channel
from peerstore.transport.tcp import TcpTransport
from tieredckpt.ledger import Ledger, NullLedger

log = logging.getLogger(__name__)

_TURN_S = 0.1
_SEND_S = 10.0
_GREETING_S = 10.0
_ANSWER_S = 20.0
_encode = msgspec.msgpack.Encoder().encode


class Coordinator:
    """Listens as soon as it is made; ``run`` returns when the job is over and its nodes have gone."""

    def __init__(
        self,
        settings: DeskSettings,
        secret: bytes,
        *,
        listen: str = "127.0.0.1:0",
        fresh: bool = True,
        epoch_file: Path | None = None,
        farewell_s: float = 60.0,
        ledger: Ledger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        floor = -1 if fresh else _epoch_in(epoch_file)
        self._recorder = Recorder(ledger or NullLedger(), settings.job, again=not fresh)
        self.desk = Desk(
            settings,
            incarnation=secrets.token_hex(8),
            now=clock(),
            fresh=fresh,
            floor=floor,
            witness=self._recorder.saw,
        )
        self._epoch_file, self._epoch, self._silent = epoch_file, floor, False
        self._secret, self._clock, self._farewell_s = secret, clock, farewell_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wires: dict[str, _Wire] = {}
        self._ending = threading.Event()
        self._listener = TcpTransport(timeout_s=_SEND_S, most=16_384).listen(listen, self._serve)
        self.address = self._listener.address

    def run(self) -> tuple[Over, str]:
        over_at: float | None = None
        while not self._ending.is_set():
            self._turn()
            if self.desk.over is not None:
                over_at = self._clock() if over_at is None else over_at
                if not self._wires or self._clock() - over_at > self._farewell_s:
                    break
        self.close()
        over, reason = self.desk.over or Over.STOPPED, self.desk.reason
        if over in (Over.STOPPED, Over.GAVE_UP):
            reason = f"{reason} ({self.desk.whole})"  # as all ranks have said by now that they were told
        self._recorder.ended(over, reason)
        return over, reason

    def end(self) -> None:
        """Have ``run`` return at once, whatever becomes of the job; from any thread."""
        self._ending.set()
        self._inbox.put(lambda: None)  # its wait has no end when a signal comes just as its time is over

    def close(self) -> None:
        self._ending.set()
        for wire in list(self._wires.values()):
            wire.end()
        self._listener.close()

    def _turn(self) -> None:
        try:
            call = self._inbox.get(timeout=_TURN_S)
            while True:
                call()
                call = self._inbox.get_nowait()
        except queue.Empty:
            pass
        now = self._clock()
        self.desk.tick(now)
        if not self._epoch_is_noted():
            return
        for node in self.desk.due():
            if node in self._wires:
                self._wires[node].say(for_node(self.desk, node, now))

    def _epoch_is_noted(self) -> bool:
        """Before anybody hears of it: whatever happens to everybody, no two worlds have the same number."""
        if self._epoch_file is not None and self.desk.world.epoch > self._epoch:
            try:
                write_private(self._epoch_file, str(self.desk.world.epoch).encode())
            except (
                OSError
            ) as error:  # too many open files, a full disk: nodes train on, and hear of it once it is there
                if not self._silent:
                    log.error("the world's number cannot be written to %s, so nodes wait: %s", self._epoch_file, error)
                self._silent = True
                return False
            self._epoch, self._silent = self.desk.world.epoch, False
        return True

    # -- on a connection's own thread -----------------------------------------------------------------------------

    def _serve(self, channel: Channel) -> None:
        job = self.desk.settings.job
        who = admit(channel, me=COORDINATOR, secret_of=lambda named: self._secret if named == job else None)
        channel.max_header_bytes, channel.max_payload_bytes = MAX_NODE_BYTES, 0
        incoming = channel.receive(within_s=_GREETING_S)
        if incoming is None:
            return
        said: Said = decode(incoming.header, Said)  # type: ignore[arg-type]  # a union is a type to msgspec
        if isinstance(said, NodeSays):
            self._serve_node(channel, who.node, said)
        else:
            channel.send(_encode(self._answer(said)))
            channel.receive(within_s=_GREETING_S)  # until the other side has read it and closes

    def _answer(self, question: Question) -> Answer:
        future: Future[Answer] = Future()

        def answer() -> None:
            now, refused = self._clock(), refusal(self.desk, question)
            if not refused:
                self.desk.asked(question, now)
            future.set_result(showing.answer(self.desk, now, refused=refused))

        self._inbox.put(answer)
        return future.result(_ANSWER_S)

    def _serve_node(self, channel: Channel, node: str, said: NodeSays) -> None:
        wire = _Wire(channel)
        life = said.life
        try:
            while True:
                if said.node != node:
                    raise ProtocolError(f"node {node} reports as {said.node}")
                life = said.life
                self._inbox.put(partial(self._said, wire, said))
                incoming = channel.receive()
                if incoming is None:
                    return
                said = decode(incoming.header, NodeSays)
        finally:
            wire.end()
            self._inbox.put(partial(self._gone, wire, node, life))

    # -- on the coordinator's thread ------------------------------------------------------------------------------

    def _said(self, wire: _Wire, says: NodeSays) -> None:
        refused = self.desk.said(says, self._clock())
        if refused:
            log.warning("a supervisor was refused: %s", refused)
            wire.say(NodeHears(self.desk.incarnation, says.life, over=Over.REFUSED, reason=refused))
            return
        before = self._wires.get(says.node)
        if before is not None and before is not wire:
            before.say(
                NodeHears(
                    self.desk.incarnation,
                    before.life,
                    over=Over.REFUSED,
                    reason=f"a newer supervisor runs as node {says.node}",
                )
                if before.life != says.life
                else NodeHears(self.desk.incarnation, says.life)
            )
        wire.life = says.life
        self._wires[says.node] = wire

    def _gone(self, wire: _Wire, node: str, life: int) -> None:
        if self._wires.get(node) is wire:
            del self._wires[node]
            self.desk.gone(node, life, self._clock())


def _epoch_in(file: Path | None) -> int:
    try:
        return -1 if file is None else int(file.read_text())
    except (OSError, ValueError):
        return -1


class _Wire:
    """What a node is to hear, newest only: one that reads slowly misses what is of the past by then."""

    def __init__(self, channel: Channel) -> None:
        self.life = -1
        self._channel = channel
        self._changed = threading.Condition()
        self._latest: NodeHears | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._write, name="elastic-wire", daemon=True)
        self._thread.start()

    def say(self, hears: NodeHears) -> None:
        with self._changed:
            self._latest = hears
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(_SEND_S)
        self._channel.close()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._latest is not None)
                hears, self._latest = self._latest, None
            if hears is None:
                return
            try:
                self._channel.send(_encode(hears))
            except (PeerStoreError, PeerRefusedError) as error:
                log.info("a node did not take a message: %s", error)
                self._channel.close()
                return
            except Exception:  # who is told nothing any more is to know it, and comes again
                log.exception("a message to a node could not be sent")
                self._channel.close()
                return
