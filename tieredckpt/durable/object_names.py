"""Object names: relative paths with ``/``, the same on every kind of store, never outside the URL.

Where an object ``a`` is, stores made of folders cannot keep ``a/b`` as well; nothing here needs both.
"""

from __future__ import annotations

from tieredckpt.errors import UsageError

MAX_NAME_BYTES = 1024


def is_name(name: str) -> bool:
    return (
        bool(name)
        and name.isprintable()
        and "\\" not in name
        and all(part not in ("", ".", "..") for part in name.split("/"))
        and len(name.encode()) <= MAX_NAME_BYTES
    )


def check_name(name: str) -> str:
    """``name``, or :class:`UsageError`."""
    if not is_name(name):
        raise UsageError(
            f"{name!r} is not an object name: expected printable parts between single slashes, without '.', '..' or "
            f"a backslash, at most {MAX_NAME_BYTES} bytes"
        )
    return name


def check_prefix(prefix: str) -> str:
    """A name, its beginning, or nothing at all."""
    if prefix:
        check_name(prefix.removesuffix("/") if prefix != "/" else prefix)
    return prefix


def folder(prefix: str) -> str:
    """The longest part of ``prefix`` that ends with a slash, without it: what stores with folders can list."""
    return prefix.rpartition("/")[0]


def join(root: str, name: str) -> str:
    return f"{root}/{name}" if root else name
