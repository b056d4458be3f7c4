"""``TieredStorageConfig``: how much of its nodes' memory a HyperPod cluster gives to checkpoints, as settings of ours.

It is found in a file (alone, or a whole answer of ``describe-cluster``), in a directory that a ConfigMap is mounted
at, or asked for through the API. What it says is beneath everything that is said elsewhere.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from tieredckpt.errors import SettingsError, TierUnavailableError
from tieredckpt.yaml_text import load_yaml

KEY = "TieredStorageConfig"
LEAST_ADVISED_PERCENT = 20
"""AWS's guide asks for 20 to 100; the API takes less."""
_MOST_BYTES = 4 << 20
_SUFFIXES = (".json", ".yaml", ".yml")


class Mode(enum.Enum):
    ENABLE = "Enable"
    DISABLE = "Disable"


class TieredStorageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="pascal"):
    """As in CreateCluster, UpdateCluster and DescribeCluster."""

    mode: Mode
    instance_memory_allocation_percentage: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None

    @property
    def percent(self) -> int | None:
        return self.instance_memory_allocation_percentage

    @property
    def enabled(self) -> bool:
        return self.mode is Mode.ENABLE

    def described(self) -> str:
        """For people."""
        if not self.enabled:
            return "off: nothing is kept in the nodes' memory, checkpoints go to the durable tier directly"
        share = "as much as the agent's own settings say" if self.percent is None else f"{self.percent} %"
        return f"on: {share} of each node's memory"


DISABLED = TieredStorageConfig(Mode.DISABLE)


def flag_in(tree: Any, where: str) -> TieredStorageConfig:
    """The flag alone, under its name, or in a cluster's whole description; one that was never set is off."""
    if not isinstance(tree, Mapping):
        raise SettingsError(f"{where}: expected {KEY} or a cluster's description, found {type(tree).__name__}")
    if KEY in tree:
        tree = tree[KEY]
    elif "Mode" not in tree:
        if "InstanceGroups" in tree:
            return DISABLED
        raise SettingsError(f"{where}: there is neither {KEY} nor Mode, and it describes no cluster either")
    try:
        flag = msgspec.convert(tree, TieredStorageConfig, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {KEY}: {error}") from error
    if flag.enabled and flag.percent == 0:
        text = "Enable with 0 percent keeps nothing: write Disable, or 1 to 100 (AWS's guide: from 20 on)"
        raise SettingsError(f"{where}: {KEY}: {text}")
    return flag


def flag_at(path: Path) -> TieredStorageConfig:
    """The flag in a file, or in a directory as Kubernetes mounts a ConfigMap: one file, or one for each key."""
    if not path.is_dir():
        return flag_in(_parsed(path), str(path))
    found = sorted(one for one in path.iterdir() if not one.name.startswith(".") and one.is_file())
    keys = {one.name: one for one in found if one.name in _NAMES}
    if keys:
        return flag_in({name: _text(one).strip() for name, one in keys.items()}, str(path))
    whole = [one for one in found if one.name == KEY or one.suffix in _SUFFIXES]
    if len(whole) != 1:
        listed = ", ".join(one.name for one in found) or "nothing"
        raise SettingsError(f"{path}: expected one file {KEY}, or {' and '.join(_NAMES)}; there is {listed}")
    return flag_in(_parsed(whole[0]), str(whole[0]))


_NAMES = tuple(field.encode_name for field in msgspec.structs.fields(TieredStorageConfig))


def settings_of(flag: TieredStorageConfig) -> dict[str, Any]:
    """The flag in this project's settings, as ``$TIEREDCKPT_CONFIG`` has them."""
    if not flag.enabled:
        return {"enabled": False}
    return {"enabled": True} if flag.percent is None else {"enabled": True, "agent": {"budget": f"{flag.percent}%"}}


def settings_from(where: str) -> dict[str, Any]:
    """What ``hyperpod:/path`` and ``hyperpod:CLUSTER`` say, for ``$TIEREDCKPT_CLUSTER`` and ``--cluster-config``."""
    if where.startswith("/"):
        return settings_of(flag_at(Path(where)))
    from integration.hyperpod.cluster.api import Clusters
    from tieredckpt.cli.exits import CommandError, Exit

    try:
        return settings_of(Clusters().describe(where).flag)
    except CommandError as error:
        kind = TierUnavailableError if error.code is Exit.UNAVAILABLE else SettingsError
        raise kind(f"{error}{': ' if error.advice else ''}{error.advice}") from error


def _parsed(path: Path) -> Any:
    text = _text(path)
    try:
        return load_yaml(text)
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, ValueError) as error:
        raise SettingsError(f"{path} is neither JSON nor YAML: {error}") from error


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise SettingsError(f"{path} is longer than {_MOST_BYTES} bytes: that is no cluster's description")
        return data.decode()
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not text: {error}") from error
