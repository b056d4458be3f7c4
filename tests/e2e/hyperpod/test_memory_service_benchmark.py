"""The benchmark of the memory service runs and checks the data, without a check of speed."""

from __future__ import annotations

import pytest

pytest.importorskip("amzn_sagemaker_checkpointing")


def test_benchmark_measures_both_servers_both_ways() -> None:
    from benchmarks.memory_service import measure

    found = measure(1, 2)
    assert {(way, what) for way, parts in found["ways"].items() for what in parts} == {
        (way, what) for way in ("client", "wire") for what in ("put_s", "get_s")
    }
    for parts in found["ways"].values():
        assert all(part["theirs"] > 0 and part["ours"] > 0 and part["times_as_fast"] > 0 for part in parts.values())
