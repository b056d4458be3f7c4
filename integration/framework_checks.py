"""``tieredckpt doctor --framework``: versions, and settings that conflict with the tiers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from tieredckpt.agent.peer_config import is_unreplicated
from tieredckpt.bounded_yaml import load_yaml
from tieredckpt.cli.findings import CheckResult, check_failed, check_passed, check_warning
from tieredckpt.settings import Settings

_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[[^]]*\])?>=([\d.]+); extra == ["']([\w-]+)["']""")
_OFF = ("0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")
_INTERACTIVE = ("bash", "interactive")
"""Names of Slurm jobs in which Lightning does not use Slurm's environment."""


def check_framework(name: str, settings: Settings, environ: Mapping[str, str]) -> list[CheckResult]:
    """Return findings about a framework: its versions, and settings that conflict with the tiers."""
    return [*check_versions(name), *filter(None, [_check_conflict(name, settings, environ)])]


def _check_conflict(name: str, settings: Settings, environ: Mapping[str, str]) -> CheckResult | None:
    if name in ("accelerate", "transformers"):
        return _check_sharding(name, environ)
    if name == "lightning":
        return _check_slurm(environ)
    if name in ("megatron", "nvrx"):
        return _check_copies(settings)
    if name == "ray":
        return _check_ray_version(environ)
    if name == "torchft":
        return _check_peers(settings)
    return _check_torchtitan() if name == "torchtitan" else None


def _check_sharding(name: str, environ: Mapping[str, str]) -> CheckResult | None:
    file = accelerate_config_file(environ)
    try:
        engine = sharding_engine(environ, load_yaml(file.read_text()) if file.exists() else None)
    except (OSError, ValueError, yaml.YAMLError) as error:
        return check_warning("sharding", f"{file} cannot be read: {error}", "run accelerate config")
    if name == "transformers" and engine in ("DeepSpeed", "FSDP1"):
        return check_failed("sharding", f"Accelerate is configured for {engine}, which is refused", "use DDP or FSDP2")
    if name == "accelerate" and engine:
        advice = "use DDP, or a Checkpointer with the model and the optimizer"
        return check_warning("sharding", f"Accelerate is configured for {engine}, which no test covers", advice)
    return None


def _check_slurm(environ: Mapping[str, str]) -> CheckResult | None:
    if "SLURM_JOB_ID" not in environ or environ.get("SLURM_JOB_NAME") in _INTERACTIVE:
        return None
    return check_warning(
        "Slurm",
        "Lightning saves a checkpoint of its own and requeues the job when SIGUSR1 arrives",
        "request SIGTERM (sbatch --signal=TERM@120), or pass plugins=[SLURMEnvironment(auto_requeue=False)]",
    )


def _check_ray_version(environ: Mapping[str, str]) -> CheckResult | None:
    if environ.get("RAY_TRAIN_V2_ENABLED", "1").lower() not in _OFF:
        return None
    return check_failed("Ray Train", "RAY_TRAIN_V2_ENABLED turns Ray Train V2 off", "unset RAY_TRAIN_V2_ENABLED")


def _check_copies(settings: Settings) -> CheckResult | None:
    if settings.agent.peers != "off" and not is_unreplicated(settings.peer):
        return None
    return check_warning(
        "copies",
        "No other node has copies, so a lost node loses the steps that are only in memory",
        "set peer.copies to 2, and neither agent.peers nor peer.discovery to off",
    )


def _check_peers(settings: Settings) -> CheckResult | None:
    what = "replica groups on other nodes cannot be read"
    if settings.agent.peers == "off":
        return check_failed("peers", f"agent.peers is off: {what}", "set agent.peers to HOST:PORT or :0")
    if not settings.peer.secret:
        advice = "set the same TIEREDCKPT_PEER_SECRET on all nodes"
        return check_warning("peers", f"peer.secret is not set: {what}", advice)
    return None


def _check_torchtitan() -> CheckResult | None:
    spec = importlib.util.find_spec("torchtitan")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not folders or any(Path(folder, "components", "checkpointer").is_dir() for folder in folders):
        return None
    return check_failed(
        "torchtitan",
        f"{folders[0]} has no components/checkpointer, which the checkpoint manager extends",
        "install the tested version: pip install torchtitan==0.3.0",
    )


def check_versions(extra: str) -> list[CheckResult]:
    """Return a finding for each package that the extra requires."""
    found = []
    for package, least in required_versions(metadata.requires("tieredckpt") or (), extra).items():
        install = f"pip install 'tieredckpt[{extra}]'"
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            found.append(check_failed(package, f"{package} is not installed", install))
            continue
        if _release(version) < _release(least):
            found.append(check_failed(package, f"{package} {version} is older than {least}", f"{install} --upgrade"))
        else:
            found.append(check_passed(package, f"{package} {version}, at least {least} is needed"))
    return found


def required_versions(requirements: Iterable[str], extra: str) -> dict[str, str]:
    """Return the oldest supported version of each package of an extra."""
    parsed = filter(None, map(_REQUIREMENT.match, requirements))
    return {one[1]: one[2] for one in parsed if one[3] == extra}


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.split("+", 1)[0])[:3]))


def accelerate_config_file(environ: Mapping[str, str]) -> Path:
    """Return where ``accelerate config`` writes the user's default configuration."""
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home, "accelerate", "default_config.yaml").expanduser()


def sharding_engine(environ: Mapping[str, str], config: Any) -> str:
    """Return what Accelerate shards with, ``DeepSpeed``, ``FSDP1`` or ``FSDP2``; empty for none.

    Variables of ``accelerate launch`` override its configuration. Raise ``ValueError`` for one without keys.
    """
    config = {} if config is None else config
    if not isinstance(config, dict):
        raise ValueError(f"it is a {type(config).__name__}, not keys and values")  # noqa: TRY004 - a wrong file
    kind = str(config.get("distributed_type", "")).upper()
    options = config.get("fsdp_config")
    version = options.get("fsdp_version", 1) if isinstance(options, dict) else 1
    if environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in _ON:
        kind = "DEEPSPEED"
    elif environ.get("ACCELERATE_USE_FSDP", "").lower() in _ON:
        kind, version = "FSDP", environ.get("FSDP_VERSION", 1)
    if kind == "FSDP":
        return "FSDP2" if str(version) == "2" else "FSDP1"
    return "DeepSpeed" if kind == "DEEPSPEED" else ""
