"""A job's scaling policy from the command line and a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from elastic.errors import PolicyError
from elastic.world.policy import ScalingPolicy

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


def policy_from(nnodes: str, file: Path | None, **options: Any) -> ScalingPolicy:
    """What the file says, with what the command line says on top; ``None`` is not said."""
    least, most = node_range(nnodes)
    said = {name: value for name, value in options.items() if value is not None}
    tree = _read(file) if file is not None else {}
    if "elasticPolicy" in tree or "restartPolicy" in tree:
        elastic = {"minReplicas": least, "maxReplicas": most} | dict(tree.get("elasticPolicy") or {})
        return ScalingPolicy.from_elastic_policy(elastic, tree.get("restartPolicy"), **said)
    try:
        return msgspec.convert({"min_replicas": least, "max_replicas": most} | tree | said, ScalingPolicy)
    except msgspec.ValidationError as error:
        raise PolicyError(f"{file or 'the policy'}: {error}") from error


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise PolicyError(f"the policy cannot be read from {file}: {error}") from error
    if not isinstance(tree, dict):
        raise PolicyError(f"{file} is no policy: write names and values, as min_replicas: 2")
    return tree
