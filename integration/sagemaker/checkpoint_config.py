"""SageMakerCheckpointConfig and the S3 path strategies, and the settings they select. Pure.

::

    BASE/NAMESPACE/rank_3/step_120/checkpoint.pt      default
    BASE/NAMESPACE/step_120/rank_3/checkpoint.pt      Ray
    BASE/NAMESPACE/.../metadata.metadata              next to the coordinator's, written last
"""

from __future__ import annotations

import abc
import importlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from integration.sagemaker.errors import SageMakerTieredStorageConfigError, SageMakerTieredStorageError
from peerstore.errors import InvalidNameError
from peerstore.shard_records import validate_job_name
from tieredckpt.settings import Settings, load_settings, override_settings


@dataclass
class SageMakerCheckpointConfig:
    """The fields of AWS's class in its order, followed by fields of this project.

    ``namespace`` is the job's name. ``world_size`` must be a positive integer but is not used: any world size can read
    any checkpoint. Fields may change between saves, especially ``save_to_s3``.
    """

    namespace: str
    world_size: int
    disk_tier_base_path: str = ""
    s3_tier_base_path: str = ""
    s3_path_strategy: S3PathStrategy | None = None
    save_to_s3: bool = False
    save_to_disk: bool = False
    logger: logging.Logger | None = None
    memory_url: str = field(default="", kw_only=True)
    """Address of a ``/v1/cp`` service with checkpoints of AWS's library to load."""
    memory_token: str = field(default="", kw_only=True)
    """Token of that service, if it requires one."""

    def __post_init__(self) -> None:
        if self.s3_tier_base_path and self.s3_path_strategy:
            raise ValueError("s3_tier_base_path and s3_path_strategy both say where S3 is: give one of them")

    def get_s3_strategy(self) -> S3PathStrategy | None:
        """Return the layout below the base path. Only readers and writers of AWS's format need it."""
        if self.s3_path_strategy is None and self.s3_tier_base_path:
            return detect_path_strategy(self.s3_tier_base_path, self.logger)
        return self.s3_path_strategy

    @property
    def s3_base_path(self) -> str:
        path = self.s3_path_strategy.base_path if self.s3_path_strategy else self.s3_tier_base_path
        return path.rstrip("/")

    @property
    def saves_durably(self) -> bool:
        """Whether saves become durable now."""
        return self.save_to_s3 or self.save_to_disk


def validated_config(config: SageMakerCheckpointConfig) -> SageMakerCheckpointConfig:
    """Return ``config``.

    Raise :class:`SageMakerTieredStorageConfigError` with all problems.
    """
    problems = []
    try:
        validate_job_name(config.namespace)
    except InvalidNameError as error:
        problems.append(f"namespace: {error}")
    if type(config.world_size) is not int or config.world_size <= 0:
        problems.append(f"world_size {config.world_size!r} is no positive integer")
    s3 = config.s3_base_path
    if s3 and not s3.removeprefix("s3://").strip("/"):
        problems.append(f"the S3 base path {s3!r} names no bucket")
    if s3 and not s3.startswith("s3://"):
        problems.append(f"the S3 base path {s3!r} does not start with s3://")
    if config.save_to_s3 and not s3:
        problems.append("save_to_s3 without s3_tier_base_path or s3_path_strategy")
    if config.save_to_disk and not config.disk_tier_base_path:
        problems.append("save_to_disk without disk_tier_base_path")
    if config.save_to_disk and s3:
        problems.append("save_to_disk beside S3: a job has one durable tier")
    if problems:
        raise SageMakerTieredStorageConfigError("; ".join(problems))
    return config


def settings_for_config(config: SageMakerCheckpointConfig, settings: Settings | None = None) -> Settings:
    """Return the environment's settings with the durable tier of ``config``."""
    settings = settings or load_settings()
    url = config.s3_base_path or config.disk_tier_base_path
    if not url:
        return settings
    # Each save decides whether it becomes durable; a requested upload is not skipped because S3 is slow.
    # As in AWS's library, a failure of S3 does not fail the save.
    return override_settings(
        settings, durable={"url": url, "every": settings.memory.every, "on_busy": "wait", "on_unreachable": "continue"}
    )


def step_from_path(step: int, path: object) -> int:
    """Return the step, explicit or from ``.../step_N/...``."""
    text = str(path or "")
    if step == -1 and "step_" in text:
        digits = text.partition("step_")[2].partition("/")[0]
        step = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else -1
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 62:
        raise SageMakerTieredStorageError(
            f"which step is this? step={step!r} and path={text!r} do not say: give step=N, or a path with step_N in it"
        )
    return step


SHARD_FILE, METADATA_FILE = "checkpoint.pt", "metadata.metadata"


class ObjectName(NamedTuple):
    """Parts of an object's name."""

    step: int
    rank: int
    file: str


class S3PathStrategy(abc.ABC):
    """Layout of a checkpoint's objects, under AWS's name."""

    def __init__(self, base_path: str, logger: logging.Logger | None = None) -> None:
        self.base_path = base_path
        self.logger = logger or logging.getLogger(__name__)

    @abc.abstractmethod
    def name(self, rank: int, step: int, filename: str) -> str:
        """Return the name of an object below its namespace."""

    @abc.abstractmethod
    def parse(self, name: str) -> ObjectName | None:
        """Return the parts of a name below the namespace; None for foreign objects."""

    @abc.abstractmethod
    def get_checkpoint_dir(self, namespace: str, step: int) -> str:
        """Return the folder of a step, if the layout has one."""

    def get_s3_uri(self, namespace: str, rank: int, step: int, filename: str) -> str:
        return f"{self.base_path}/{namespace}/{self.name(rank, step, filename)}"

    def find_step_ranks(  # noqa: PLR0917 - as AWS calls it
        self, paginator: Any, bucket: str, base_prefix: str, namespace: str, world_size: int, log_prefix: str = ""
    ) -> dict[int, set[int]]:
        """Return the ranks that have objects, by step. ``world_size`` has no effect.

        The paginator calls ``list_objects_v2``.
        """
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

    def parse(self, name: str) -> ObjectName | None:
        match = self._FORM.fullmatch(name)
        return ObjectName(int(match[2]), int(match[1]), match[3]) if match else None

    def get_checkpoint_dir(self, namespace: str, step: int) -> str:
        raise NotImplementedError(
            "in the default layout every rank has a folder of its own, so no folder holds a complete step; "
            "RayS3PathStrategy has one"
        )


class RayS3PathStrategy(S3PathStrategy):
    """``step_N/rank_R``."""

    _FORM = re.compile(r"step_([0-9]{1,18})/rank_([0-9]{1,9})/([^/]+)")

    def name(self, rank: int, step: int, filename: str) -> str:
        return f"step_{step}/rank_{rank}/{filename}"

    def parse(self, name: str) -> ObjectName | None:
        match = self._FORM.fullmatch(name)
        return ObjectName(int(match[1]), int(match[2]), match[3]) if match else None

    def get_checkpoint_dir(self, namespace: str, step: int) -> str:
        return f"{self.base_path}/{namespace}/step_{step}"


def detect_path_strategy(base_path: str, logger: logging.Logger | None = None) -> S3PathStrategy:
    """Return Ray's layout inside a Ray Train job, otherwise the default one."""
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
        for entry in page.get("Contents", []):
            yield entry["Key"]
