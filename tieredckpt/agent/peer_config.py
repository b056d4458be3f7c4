"""The ``peer.*`` settings as the agent's replication settings, secret and transport."""

from __future__ import annotations

from pathlib import Path

from peerstore.errors import RequestError
from peerstore.settings import JobPeersConfig, ReplicationSettings
from peerstore.sizes_and_durations import parse_size
from peerstore.transport.authentication import TlsFiles, read_secret
from peerstore.transport.base import Transport
from peerstore.transport.nixl import NixlTransport
from peerstore.transport.tcp import TcpTransport
from tieredckpt.errors import SettingsError
from tieredckpt.settings import NIXL, TCP, PeerSettings

DISCOVERY_WORLD, DISCOVERY_OFF = "world", "off"


def is_unreplicated(peer: PeerSettings) -> bool:
    """Return whether other nodes hold no replicas. Their agents still exchange which steps are complete."""
    return peer.discovery == DISCOVERY_OFF or (peer.copies == 1 and peer.mode == "mirror")


def replication_settings(peer: PeerSettings) -> ReplicationSettings:
    levels = tuple(level.strip() for level in peer.levels.split(",") if level.strip())
    bandwidth = parse_size(peer.bandwidth) if peer.bandwidth else 0
    return ReplicationSettings(
        copies=peer.copies,
        levels=levels,
        streams=peer.streams,
        bandwidth=bandwidth,
        mode=peer.mode,
        parity_group_size=peer.parity_group_size,
    )


def configured_peer_plan(peer: PeerSettings) -> JobPeersConfig | None:
    """Return the job's peers configuration, or ``None`` if the ranks exchange it or the job has no peers."""
    if peer.discovery in (DISCOVERY_OFF, DISCOVERY_WORLD) or (is_unreplicated(peer) and not peer.secret):
        return None
    if not peer.secret:
        raise SettingsError(
            f"peer.secret: with peer.discovery={peer.discovery!r} the job's nodes need a secret they all know: "
            "file:/path, or the secret itself"
        )
    return JobPeersConfig(peer_secret(peer), replication_settings(peer), discovery=peer.discovery)


def peer_secret(peer: PeerSettings) -> bytes:
    try:
        return read_secret(peer.secret)
    except RequestError as error:
        raise SettingsError(f"peer.secret: {error}") from error


def peer_transport(interface: str, tls: str, kind: str = TCP) -> Transport:
    """Return the transport between this node and other nodes."""
    folder = Path(tls)
    files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt") if tls else None
    tcp = TcpTransport(interface=interface, tls=files)
    name, _, backend = kind.partition(":")
    return NixlTransport(carrier=tcp, backend=backend or "UCX") if name == NIXL else tcp
