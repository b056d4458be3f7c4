"""Exit statuses and signals of child processes, in words."""

from __future__ import annotations

from elastic.control.child_processes import describe_exit


def test_exit_status_is_described():
    assert describe_exit(3) == "it ended with status 3"
    assert describe_exit(-9) == "it was killed by signal 9 (SIGKILL)"
    assert describe_exit(-63) == "it was killed by signal 63"
