"""Lightning checkpoints as steps of a job, and the files that name those steps."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import __version__ as lightning_version

from tieredckpt import Checkpointer, UsageError, load
from tieredckpt.checkpointer.save_handle import SaveHandle
from tieredckpt.location import TIERED_SCHEME, Location, parse_location
from tieredckpt.settings import load_settings, local_world_size, override_settings

log = logging.getLogger(__name__)
PathLike = str | os.PathLike[str]
_MAX_REFERENCE_BYTES = 1024


class CheckpointParts:
    """A Lightning checkpoint as a ``Stateful``: its tensors by name, and everything else as one object."""

    def __init__(self, checkpoint: Mapping[str, Any] | None = None) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._places: list[tuple[str, tuple[Any, ...]]] = []
        self._rest: Any = None if checkpoint is None else self._split(checkpoint, ())

    def _split(self, value: Any, path: tuple[Any, ...]) -> Any:
        if path == ("callbacks",):  # small, and with an infinite best score at first, which no parameter may have
            return value
        if isinstance(value, torch.Tensor):
            name = ".".join(map(str, path))
            if name in self._tensors:
                raise UsageError(f"Two tensors of the checkpoint have the name {name!r} when their keys are joined")
            self._tensors[name] = value
            self._places.append((name, path))
            return None
        if isinstance(value, dict):
            copied = copy.copy(value)  # a state_dict() has its versions in an attribute
            for key, inner in value.items():
                copied[key] = self._split(inner, (*path, key))
            return copied
        return [self._split(inner, (*path, at)) for at, inner in enumerate(value)] if type(value) is list else value

    def state_dict(self) -> dict[str, Any]:
        # DCP would take a dict apart, and lose empty ones and keys that are numbers. A tuple is one object.
        return {} if self._rest is None else {"tensors": self._tensors, "rest": (self._rest, self._places)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tensors, (self._rest, self._places) = state.get("tensors", {}), state["rest"]

    def joined(self) -> dict[str, Any]:
        """Return the checkpoint."""
        checkpoint: dict[str, Any] = self._rest
        for name, path in self._places:
            inner: Any = checkpoint
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = self._tensors[name]
        return checkpoint


class NoCheckpoint(dict[str, Any]):
    """A checkpoint of a job without steps: Lightning restores nothing from it."""

    def __init__(self) -> None:
        super().__init__({"pytorch-lightning_version": lightning_version})

    def __bool__(self) -> bool:
        return False


class TrainerSteps:
    """The steps of one job that a trainer saves, loads and removes by path."""

    def __init__(self, url: str, options: Mapping[str, Any], *, is_shared: bool) -> None:
        self.job = parse_location(url).job
        self._options = {"on_sigterm": "ignore", **options}
        self._is_shared = is_shared
        self._checkpointer: Checkpointer | None = None
        self._group: dist.ProcessGroup | None = None
        self._full: tuple[int, dict[str, Any]] = (-1, {})
        """The newest step that was saved with the state of the optimizers, and its state."""
        self.last_save: SaveHandle | None = None

    @property
    def has_durable_tier(self) -> bool:
        return bool(self.open().settings.durable.url)

    def open(self, *, trusts: bool = False) -> Checkpointer:
        """Return the checkpointer: of all ranks if they share the steps, else of this rank alone."""
        if self._checkpointer is None:
            changes: dict[str, Any] = {"trust_objects": True} if trusts else {}
            if not self._is_shared and dist.is_initialized():
                self._group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
                changes["process_group"] = self._group
                settings = self._options.get("settings") or load_settings()
                if settings.peer.discovery == "world" and local_world_size() < dist.get_world_size():
                    # The nodes would wait for ranks that do not save.
                    log.warning("tiered://%s: rank 0 saves alone, without replicas on other nodes", self.job)
                    changes["settings"] = override_settings(settings, peer={"discovery": "off"})
            self._checkpointer = Checkpointer(self.job, **{**self._options, **changes})
        return self._checkpointer

    def save(self, state: dict[str, Any], step: int, path: PathLike, options: Any, *, is_full: bool) -> None:
        """Save ``state`` as ``step``, and write a file ``path`` that names it.

        A path with ``tiered://`` needs no file.
        """
        named = _location_in(path)
        if named is not None and (named.job, named.step) != (self.job, step):
            raise UsageError(f"Cannot save {path}: the trainer saves step {step} of tiered://{self.job}")
        if is_full:
            self._full = (step, state)
        elif step == self._full[0]:  # weights must not replace the complete checkpoint of their step
            state = self._full[1]
        self.last_save = self.open().save(state, step, **{"force": True, "keep": named is None, **(options or {})})
        if named is None:
            self.last_save.wait()
            if not dist.is_initialized() or dist.get_rank() == 0:
                files = get_filesystem(path)
                files.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH120 - it may be a URL
                with files.open(os.fspath(path), "w") as file:
                    file.write(f"{Location(self.job, step)}\n")

    def load(self, state: dict[str, Any], location: Location, *, trusts: bool, strict: bool = True) -> Location | None:
        """Restore ``state`` on all ranks of the checkpointer, and return the step that it came from."""
        if location.job != self.job:
            raise UsageError(f"Cannot resume from {location}: the trainer saves steps of tiered://{self.job}")
        checkpointer = self.open(trusts=trusts)
        step = checkpointer.restore(state, location.step, strict=strict)
        if step < 0:
            log.warning("tiered://%s has no complete step: training starts from scratch", self.job)
            return None
        read = checkpointer.last_restore
        return Location(self.job, step, read.version_id.epoch if read is not None and read.version_id else None)

    def load_alone(self, location: Location, *, trusts: bool) -> dict[str, Any]:
        """Return the state of a step that another rank has restored."""
        settings = self._options.get("settings") or load_settings()
        if trusts or self._options.get("trust_objects"):
            settings = override_settings(settings, memory={"trust_objects": True})
        return load(str(location), durable=self._options.get("durable"), settings=settings)

    def remove(self, path: PathLike) -> None:
        """Remove the file ``path``, and its step from all tiers unless another file in its folder names it."""
        location = read_reference(path)
        files = get_filesystem(path)
        if _location_in(path) is None and files.exists(path):
            files.rm(os.fspath(path), recursive=True)
        if location is None or location.step is None:
            return
        folder = os.path.dirname(path)  # noqa: PTH120 - it may be a URL
        others = [name for name in files.ls(folder, detail=False) if name.endswith(".ckpt") and files.isfile(name)]
        if location not in map(read_reference, others):
            self.open().drop(location.step)

    def close(self) -> None:
        self._full = (-1, {})
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _location_in(path: PathLike) -> Location | None:
    return parse_location(path) if os.fspath(path).startswith(f"{TIERED_SCHEME}:/") else None


def read_reference(path: PathLike) -> Location | None:
    """Return the step that a path or the file there names, or ``None`` for a file of another kind."""
    location, files = _location_in(path), get_filesystem(path)
    if location is not None or not files.isfile(path):
        return location
    with files.open(os.fspath(path), "rb") as file:
        text = file.read(_MAX_REFERENCE_BYTES).strip()
    return parse_location(text.decode()) if text.startswith(f"{TIERED_SCHEME}://".encode()) else None


def export_lightning_checkpoint(source: PathLike, target: PathLike, **options: Any) -> None:
    """Write a step in Lightning's own format.

    The target is a file, or a folder if :class:`TieredModelParallel` saved the step.
    """
    location = read_reference(source)
    if location is None:
        raise UsageError(f"Cannot export {source}: it is neither a tiered:// URL nor a file that names a step")
    state = load(str(location), **options)
    parts = CheckpointParts()
    parts.load_state_dict(state.pop("checkpoint"))
    if not state:
        torch.save(parts.joined(), target)
        return
    dcp.save(state, checkpoint_id=target, no_dist=True)
    torch.save(parts.joined(), Path(target) / "meta.pt")
