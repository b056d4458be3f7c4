"""``checkpoint_id="tiered://..."`` for callers that pass nothing else.

DCP has no registration for storage: it looks for a class that accepts the URL in a fixed list. While URLs are enabled,
a stand-in is at the head of that list; it makes this package's writer or reader for ``tiered://`` and passes
everything else to the class it stands for. Nothing is changed on import.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

from tieredckpt.errors import UsageError
from tieredckpt.settings import Settings, load_settings, override

_lock = threading.Lock()
_enabled: list[Urls] = []
_PROBE = "tiered://probe/step-0"


class Urls:
    """URLs are enabled until this is closed, or its block ends."""

    def __init__(self, settings: Settings | None) -> None:
        self.settings = settings
        """``None``: those of the environment, at each save or load."""

    def close(self) -> None:
        """DCP is as it was, unless somebody else has enabled URLs too."""
        with _lock:
            if self in _enabled:
                _enabled.remove(self)
                if not _enabled:
                    _uninstall()

    def __enter__(self) -> Urls:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def enable_urls(*, durable: str | None = None, settings: Settings | None = None) -> Urls:
    """From now on, ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` take ``checkpoint_id="tiered://JOB/step-N"``.

    ::

        tieredckpt.enable_urls()
        dcp.save(state, checkpoint_id="tiered://llama-8b/step-120")
        dcp.load(state, checkpoint_id="tiered://llama-8b")            # the newest whole step

    It is undone by ``close()`` of what it returns, or by using that in a ``with``. Other URLs and paths go where they
    went before.
    """
    if durable is not None:
        settings = override(settings or load_settings(), durable={"url": durable})
    urls = Urls(settings)
    with _lock:
        if not _enabled:
            _install()
        _enabled.append(urls)
    return urls


class _StandIn:
    """Where DCP looks for its own file writer or reader."""

    def __init__(self, own: Any, *, reader: bool) -> None:
        self.own = own
        self._reader = reader

    def validate_checkpoint_id(self, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_tiered(checkpoint_id) or bool(self.own.validate_checkpoint_id(checkpoint_id))

    def __call__(self, checkpoint_id: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        if not _is_tiered(checkpoint_id):
            return self.own(checkpoint_id, *args, **kwargs)
        from tieredckpt.reader import TieredReader
        from tieredckpt.writer import TieredWriter

        settings = _enabled[-1].settings if _enabled else None
        kind = TieredReader if self._reader else TieredWriter
        return kind(checkpoint_id, settings=settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def _is_tiered(checkpoint_id: str | os.PathLike[str]) -> bool:
    return os.fspath(checkpoint_id).startswith("tiered:/")


def _install() -> None:
    """Put the stand-ins in their places, and make sure that this torch looks there."""
    import torch
    from torch.distributed.checkpoint import _storage_utils as places

    from tieredckpt.reader import TieredReader
    from tieredckpt.writer import TieredWriter

    found: list[object] = []
    try:
        places.FileSystemWriter = _StandIn(places.FileSystemWriter, reader=False)  # type: ignore[misc,assignment]
        places.FileSystemReader = _StandIn(places.FileSystemReader, reader=True)  # type: ignore[misc,assignment]
        found = [type(places._storage_setup(None, _PROBE, reader=reader)) for reader in (False, True)]
    except (AttributeError, TypeError, RuntimeError):
        pass
    if found != [TieredWriter, TieredReader]:
        _uninstall()
        raise UsageError(
            f"this torch ({torch.__version__}) does not choose its storage as enable_urls() expects: pass "
            "storage_writer=TieredWriter(...) and storage_reader=TieredReader(...) instead"
        )


def _uninstall() -> None:
    from torch.distributed.checkpoint import _storage_utils as places

    for name in ("FileSystemWriter", "FileSystemReader"):
        standing = getattr(places, name, None)
        if isinstance(standing, _StandIn):
            setattr(places, name, standing.own)
