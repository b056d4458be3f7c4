"""What AWS's library calls its objects in S3: two layouts, for one namespace below one base path.

::

    BASE/NAMESPACE/rank_3/step_120/checkpoint.pt      default
    BASE/NAMESPACE/step_120/rank_3/checkpoint.pt      Ray
    BASE/NAMESPACE/.../metadata.metadata              beside the coordinator's, last
"""

from __future__ import annotations

import abc
import importlib
import logging
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

SHARD, METADATA = "checkpoint.pt", "metadata.metadata"


class Named(NamedTuple):
    """What an object's name says."""

    step: int
    rank: int
    file: str


class S3PathStrategy(abc.ABC):
    """Where the objects of a checkpoint are, by AWS's name for that."""

    def __init__(self, base_path: str, logger: logging.Logger | None = None) -> None:
        self.base_path = base_path
        self.logger = logger or logging.getLogger(__name__)

    @abc.abstractmethod
    def name(self, rank: int, step: int, filename: str) -> str:
        """Of an object, below its namespace."""

    @abc.abstractmethod
    def parse(self, name: str) -> Named | None:
        """What a name below the namespace stands for; ``None`` for a stranger's object."""

    @abc.abstractmethod
    def get_checkpoint_dir(self, namespace: str, step: int) -> str:
        """The one folder with everything of a step, where there is one."""

    def get_s3_uri(self, namespace: str, rank: int, step: int, filename: str) -> str:
        return f"{self.base_path}/{namespace}/{self.name(rank, step, filename)}"

    def find_step_ranks(  # noqa: PLR0917 - as AWS calls it
        self, paginator: Any, bucket: str, base_prefix: str, namespace: str, world_size: int, log_prefix: str = ""
    ) -> dict[int, set[int]]:
        """The ranks that have an object of each step, whatever ``world_size`` is. ``list_objects_v2`` is asked."""
        found: dict[int, set[int]] = {}
        below = f"{base_prefix}/{namespace}/" if base_prefix else f"{namespace}/"
        for key in _keys(paginator, bucket, below):
            named = self.parse(key.removeprefix(below))
            if named is not None:
                found.setdefault(named.step, set()).add(named.rank)
        return found


class DefaultS3PathStrategy(S3PathStrategy):
    """``rank_R/step_N``."""

    _FORM = re.compile(r"rank_([0-9]{1,9})/step_([0-9]{1,18})/([^/]+)")

    def name(self, rank: int, step: int, filename: str) -> str:
        return f"rank_{rank}/step_{step}/{filename}"

    def parse(self, name: str) -> Named | None:
        match = self._FORM.fullmatch(name)
        return Named(int(match[2]), int(match[1]), match[3]) if match else None

    def get_checkpoint_dir(self, namespace: str, step: int) -> str:
        raise NotImplementedError(
            "in the default layout every rank has a folder of its own, so no folder holds a whole step; "
            "RayS3PathStrategy has one"
        )


class RayS3PathStrategy(S3PathStrategy):
    """``step_N/rank_R``."""

    _FORM = re.compile(r"step_([0-9]{1,18})/rank_([0-9]{1,9})/([^/]+)")

    def name(self, rank: int, step: int, filename: str) -> str:
        return f"step_{step}/rank_{rank}/{filename}"

    def parse(self, name: str) -> Named | None:
        match = self._FORM.fullmatch(name)
        return Named(int(match[1]), int(match[2]), match[3]) if match else None

    def get_checkpoint_dir(self, namespace: str, step: int) -> str:
        return f"{self.base_path}/{namespace}/step_{step}"


def detected(base_path: str, logger: logging.Logger | None = None) -> S3PathStrategy:
    """Ray's layout inside a Ray Train job, else the default one."""
    try:
        train = importlib.import_module("ray.train")
    except ImportError:
        return DefaultS3PathStrategy(base_path, logger)
    try:
        train.get_context()
    except RuntimeError:  # not inside a job
        return DefaultS3PathStrategy(base_path, logger)
    return RayS3PathStrategy(base_path, logger)


def _keys(paginator: Any, bucket: str, prefix: str) -> Iterator[str]:
    for page in paginator.paginate(Bucket=bucket, Prefix=prefix):
        for found in page.get("Contents", []):
            yield found["Key"]
