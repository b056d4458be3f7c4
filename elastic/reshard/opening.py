"""Checkpoints behind what the command line names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.reshard.durable import DurableTarget
from elastic.reshard.folder import FolderTarget
from elastic.reshard.forms import Source
from elastic.reshard.offline import Target
from elastic.reshard.place import Folder, Place, Stored
from elastic.reshard.plain import PlainSource
from elastic.reshard.stored import StoredSource
from tieredckpt.cli.exporting import source_of
from tieredckpt.cli.sight import Sight, open_sight
from tieredckpt.durable.open import open_store
from tieredckpt.errors import CheckpointNotFoundError
from tieredckpt.export.output import check_folder
from tieredckpt.location import Location
from tieredckpt.plain import folder_reader, plain_reader
from tieredckpt.settings import Settings, override


@contextmanager
def open_source(place: Place, settings: Settings) -> Iterator[Source]:
    """The checkpoint at ``place``; the newest whole one where no step is named."""
    with contextlib.ExitStack() as cleanup:
        if isinstance(place, Folder):
            source: Source = _folder(place.path)
        elif isinstance(place, Stored):
            sight = cleanup.enter_context(open_sight(_below(place.url, settings), memory=False))
            source = _of_job(sight, place.location, str(place))
        else:
            sight = cleanup.enter_context(open_sight(settings))
            source = _of_job(sight, place, str(place))
        cleanup.callback(source.close)
        yield source


@contextmanager
def open_target(place: Stored | Folder, step: int | None, settings: Settings, *, force: bool) -> Iterator[Target]:
    """Where a checkpoint is to be. An error when something is there and is not to be replaced."""
    if isinstance(place, Folder):
        check_folder(place.path, force=force)
        yield FolderTarget(place.path, step, force=force)
        return
    durable = _below(place.url, settings).durable
    location = place.location if place.location.step is not None else Location(place.job, step)
    with contextlib.closing(open_store(place.url, durable)) as store:
        yield DurableTarget(store, durable, location, force=force)


def _below(url: str, settings: Settings) -> Settings:
    """The settings for a store that the command line names; the options of an object store are none of a folder's."""
    changes: dict[str, object] = {"url": url}
    if url.startswith("file:"):
        changes["options"] = {}
    return override(settings, durable=changes)


def _folder(path: Path) -> Source:
    if not path.exists():
        raise CheckpointNotFoundError(f"there is no {path}")
    return PlainSource(str(path), folder_reader(path, trust_objects=True))


def _of_job(sight: Sight, location: Location, name: str) -> Source:
    """What a load would take: the newest step, whichever way it was written."""
    job, survey = location.job, sight.survey(location.job)
    plain = max((step for step in survey.plain if location.step in (None, step)), default=None)
    try:
        view = sight.chosen(location, survey)
    except CheckpointNotFoundError:
        if plain is None:
            raise
        view = None
    if plain is not None and (view is None or view.group.version < plain):
        return PlainSource(name, plain_reader(sight.durable(job), job, plain, trust_objects=True), plain)
    assert view is not None  # noqa: S101 - one of the two was found
    return StoredSource(name, source_of(sight, job, view.group))
