"""A certificate authority for one test."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from peerstore.transport.authentication import TlsFiles

_USAGE = x509.KeyUsage(
    digital_signature=True,
    key_cert_sign=True,
    crl_sign=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


def _by(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    """Return the extension that names the signer. Python 3.13 rejects certificates without it."""
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


class Authority:
    """Authority for certificates valid for an hour; ``trusted`` is the file with its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("test authority")
        self.trusted = directory / "ca.pem"
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_USAGE, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.trusted.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, address: str = "127.0.0.1") -> tuple[Path, Path]:
        """Issue a certificate for ``address`` and return the files of certificate and key."""
        key = ec.generate_private_key(ec.SECP256R1())
        host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        certificate = (
            self._builder(_name(address), key.public_key())
            .add_extension(host, critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_by(self._key), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        chain, private = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        chain.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        private.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
        private.chmod(0o600)
        return chain, private

    def _builder(self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def server_context(directory: Path) -> tuple[ssl.SSLContext, Path]:
    """Return a server's TLS context for 127.0.0.1 and the CA file for clients."""
    authority = Authority(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))
    return context, authority.trusted


def node_files(directory: Path, *, address: str = "127.0.0.1", check_names: bool = False) -> TlsFiles:
    """Create the TLS files of a node, with an authority of its own."""
    directory.mkdir(exist_ok=True)
    authority = Authority(directory)
    return TlsFiles(*authority.issue("node", address=address), authority.trusted, check_names)
