"""Configuration: frozen dataclasses, one file, environment on top. Nothing else here reads the environment.

A key that is not known, a value that is not valid and values that contradict each other are errors; all of them
are reported at once, by name.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints
from urllib.parse import urlsplit

import msgspec
import yaml

from peerstore.errors import RequestError
from peerstore.settings import StoreSettings, budget_bytes
from tieredckpt.errors import SettingsError
from tieredckpt.units import parse_size

Busy = Literal["wait", "skip"]


@dataclass(frozen=True)
class AgentSettings:
    """The node agent of this machine."""

    directory: str = ""
    """Arena, socket and log; on tmpfs. Default: /dev/shm/tieredckpt-UID."""
    embedded: bool = True
    """Start an agent when none answers."""
    budget: str = "50%"
    """Arena size, as bytes or as a share of this machine's memory."""
    slots_per_rank: int = 2
    burst_slots: int = 1
    job_ttl_s: float = 3600.0
    """A job's memory is given back this long after its last process went away."""
    linger_s: float = 60.0
    """An embedded agent leaves this long after the last job's memory was given back."""
    http: str = "127.0.0.1:0"
    """Where /metrics and /status are served; port 0 picks one (``tieredckpt doctor`` shows it), "off": nowhere."""


@dataclass(frozen=True)
class MemorySettings:
    """The memory tier, as the trainer uses it."""

    every: int = 1
    """Checkpointer: save steps divisible by this."""
    on_busy: Busy = "skip"
    """Checkpointer: when no slot can be given up, skip this save or wait for one."""
    wait_s: float = 60.0
    """How long "wait" (and a plain ``dcp.save``) waits."""
    quarantine_after: int = 5
    """A step that so many restarts began from without reaching a newer one is not used again while there is an older
    one; 0: never."""
    copy_threads: int = 0
    """Threads that move bytes in a trainer; 0: this process's share of the node's cores, between 1 and 8."""


@dataclass(frozen=True)
class DurableSettings:
    """The durable tier: an object store or a directory."""

    url: str = ""
    """``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///path`` or any other fsspec scheme. Empty: none."""
    every: int = 1
    """Drain steps divisible by this."""
    on_busy: Busy = "skip"
    """When the last drain is still running: leave this step out of the durable tier, or make the save wait."""
    keep_last: int = 0
    """Delete whole steps older than the newest so many; 0 keeps all. The newest whole step is never deleted."""
    keep_every: int = 0
    """Of the older ones, keep steps divisible by this."""
    part_size: str = "32MiB"
    concurrency: int = 4
    """Parts in flight."""
    bandwidth: str = ""
    """Upload limit per node and second ("500MiB"); empty: none."""
    retry_s: float = 300.0
    """How long one operation is retried while the store is slow, throttles or is away."""
    timeout_s: float = 60.0
    """How long one request may go without an answer."""
    compress: Literal["none", "zstd"] = "none"
    """Compress shards that gain from it on their way to the store."""
    spread: bool = False
    """Put a hash in front of object names, so that a store that splits its load by prefix can."""
    options: Mapping[str, str] = field(default_factory=dict)
    """For the store's own client: endpoint, region, profile, and what obstore or the fsspec file system takes."""


@dataclass(frozen=True)
class Settings:
    enabled: bool = True
    """False: the same scripts write plain DCP checkpoints to the durable URL, without agent and memory tier."""
    agent: AgentSettings = AgentSettings()
    memory: MemorySettings = MemorySettings()
    durable: DurableSettings = field(default_factory=DurableSettings)

    @property
    def store(self) -> StoreSettings:
        return StoreSettings(
            budget=self.agent.budget,
            slots_per_part=self.agent.slots_per_rank,
            burst_slots=self.agent.burst_slots,
            job_ttl_s=self.agent.job_ttl_s,
        )

    @property
    def agent_directory(self) -> Path:
        named = self.agent.directory
        return Path(named) if named else Path("/dev/shm") / f"tieredckpt-{os.getuid()}"  # noqa: S108


def load_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Defaults, then ``$TIEREDCKPT_CONFIG`` (YAML), then ``$TIEREDCKPT_ENABLED``, ``$TIEREDCKPT_<SECTION>_<KEY>``."""
    tree: dict[str, Any] = {}
    problems: list[str] = []
    path = environ.get("TIEREDCKPT_CONFIG")
    if path:
        tree, problems = _read_file(Path(path))
    for name, value in sorted(environ.items()):
        if name.startswith("TIEREDCKPT_") and name != "TIEREDCKPT_CONFIG":
            _set_from_environment(tree, name, value, problems)
    return _build(tree, problems)


def copy_threads(settings: Settings, environ: Mapping[str, str] = os.environ) -> int:
    """How many threads move bytes in this process; the other ranks of the node move theirs at the same time."""
    ranks = environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // (int(ranks) if ranks.isdigit() and int(ranks) else 1)
    return settings.memory.copy_threads or max(1, min(8, share))


def settings_from(tree: Mapping[str, Any]) -> Settings:
    """Settings from a nested mapping, checked the same way."""
    return _build(dict(tree), [])


def override(settings: Settings, **sections: Mapping[str, Any]) -> Settings:
    """``settings`` with some keys changed: ``override(s, durable={"url": "s3://b"})``, checked the same way."""
    tree = dataclasses.asdict(settings)
    for section, changes in sections.items():
        tree[section].update(changes)
    return _build(tree, [])


def _read_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"TIEREDCKPT_CONFIG={path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"TIEREDCKPT_CONFIG={path} is not YAML: {error}") from error
    if tree is None:
        return {}, []
    if not isinstance(tree, dict):
        return {}, [f"{path}: expected sections (agent, memory, durable), found {type(tree).__name__}"]
    return tree, []


def _set_from_environment(tree: dict[str, Any], name: str, value: str, problems: list[str]) -> None:
    key = name.removeprefix("TIEREDCKPT_").lower()
    if key == "enabled":
        tree["enabled"] = value
        return
    section, _, rest = key.partition("_")
    if section not in _SECTIONS or rest not in _SECTIONS[section]:
        known = ", ".join(f"TIEREDCKPT_{s.upper()}_{k.upper()}" for s, keys in _SECTIONS.items() for k in keys)
        problems.append(f"{name}: no such setting; known are TIEREDCKPT_ENABLED, TIEREDCKPT_CONFIG, {known}")
        return
    part = tree.setdefault(section, {})
    if isinstance(part, dict):
        part[rest] = (
            dict(pair.split("=", 1) for pair in value.split(",") if "=" in pair) if rest == "options" else value
        )


def _build(tree: dict[str, Any], problems: list[str]) -> Settings:
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if name == "enabled":
            values[name] = _convert("enabled", value, bool, problems)
        elif name in _SECTIONS:
            values[name] = _section(name, value, problems)
        else:
            problems.append(f"{name}: no such key; known are enabled, {', '.join(_SECTIONS)}")
    settings = Settings(**values) if not problems else None
    if settings is not None:
        problems += _contradictions(settings)
    if problems or settings is None:
        raise SettingsError("; ".join(problems))
    return settings


def _section(name: str, tree: Any, problems: list[str]) -> Any:
    kind = _SECTION_TYPES[name]
    if tree is None:
        return kind()
    if not isinstance(tree, Mapping):
        problems.append(f"{name}: expected keys and values, found {type(tree).__name__}")
        return kind()
    values = {}
    for key, value in tree.items():
        if key not in _SECTIONS[name]:
            problems.append(f"{name}.{key}: no such key; known are {', '.join(_SECTIONS[name])}")
        else:
            values[key] = _convert(f"{name}.{key}", value, _SECTIONS[name][key], problems)
    return kind(**values)


def _convert(key: str, value: Any, kind: Any, problems: list[str]) -> Any:
    try:
        if kind is bool and isinstance(value, str):
            return {
                "1": True,
                "true": True,
                "yes": True,
                "on": True,
                "0": False,
                "false": False,
                "no": False,
                "off": False,
            }[value.strip().lower()]
        if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        return msgspec.convert(value, kind, strict=False)
    except KeyError:
        problems.append(f"{key}: {value!r} is neither true nor false (1, 0)")
    except msgspec.ValidationError as error:
        problems.append(f"{key}: {error} (found {value!r})")
    return None


def _contradictions(settings: Settings) -> list[str]:
    problems = []
    agent, memory, durable = settings.agent, settings.memory, settings.durable
    try:
        budget_bytes(agent.budget)
    except RequestError as error:
        problems.append(f"agent.budget: {error}")
    for key, text in (("durable.part_size", durable.part_size), ("durable.bandwidth", durable.bandwidth or "1")):
        try:
            if parse_size(text) <= 0:
                problems.append(f"{key}: must be above 0")
        except ValueError as error:
            problems.append(f"{key}: {error}")
    for key, number, least in (
        ("agent.slots_per_rank", agent.slots_per_rank, 2),
        ("agent.burst_slots", agent.burst_slots, 0),
        ("agent.job_ttl_s", agent.job_ttl_s, 1),
        ("agent.linger_s", agent.linger_s, 0),
        ("memory.every", memory.every, 1),
        ("memory.wait_s", memory.wait_s, 0),
        ("memory.quarantine_after", memory.quarantine_after, 0),
        ("memory.copy_threads", memory.copy_threads, 0),
        ("durable.every", durable.every, 1),
        ("durable.keep_last", durable.keep_last, 0),
        ("durable.keep_every", durable.keep_every, 0),
        ("durable.concurrency", durable.concurrency, 1),
        ("durable.retry_s", durable.retry_s, 0),
        ("durable.timeout_s", durable.timeout_s, 1),
    ):
        if number < least:
            problems.append(f"{key}: {number} is below {least}")
    if durable.url and not urlsplit(durable.url).scheme and not durable.url.startswith("/"):
        problems.append(f"durable.url: {durable.url!r} is neither a URL (s3://bucket/prefix) nor an absolute path")
    if memory.every > 0 and durable.every % memory.every:
        problems.append(
            f"durable.every: {durable.every} is not a multiple of memory.every ({memory.every}), so those steps are "
            "never in memory to be drained"
        )
    if durable.keep_every and not durable.keep_last:
        problems.append("durable.keep_every: has no effect without durable.keep_last")
    if not settings.enabled and not durable.url:
        problems.append("enabled: false needs durable.url, the place plain checkpoints are written to")
    return problems


_SECTION_TYPES: dict[str, Any] = {"agent": AgentSettings, "memory": MemorySettings, "durable": DurableSettings}
_SECTIONS: dict[str, dict[str, Any]] = {name: get_type_hints(kind) for name, kind in _SECTION_TYPES.items()}
