"""Names of files as parts of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import UsageError
from tieredckpt.files import part_of, place_of
from tieredckpt.manifest import OPEN_ENDED
from tieredckpt.slot_files import METADATA, layout_of


def test_what_dcp_calls_its_files_never_meets():
    names = [METADATA, *(f"__{rank}_{number}.distcp" for rank in range(0, 1024, 7) for number in range(0, 1022, 13))]
    parts = [part_of(name) for name in names]
    assert len(set(parts)) == len(names)
    assert part_of(METADATA) == 0
    assert all(0 <= part < OPEN_ENDED for part in parts)
    assert part_of("__1023_1021.distcp") < OPEN_ENDED


@given(st.text(min_size=1, max_size=40))
def test_every_name_has_a_part(name):
    assert (part_of(name) == 0) == (name == METADATA)
    assert part_of(name) < OPEN_ENDED


def test_a_files_place_in_its_shard_does_not_depend_on_its_size():
    layout = layout_of("__0_0.distcp")
    assert layout.item_starts((5,)) == layout.item_starts((1 << 40,)) == [0]
    assert layout.size_bytes((10,)) == layout.header_bytes + 10
    assert len(layout.header((1 << 40,))) == layout.header_bytes


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("job", ("job", None, "")),
        ("job/", ("job", None, "")),
        ("job/step-7", ("job", 7, "")),
        ("job/step-0/.metadata", ("job", 0, ".metadata")),
        ("job/step-0/__3_1.distcp", ("job", 0, "__3_1.distcp")),
    ],
)
def test_paths(path, found):
    place = place_of(path)
    assert (place.job, place.step, place.name) == found


@pytest.mark.parametrize("path", ["job/other", "job/step-1/folder/file", "job/step-1/model.json", "job/step--1"])
def test_paths_of_other_files(path):
    place = place_of(path)
    assert (place.job, place.step, place.name, f"job/{place.other}") == ("job", None, "", path)


@pytest.mark.parametrize("path", ["", "a b", "..", "job//x", "job/x/..", "job/other/.metadata", "job/__0_0.distcp"])
def test_paths_that_are_none(path):
    with pytest.raises(UsageError):
        place_of(path)
