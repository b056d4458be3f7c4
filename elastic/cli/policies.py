"""A job's scaling policy from the command line and a file."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from elastic.control.messages import MAX_NODES
from elastic.control.movement import HangLimits
from elastic.errors import PolicyError
from elastic.world import foreign
from elastic.world.policy import ScalingPolicy
from tieredckpt.yaml_text import load_yaml

_FOREIGN = ("elasticPolicy", "restartPolicy")
_NODES = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?", re.ASCII)


def node_range(text: str) -> tuple[int, int]:
    """``2`` or ``1:4``."""
    found = _NODES.fullmatch(text)
    if found is None:
        raise PolicyError(f"--nnodes {text!r}: write a number of nodes, or MIN:MAX")
    least = int(found[1])
    most = int(found[2] or found[1])
    if not 1 <= least <= most:
        raise PolicyError(f"--nnodes {text!r}: MIN is at least 1 and at most MAX")
    return least, most


def hang_limits(step: str, first: str) -> HangLimits:
    """Seconds, ``auto`` or ``off``."""
    return HangLimits(_limit("--hang-timeout", step), _limit("--first-step-timeout", first))


def _limit(option: str, text: str) -> float | None:
    if text == "auto":
        return None
    try:
        seconds = 0.0 if text == "off" else float(text)
    except ValueError:
        seconds = -1.0
    if not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and text != "off"):
        raise PolicyError(f"{option} {text!r}: write a number of seconds above 0, auto or off")
    return seconds


def policy_from(nnodes: str, file: Path | None, **options: Any) -> ScalingPolicy:
    """What the file says, with what the command line says on top; ``None`` is not said."""
    policy = _policy_from(nnodes, file, **options)
    if policy.max_replicas > MAX_NODES:
        raise PolicyError(f"{policy.max_replicas} nodes at the most: a job has {MAX_NODES} or fewer; write less")
    return policy


def _policy_from(nnodes: str, file: Path | None, **options: Any) -> ScalingPolicy:
    least, most = node_range(nnodes)
    said = {name: value for name, value in options.items() if value is not None}
    tree = _read(file) if file is not None else {}
    if not tree.keys().isdisjoint(_FOREIGN):
        elastic, restart = _foreign(tree)
        known = {(foreign.ELASTIC_POLICY | foreign.RECIPE).get(name) for name in elastic}
        if "replica_discrete_values" not in known:
            ends = {"minReplicas": least, "maxReplicas": most}
            elastic |= {name: value for name, value in ends.items() if foreign.ELASTIC_POLICY[name] not in known}
        return ScalingPolicy.from_elastic_policy(elastic, restart, **said)
    try:
        return msgspec.convert({"min_replicas": least, "max_replicas": most} | tree | said, ScalingPolicy)
    except msgspec.ValidationError as error:
        raise PolicyError(f"{file or 'the policy'}: {error}") from error


def _foreign(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two parts of a custom resource, and nothing beside them that would be read as nothing."""
    wrong = [f"{name} stands beside {' and '.join(_FOREIGN)}, and would not be read" for name in tree.keys() - _FOREIGN]
    parts = [tree.get(name) or {} for name in _FOREIGN]
    wrong += [
        f"{name} is {part!r}, must be names and values"
        for name, part in zip(_FOREIGN, parts, strict=True)
        if not isinstance(part, dict)
    ]
    if wrong:
        raise PolicyError("; ".join(sorted(wrong)))
    elastic, restart = parts
    return dict(elastic), dict(restart)


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = load_yaml(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise PolicyError(f"the policy cannot be read from {file}: {error}") from error
    if not isinstance(tree, dict):
        raise PolicyError(f"{file} is no policy: write names and values, as min_replicas: 2")
    return tree
