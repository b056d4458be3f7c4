"""Detection of a lost peer rank in error messages of torch and its transports. Pure."""

from __future__ import annotations

_PHRASES = (
    "gloo",
    "NCCL",
    "nccl",
    "ProcessGroup",
    "process group",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "TCPStore",
)


def blames_another_rank(message: str) -> bool:
    """Return whether an error message may result from the loss of another rank."""
    return any(phrase in message for phrase in _PHRASES)
