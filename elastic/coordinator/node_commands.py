"""Numbered commands to supervisors. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from elastic.control.control_messages import CommandKind, NodeCommand, WorldSpec
from elastic.coordinator.node_liveness import NodeRecord
from elastic.fault_injection.fault_spec import SUPERVISOR_KINDS, FaultInjection
from elastic.world.world_state import PromoteSpare, RespawnRanks, RespawnStragglers

CommandAction = RespawnRanks | PromoteSpare | RespawnStragglers


class NodeCommands:
    """Appends commands to the records of nodes. A node acknowledges them by number."""

    def __init__(self) -> None:
        self._last = 0

    def add(self, action: CommandAction, nodes: Mapping[str, NodeRecord]) -> None:
        """Command the processes of a node as a decision demands. A node without a record receives nothing."""
        self._last += 1
        if action.node in nodes:
            nodes[action.node].commands.append(NodeCommand(self._last, *_COMMANDS[type(action)](action)))

    def inject(
        self, injection: FaultInjection, nodes: Mapping[str, NodeRecord], spec: WorldSpec | None, nproc: int
    ) -> None:
        """Send a fault to all nodes, because the node of its rank may change until the fault happens.

        An immediate fault of a supervisor goes only to the node that has the rank now.
        """
        self._last += 1
        receivers: Iterable[NodeRecord] = nodes.values()
        if injection.is_immediate and injection.kind in SUPERVISOR_KINDS:
            node, local_rank = injection.node, injection.local_rank
            if injection.rank is not None and spec is not None:
                place, local_rank = divmod(injection.rank, nproc)
                node = spec.ranked_nodes[place]
            injection = msgspec.structs.replace(injection, rank=None, node=node, local_rank=local_rank)
            receivers = [record for name, record in nodes.items() if name == node]
        for record in receivers:
            record.commands.append(NodeCommand(self._last, CommandKind.INJECT, injection=injection))


_COMMANDS: dict[type, Callable[[Any], tuple[CommandKind, tuple[int, ...]]]] = {
    RespawnRanks: lambda action: (CommandKind.RESPAWN, action.local_ranks),
    PromoteSpare: lambda action: (CommandKind.PROMOTE, (action.local_rank,)),
    RespawnStragglers: lambda _: (CommandKind.STRAGGLERS, ()),
}
