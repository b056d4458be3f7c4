"""Which UpdateCluster turns a cluster's flag, and whether it has come to it. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import msgspec

from integration.hyperpod.cluster.flag import KEY, Mode, TieredStorageConfig
from tieredckpt.cli.exits import CommandError, Exit

NODE_RECOVERIES = ("Automatic", "None")
_CHANGING = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack"})


@dataclass(frozen=True)
class Cluster:
    """What DescribeCluster says, as far as it matters here."""

    name: str
    arn: str
    status: str
    flag: TieredStorageConfig
    node_recovery: str | None = None
    failure: str = ""


class Progress(enum.Enum):
    NOT_BEGUN = "not begun"
    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"


def enabling(cluster: Cluster, percent: int | None) -> TieredStorageConfig:
    """The flag switched on, with the share asked for or the one it has."""
    share = percent if percent is not None else cluster.flag.percent
    if not share:
        text = f"cluster {cluster.name} has no share of memory for checkpoints yet"
        raise CommandError(text, code=Exit.USAGE, advice="give one: --percent 30")
    return TieredStorageConfig(Mode.ENABLE, share)


def has(cluster: Cluster, wanted: TieredStorageConfig) -> bool:
    """Nothing is to be changed. The share of a flag that is off means nothing."""
    return cluster.flag == wanted or (not wanted.enabled and not cluster.flag.enabled)


def update_request(cluster: Cluster, wanted: TieredStorageConfig, node_recovery: str | None = None) -> dict[str, Any]:
    """The flag alone is refused: UpdateCluster wants instance groups or the node recovery with it.

    The node recovery is repeated as it is: instance groups as they are described cannot be given back as
    specifications, and a mistake in them would change machines.
    """
    recovery = node_recovery or cluster.node_recovery
    if recovery is None:
        text = f"UpdateCluster needs NodeRecovery beside {KEY}, and cluster {cluster.name} does not say which it has"
        advice = f"give the one it is to have: --node-recovery {' or '.join(NODE_RECOVERIES)}"
        raise CommandError(text, code=Exit.USAGE, advice=advice)
    return {"ClusterName": cluster.name, KEY: msgspec.to_builtins(wanted), "NodeRecovery": recovery}


def progress(cluster: Cluster, wanted: TieredStorageConfig, *, began: bool) -> Progress:
    """How far an update is; ``began``: the cluster was seen to be changing since."""
    if cluster.status in _CHANGING:
        return Progress.UNDER_WAY
    if cluster.status != "InService":
        return Progress.FAILED
    if has(cluster, wanted):
        return Progress.DONE
    return Progress.FAILED if began else Progress.NOT_BEGUN
