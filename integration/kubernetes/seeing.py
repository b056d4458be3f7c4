"""A job as the operator sees it, from what the API server and the agents say. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from integration.hyperpod.operator import Answer, JobState, Pod, Situation, Wanted
from integration.kubernetes.names import HEALTH_LABEL
from integration.kubernetes.pods import Seat, seat_of

Object = Mapping[str, Any]

_ENDED = ("Succeeded", "Failed")
_HEALTHY = ("", "Schedulable")


def has_ended(pod: Object) -> bool:
    """Its container will never run again."""
    return (pod.get("status") or {}).get("phase") in _ENDED


def has_begun(pod: Object) -> bool:
    """All of its containers have been started."""
    return (pod.get("status") or {}).get("phase", "Pending") != "Pending"


def is_leaving(thing: Object) -> bool:
    """It is being deleted."""
    return bool(thing["metadata"].get("deletionTimestamp"))


def address_of(pod: Object) -> str:
    return (pod.get("status") or {}).get("podIP") or ""


def situation_of(
    pods: Sequence[Object],
    answers: Mapping[str, Answer | None],
    health: Mapping[str, str],
    *,
    capacity: int | None = None,
    asked_back: Collection[str] = (),
) -> Situation:
    """``answers`` and ``asked_back`` by pod's name; ``health``: what the label of each node says.

    Pods that have ended are no pods.
    """
    return Situation(
        pods=tuple(_seen(pod, answers, health, asked_back) for pod in pods if not has_ended(pod)),
        capacity=capacity,
        can_replace=True,
    )


def health_of(node: Object) -> str:
    return (node["metadata"].get("labels") or {}).get(HEALTH_LABEL, "")


def missing_seats(job_name: str, wanted: Wanted, state: JobState, pods: Sequence[Object]) -> list[Seat]:
    """Places to be filled, so that as many pods live as are wanted.

    The operator knows pods by their names, so a new one takes the first name that neither its state nor the API server
    knows yet. Asked again before the pod is there it is the same name, and two are never made.
    """
    remembered = msgspec.json.encode(state).decode()
    known = " ".join(pod["metadata"]["name"] for pod in pods)
    found = []
    for group, count in wanted.pods.items():
        alive = sum(_counts(pod, group, state) for pod in pods)
        used = {*_indices(job_name, group, remembered), *_indices(job_name, group, known)}
        free = (index for index in range(len(used) + count) if index not in used)
        found += [Seat(group, index) for _, index in zip(range(count - alive), free, strict=False)]
    return found


def _counts(pod: Object, group: str, state: JobState) -> bool:
    """Whether a pod is one of those that are wanted."""
    going = is_leaving(pod) or pod["metadata"]["name"] in state.replaced
    return seat_of(pod).replica_spec == group and not going and not has_ended(pod)


def _indices(job_name: str, group: str, text: str) -> Iterator[int]:
    for found in re.finditer(rf"(?<![a-z0-9-]){re.escape(job_name)}-{re.escape(group)}-(\d+)(?![a-z0-9-])", text):
        yield int(found[1])


def _seen(
    pod: Object, answers: Mapping[str, Answer | None], health: Mapping[str, str], asked_back: Collection[str]
) -> Pod:
    name, node = pod["metadata"]["name"], pod["spec"].get("nodeName") or ""
    said = health.get(node, "")
    return Pod(
        name=name,
        group=seat_of(pod).replica_spec,
        node=node,
        ip=address_of(pod),
        answer=answers.get(name),
        node_fault="" if said in _HEALTHY else said,
        leaving=is_leaving(pod) or name in asked_back,
    )
