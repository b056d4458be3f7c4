"""``SageMakerCheckpointConfig`` as AWS's library has it, and what it means for this project's settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from integration.sagemaker.errors import SageMakerTieredStorageConfigError, SageMakerTieredStorageError
from integration.sagemaker.layouts import S3PathStrategy, detected
from peerstore.errors import InvalidNameError
from peerstore.names import job_name
from tieredckpt.settings import Settings, load_settings, override


@dataclass
class SageMakerCheckpointConfig:
    """What AWS's has, in its order, and behind it what is only here.

    ``namespace`` is the job's name here. ``world_size`` has to be a positive integer and is otherwise not needed: any
    world reads what any other wrote. It may be changed between saves, ``save_to_s3`` above all.
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
    """Where ``/v1/cp`` is served that AWS's library wrote to; its checkpoints there can be loaded, too."""
    memory_token: str = field(default="", kw_only=True)
    """What that service wants to hear, where it wants anything."""

    def __post_init__(self) -> None:
        if self.s3_tier_base_path and self.s3_path_strategy:
            raise ValueError("s3_tier_base_path and s3_path_strategy both say where S3 is: give one of them")

    def get_s3_strategy(self) -> S3PathStrategy | None:
        """The layout of AWS's library below the base path. Only who reads or writes its format needs that."""
        if self.s3_path_strategy is None and self.s3_tier_base_path:
            return detected(self.s3_tier_base_path, self.logger)
        return self.s3_path_strategy

    @property
    def s3_base_path(self) -> str:
        path = self.s3_path_strategy.base_path if self.s3_path_strategy else self.s3_tier_base_path
        return path.rstrip("/")

    @property
    def saves_durably(self) -> bool:
        """Whether what is saved now is to become durable."""
        return self.save_to_s3 or self.save_to_disk


def checked(config: SageMakerCheckpointConfig) -> SageMakerCheckpointConfig:
    """``config``, or :class:`SageMakerTieredStorageConfigError` that says all that is wrong with it."""
    problems = []
    try:
        job_name(config.namespace)
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


def settings_of(config: SageMakerCheckpointConfig, settings: Settings | None = None) -> Settings:
    """The environment's settings, with the durable tier where ``config`` says."""
    settings = settings or load_settings()
    url = config.s3_base_path or config.disk_tier_base_path
    if not url:
        return settings
    # Which steps become durable is said save by save; one that was asked for is not left out because S3 is slow.
    return override(settings, durable={"url": url, "every": settings.memory.every, "on_busy": "wait"})


def step_of(step: int, path: object) -> int:
    """The step, explicit or out of ``.../step_N/...``."""
    text = str(path or "")
    if step == -1 and "step_" in text:
        digits = text.partition("step_")[2].partition("/")[0]
        step = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else -1
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 62:
        raise SageMakerTieredStorageError(
            f"which step is this? step={step!r} and path={text!r} do not say: give step=N, or a path with step_N in it"
        )
    return step
