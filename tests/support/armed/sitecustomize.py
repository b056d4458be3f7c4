"""An interpreter imports this as it starts, where a test has put its folder on the path."""

from tests.support import crashes

crashes.arm_crash_points()
