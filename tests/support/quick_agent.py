"""Node agent that detects lost nodes quickly, to shorten tests."""

from __future__ import annotations

import functools
import sys

from peerstore.membership.swim import MembershipSettings
from peerstore.server.node_peers import NodeIdentity
from tieredckpt.agent import __main__ as agent

if __name__ == "__main__":
    quick = MembershipSettings(heartbeat_s=0.2, ping_timeout_s=1.0, dead_after_s=1.0)
    agent.NodeIdentity = functools.partial(NodeIdentity, membership=quick)  # type: ignore[misc,assignment]
    sys.exit(agent.main())
