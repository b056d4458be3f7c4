"""The labels of Kubernetes nodes as failure domains of ours, and labels that stand in a file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from peerstore.cluster.nodes import parse_labels
from peerstore.errors import RequestError

Labels = tuple[tuple[str, str], ...]

_LAYERS = tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (4, 3, 2, 1))
"""AWS counts its network from the top; the last layer there is is the one the machine is attached to."""
_LEVELS = ("rack", "switch", "spine")
_OTHERS = {
    "topology.k8s.aws/zone-id": "zone",  # where a cluster has no names for its zones
    "topology.kubernetes.io/zone": "zone",
    "topology.k8s.aws/ultraserver-id": "ultraserver",
}
_OURS = dict.fromkeys((*_LEVELS, *_OTHERS.values()))
_FILE = "file:"
_LINE = re.compile(r'([^=\s]+)=("(?:[^"\\]|\\.)*")')


def labels_from_kubernetes(labels: Mapping[str, str]) -> Labels:
    """``rack`` (what the machine is attached to), ``switch`` and ``spine`` above it, ``zone``: those that are told.

    Works for plain Kubernetes, EKS and HyperPod, which label alike. A label that is called like one of ours is meant
    for us, and wins. All others are of no interest here.
    """
    told = filter(None, (labels.get(layer) for layer in _LAYERS))
    found = dict(zip(_LEVELS, told, strict=False))
    found.update({ours: labels[theirs] for theirs, ours in _OTHERS.items() if labels.get(theirs)})
    found.update({ours: labels[ours] for ours in _OURS if labels.get(ours)})
    return parse_labels(",".join(f"{level}={name}" for level, name in found.items()))


def read_labels(text: str) -> Labels:
    """``rack=r1,zone=a``, or ``file:/path`` to the labels of a Kubernetes node or pod.

    The file is what ``kubectl get node NAME -o json`` prints, the labels alone as JSON, or what the downward API
    writes for ``metadata.labels``.
    """
    if not text.startswith(_FILE):
        return parse_labels(text)
    path = Path(text.removeprefix(_FILE))
    try:
        return labels_from_kubernetes(_told(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RequestError) as error:
        raise RequestError(f"the labels in {path} cannot be used: {error}") from error


def _told(text: str) -> Mapping[str, str]:
    if text.lstrip().startswith("{"):
        told = json.loads(text)
        about = told.get("metadata")
        labels = about.get("labels") if isinstance(about, dict) else told
    else:
        labels = dict(map(_line, filter(None, map(str.strip, text.splitlines()))))
    if not isinstance(labels, dict) or not all(isinstance(name, str) for name in labels.values()):
        raise ValueError("that is neither a node with labels, nor names of labels and their values")
    return labels


def _line(line: str) -> tuple[str, str]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError(f'a line is not of the form NAME="VALUE": {line[:80]!r}')
    return found[1], json.loads(found[2])
