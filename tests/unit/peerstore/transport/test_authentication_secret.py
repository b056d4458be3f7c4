"""Sources of a job's secret, and secrets that are refused."""

import os
from pathlib import Path

import pytest

from peerstore.errors import RequestError
from peerstore.transport.authentication import exposed_permissions, generate_secret, read_secret

SECRET = "0123456789abcdef"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"

    def write(content: str | bytes, mode: int = 0o600) -> Path:
        path.unlink(missing_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(mode)
        return path

    return write


def test_new_secrets_are_long_printable_and_different():
    assert len({generate_secret() for _ in range(100)}) == 100
    assert all(len(one) >= 40 and one.decode().isprintable() for one in (generate_secret() for _ in range(100)))
    assert read_secret(generate_secret().decode())


def test_text_is_the_secret():
    assert read_secret(SECRET) == SECRET.encode()
    assert read_secret(f" {SECRET}\n") == SECRET.encode()
    assert read_secret("/base64/that+begins/so==") == b"/base64/that+begins/so=="
    assert read_secret("a/" + "b" * 4000) == b"a/" + b"b" * 4000


def test_secret_is_read_from_a_file(file):
    path = file(SECRET + "\n")
    assert read_secret(path) == read_secret(f"file:{path}") == SECRET.encode()
    assert read_secret(file(os.urandom(32).replace(b"\n", b".") + b"x", 0o400))


def test_links_are_followed_as_kubernetes_makes_them(file, tmp_path):
    (tmp_path / "..2026").mkdir()
    file(SECRET).rename(tmp_path / "..2026" / "secret")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "secret").symlink_to("..data/secret")
    assert read_secret(tmp_path / "secret") == SECRET.encode()


@pytest.mark.parametrize("text", ["", "short", "x" * 15, " " * 40, "x" * 15 + "\n"])
def test_short_secret_is_refused_with_a_command_to_generate_another(file, text):
    for given in (text, file(text)):
        with pytest.raises(RequestError, match=r"at least 16 are needed: make one with: python"):
            read_secret(given)


def test_overlong_secret_is_refused(file):
    for given in ("x" * 4097, file("x" * 100_000)):
        with pytest.raises(RequestError, match="more than 4096"):
            read_secret(given)


def test_refusal_does_not_contain_the_secret(file):
    with pytest.raises(RequestError) as refused:
        read_secret("hunter2")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o666, 0o660, 0o620])
def test_a_file_that_others_may_read_or_write_is_refused(file, mode):
    with pytest.raises(RequestError, match=rf"mode {mode:04o}\): chmod 0400 it, .*defaultMode to 0400"):
        read_secret(file(SECRET, mode))


@pytest.mark.parametrize(
    ("mode", "owner", "fine"),
    [
        (0o100400, 1000, True),
        (0o100600, 1000, True),
        (0o100440, 1000, False),
        (0o100440, 0, True),
        (0o100640, 0, True),
        (0o100460, 0, False),
        (0o100644, 0, False),
        (0o100400, 1001, False),
        (0o100400, 0, True),
    ],
)
def test_exposed_secret_file_permissions_are_detected(monkeypatch, mode, owner, fine):
    monkeypatch.setattr("os.getuid", lambda: 1000)
    assert (exposed_permissions(os.stat_result((mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))) == "") == fine


def test_secret_path_must_be_a_file(tmp_path):
    with pytest.raises(RequestError, match="No such file"):
        read_secret(tmp_path / "absent")
    with pytest.raises(RequestError, match="not a file"):
        read_secret(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(RequestError, match="not a file"):
        read_secret(tmp_path / "pipe")


def test_file_name_given_as_a_secret_is_detected(file):
    path = file(SECRET)
    with pytest.raises(RequestError, match=f"write file:{path}"):
        read_secret(str(path))
