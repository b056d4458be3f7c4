"""torchft: recovering replica groups read their state from the node agents."""

from peerstore.optional_packages import optional_imports

with optional_imports("integration.torchft", "'tieredckpt[torchft]'"):
    from integration.torchft.tiered_transport import TieredTransport

__all__ = ["TieredTransport"]
