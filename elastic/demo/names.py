"""What the demo's director and its ranks both know."""

from __future__ import annotations

JOB = "elastic-demo"
LAST = "last-step"
"""The file that names the last step; until it is there the ranks train on."""
