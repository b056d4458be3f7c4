"""Which files make a node's connections encrypted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from peerstore.errors import RequestError
from peerstore.transport.secret import exposed

if TYPE_CHECKING:
    import ssl  # imported where it is used: most agents do without it, and it costs them 10 ms


class TlsFiles(NamedTuple):
    """This node's certificate and key, and the authority that signed the certificates of all nodes (PEM files).

    Both sides show a certificate, so it has to be good for clients and servers. Names in certificates are not compared
    unless ``check_names`` says so: nodes' addresses change, and which node it is, is proven by the job's secret. The
    authority should therefore sign for these agents only. The files are read again for every connection, so that
    certificates can be renewed under a running agent.
    """

    certificate: Path
    key: Path
    authority: Path
    check_names: bool = False

    def context(self, *, server: bool) -> ssl.SSLContext:
        import ssl

        check_key(self.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = self.check_names and not server
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # every connection proves itself
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise RequestError(
                f"certificate {self.certificate}, key {self.key} and authority {self.authority} cannot be used: {error}"
            ) from error
        return context


def check_key(path: Path) -> None:
    """Raises :class:`RequestError` where others than this user and root could have read a certificate's key."""
    try:
        problem = exposed(path.stat())
    except OSError as error:
        raise RequestError(f"key {path} cannot be used: {error.strerror}") from error
    if problem:
        raise RequestError(
            f"key {path} {problem}: chmod 0400 it (a Kubernetes secret: defaultMode 0400, or 0440 with an fsGroup), "
            "and have a new one made if others have accounts here"
        )
