"""Errors of imports of packages that only an extra of the distribution installs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from peerstore.errors import MissingPackageError

_OWN_PACKAGES = ("peerstore", "tieredckpt", "elastic", "integration")


def missing_package_error(user: str, package: str, install: str = "") -> MissingPackageError:
    """Return the error of ``user``, which cannot work without ``package``.

    ``install`` are the arguments of ``pip install``, by default the package's name.
    """
    return MissingPackageError(f"{user} needs the {package} package: pip install {install or package}")


@contextlib.contextmanager
def optional_imports(user: str, install: str = "") -> Iterator[None]:
    """Convert a failed import in the block to :class:`MissingPackageError`.

    The message says what ``user`` needs, in the words of :func:`missing_package_error`.
    """
    try:
        yield
    except ImportError as error:
        cause = error if error.name else error.__cause__
        package = (getattr(cause, "name", None) or "").partition(".")[0]
        if not package or package in _OWN_PACKAGES:
            raise
        if sys.modules.get(package) is not None:  # the package is installed, and lacks a module or a name
            raise MissingPackageError(
                f"{user} needs the {package} package in another version ({error}): pip install {install or package}"
            ) from error
        raise missing_package_error(user, package, install) from error
