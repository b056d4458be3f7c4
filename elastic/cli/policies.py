"""A job's scaling policy from the command line and a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from elastic.control.messages import MAX_NODES
from elastic.errors import PolicyError
from elastic.schedulers.allocation import node_range
from elastic.world import foreign
from elastic.world.policy import ScalingPolicy
from tieredckpt.yaml_text import load_yaml

_FOREIGN = ("elasticPolicy", "restartPolicy")


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
