"""Who may use the memory service."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import os
import secrets
from http import HTTPStatus
from pathlib import Path

from peerstore.errors import RequestError
from peerstore.transport.secret import read_secret
from tieredckpt.agent.memory_service.answers import RefusedError
from tieredckpt.agent.memory_service.options import TOKEN_FILE, Auth
from tieredckpt.errors import UsageError


class Access:
    """Asks for a token, or (``token`` is empty) for nothing.

    The token comes as ``Authorization: Bearer TOKEN``, or as the password of ``Authorization: Basic``: that is what a
    client sends that knows nothing of tokens and was given ``http://any:TOKEN@host:port`` as its address.
    """

    def __init__(self, token: bytes = b"") -> None:
        self._token = token

    @property
    def asks(self) -> bool:
        return bool(self._token)

    def check(self, authorization: str | None) -> None:
        if self._token and not hmac.compare_digest(_shown(authorization or ""), self._token):
            raise RefusedError(
                HTTPStatus.UNAUTHORIZED,
                "The memory service asks for its token: send 'Authorization: Bearer TOKEN', or use "
                "http://any:TOKEN@host:port as its address",
            )


def _shown(authorization: str) -> bytes:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1", "replace")
    if scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, ValueError):
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return b""


def access_for(auth: Auth, token: str, directory: Path) -> Access:
    """Who may come, by the settings. Where a token is asked for and none was given, one is made and kept here."""
    return Access(_token(token, directory)) if auth == "token" else Access()


def _token(given: str, directory: Path) -> bytes:
    if given:
        try:
            return read_secret(given)
        except RequestError as error:
            raise UsageError(f"agent.memory_service_token: {error}") from error
    path = directory / TOKEN_FILE
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:  # of an agent before this one: its clients know it
        try:
            return read_secret(path)
        except RequestError as error:
            raise UsageError(f"the memory service's token: {error}; remove {path} to have a new one made") from error
    with os.fdopen(fd, "wb") as file:
        token = secrets.token_urlsafe(32).encode()
        file.write(token)
    return token
