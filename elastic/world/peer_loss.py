"""Whether an error message says that another rank was lost: phrases of torch and its transports. Pure."""

from __future__ import annotations

_WORDS = (
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
    """Whether an error's text may be about the end of another rank."""
    return any(word in message for word in _WORDS)
