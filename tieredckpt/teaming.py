"""What the settings say about a job's other nodes, as the agents want to hear it."""

from __future__ import annotations

from pathlib import Path

from peerstore.errors import RequestError
from peerstore.peers.plan import TeamPlan, TeamSettings
from peerstore.transport.certificates import TlsFiles
from peerstore.transport.nixl import NixlTransport
from peerstore.transport.seam import Transport
from peerstore.transport.secret import read_secret
from peerstore.transport.tcp import TcpTransport
from peerstore.units import parse_size
from tieredckpt.errors import SettingsError
from tieredckpt.settings import NIXL, TCP, PeerSettings

WORLD, OFF = "world", "off"


def alone(peer: PeerSettings) -> bool:
    """Whether nothing is to be kept on other nodes. Their agents know each other all the same, to say what is whole."""
    return peer.discovery == OFF or (peer.copies == 1 and peer.mode == "mirror")


def team_settings(peer: PeerSettings) -> TeamSettings:
    levels = tuple(level.strip() for level in peer.levels.split(",") if level.strip())
    bandwidth = parse_size(peer.bandwidth) if peer.bandwidth else 0
    return TeamSettings(
        copies=peer.copies,
        levels=levels,
        streams=peer.streams,
        bandwidth=bandwidth,
        mode=peer.mode,
        group=peer.group,
    )


def configured_plan(peer: PeerSettings) -> TeamPlan | None:
    """The plan, where the configuration alone says who the nodes are; ``None`` where the ranks tell each other."""
    if peer.discovery in (OFF, WORLD) or (alone(peer) and not peer.secret):
        return None
    if not peer.secret:
        raise SettingsError(
            f"peer.secret: with peer.discovery={peer.discovery!r} the job's nodes need a secret they all know: "
            "file:/path, or the secret itself"
        )
    return TeamPlan(secret_of(peer), team_settings(peer), discovery=peer.discovery)


def secret_of(peer: PeerSettings) -> bytes:
    try:
        return read_secret(peer.secret)
    except RequestError as error:
        raise SettingsError(f"peer.secret: {error}") from error


def transport_of(interface: str, tls: str, kind: str = TCP) -> Transport:
    """How this node's processes reach other nodes."""
    folder = Path(tls)
    files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt") if tls else None
    tcp = TcpTransport(interface=interface, tls=files)
    name, _, backend = kind.partition(":")
    return NixlTransport(carrier=tcp, backend=backend or "UCX") if name == NIXL else tcp
