"""The labels of Kubernetes nodes as failure domains of ours."""

from __future__ import annotations

from collections.abc import Mapping

from peerstore.cluster.nodes import parse_labels

_LAYERS = tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (4, 3, 2, 1))
"""AWS counts its network from the top; the last layer there is is the one the machine is attached to."""
_LEVELS = ("rack", "switch", "spine")
_OTHERS = {"topology.kubernetes.io/zone": "zone", "topology.k8s.aws/ultraserver-id": "ultraserver"}


def labels_from_kubernetes(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """``rack`` (what the machine is attached to), ``switch`` and ``spine`` above it, ``zone``: those that are told.

    Works for plain Kubernetes, EKS and HyperPod, which label alike. All other labels are of no interest here.
    """
    told = filter(None, (labels.get(layer) for layer in _LAYERS))
    found = dict(zip(_LEVELS, told, strict=False))
    found.update({ours: labels[theirs] for theirs, ours in _OTHERS.items() if labels.get(theirs)})
    return parse_labels(",".join(f"{level}={name}" for level, name in found.items()))
