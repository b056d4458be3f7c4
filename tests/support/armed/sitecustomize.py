"""Arm crash points when an interpreter starts with this folder on its path."""

from tests.support import crashes

crashes.arm_crash_points()
