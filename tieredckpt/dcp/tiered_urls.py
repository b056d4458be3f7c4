"""``enable_urls``: ``checkpoint_id="tiered://..."`` for callers that pass nothing else.

DCP has no registration for storage: it searches a fixed list for a class that accepts the URL. While URLs are enabled,
a wrapper is at the head of that list. It creates this package's writer or reader for ``tiered://`` and passes other
URLs to the original class. DCP's background process has no wrapper and does not know the job's incarnation, so it
receives its writer from the trainer process. An import changes nothing.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

from tieredckpt.errors import UsageError
from tieredckpt.settings import Settings, load_settings, override_settings

_lock = threading.Lock()
_enabled: list[EnabledUrls] = []
_PROBE = "tiered://probe/step-0"
_EXECUTORS = ("_ThreadBasedAsyncCheckpointExecutor", "_ProcessBasedAsyncCheckpointExecutor")


class EnabledUrls:
    """Handle of enabled URLs, until it is closed or its block ends."""

    def __init__(self, settings: Settings | None) -> None:
        self.settings = settings
        """Settings of saves and loads; ``None`` for those of the environment at each call."""

    def close(self) -> None:
        """Restore DCP, unless another handle is still open."""
        with _lock:
            if self in _enabled:
                _enabled.remove(self)
                if not _enabled:
                    _uninstall()

    def __enter__(self) -> EnabledUrls:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def enable_urls(*, durable: str | None = None, settings: Settings | None = None) -> EnabledUrls:
    """Make ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` accept ``tiered://`` as ``checkpoint_id``.

    ::

        tieredckpt.enable_urls()
        dcp.save(state, checkpoint_id="tiered://llama-8b/step-120")
        dcp.load(state, checkpoint_id="tiered://llama-8b")            # the newest complete step

    The returned handle's ``close()`` or the end of its ``with`` block disables them again. Other URLs and paths work as
    before.
    """
    if durable is not None:
        settings = override_settings(settings or load_settings(), durable={"url": durable})
    urls = EnabledUrls(settings)
    with _lock:
        if not _enabled:
            _install()
        _enabled.append(urls)
    return urls


class _StorageClass:
    """Wrapper of DCP's own file writer or reader class."""

    def __init__(self, own: Any, *, reader: bool) -> None:
        self.own = own
        self._reader = reader

    def validate_checkpoint_id(self, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_tiered(checkpoint_id) or bool(self.own.validate_checkpoint_id(checkpoint_id))

    def __call__(self, checkpoint_id: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        if not _is_tiered(checkpoint_id):
            return self.own(checkpoint_id, *args, **kwargs)
        if not self._reader:
            return _writer(checkpoint_id)
        from tieredckpt.dcp.tiered_reader import TieredReader

        return TieredReader(checkpoint_id, settings=_enabled[-1].settings if _enabled else None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class _ExecutorClass:
    """Wrapper of an executor class of ``dcp.async_save``."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __call__(self) -> Any:
        executor = self.own()
        save = executor.execute_save

        def execute_save(
            staged: Any,
            *,
            checkpoint_id: str | os.PathLike[str] | None = None,
            storage_writer: Any = None,
            **options: Any,
        ) -> Any:
            if storage_writer is None and checkpoint_id is not None and _is_tiered(checkpoint_id):
                storage_writer = _writer(checkpoint_id)
                storage_writer.capture_point()
            return save(staged, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **options)

        executor.execute_save = execute_save
        return executor


class _Mkdir:
    """Wrapper of DCP's ``mkdir`` that rejects a URL used as a path."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __get__(self, instance: Any, kind: Any = None) -> Any:
        make = self.own.__get__(instance, kind)

        def mkdir(path: str | os.PathLike[str]) -> None:
            if _is_tiered(path):
                raise UsageError(
                    f"{os.fspath(path)!r} is to become a local folder: DCP's FileSystemWriter was given a tiered:// "
                    "URL. Pass checkpoint_id= without a storage_writer, or TieredWriter(...)"
                )
            make(path)

        return mkdir


def _writer(checkpoint_id: str | os.PathLike[str]) -> Any:
    from tieredckpt.dcp.tiered_writer import TieredWriter

    return TieredWriter(checkpoint_id, settings=_enabled[-1].settings if _enabled else None)


def _is_tiered(checkpoint_id: str | os.PathLike[str]) -> bool:
    return os.fspath(checkpoint_id).startswith("tiered:/")


def _install() -> None:
    """Install the wrappers, and raise :class:`UsageError` if this torch does not use them."""
    import torch
    from torch.distributed.checkpoint import _storage_utils as storage_utils
    from torch.distributed.checkpoint import filesystem, state_dict_saver

    from tieredckpt.dcp.tiered_reader import TieredReader
    from tieredckpt.dcp.tiered_writer import TieredWriter

    found: list[object] = []
    try:
        storage_utils.FileSystemWriter = _StorageClass(storage_utils.FileSystemWriter, reader=False)  # type: ignore[misc,assignment]
        storage_utils.FileSystemReader = _StorageClass(storage_utils.FileSystemReader, reader=True)  # type: ignore[misc,assignment]
        filesystem.FileSystem.mkdir = _Mkdir(filesystem.FileSystem.mkdir)  # type: ignore[assignment,method-assign]
        for name in _EXECUTORS:
            if hasattr(state_dict_saver, name):  # older releases use a thread of async_save itself
                setattr(state_dict_saver, name, _ExecutorClass(getattr(state_dict_saver, name)))
        found = [type(storage_utils._storage_setup(None, _PROBE, reader=reader)) for reader in (False, True)]
    except (AttributeError, TypeError, RuntimeError):
        pass
    except BaseException:  # settings that the writer refuses
        _uninstall()
        raise
    if found != [TieredWriter, TieredReader]:
        _uninstall()
        raise UsageError(
            f"this torch ({torch.__version__}) does not choose its storage as enable_urls() expects: pass "
            "storage_writer=TieredWriter(...) and storage_reader=TieredReader(...) instead"
        )


def _uninstall() -> None:
    from torch.distributed.checkpoint import _storage_utils as storage_utils
    from torch.distributed.checkpoint import filesystem, state_dict_saver

    for module, names in ((storage_utils, ("FileSystemWriter", "FileSystemReader")), (state_dict_saver, _EXECUTORS)):
        for name in names:
            wrapper = getattr(module, name, None)
            if isinstance(wrapper, _StorageClass | _ExecutorClass):
                setattr(module, name, wrapper.own)
    mkdir = vars(filesystem.FileSystem)["mkdir"]
    if isinstance(mkdir, _Mkdir):
        filesystem.FileSystem.mkdir = mkdir.own  # type: ignore[method-assign]
