"""File names as parts of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.durable.plain_objects import DCP_METADATA_NAME
from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import UNKNOWN_PART_COUNT
from tieredckpt.fsspec_view.file_space import file_part_number, parse_tiered_path
from tieredckpt.fsspec_view.step_files import one_file_layout


def test_dcp_file_names_map_to_distinct_parts():
    names = [
        DCP_METADATA_NAME,
        *(f"__{rank}_{number}.distcp" for rank in range(0, 1024, 7) for number in range(0, 1022, 13)),
    ]
    parts = [file_part_number(name) for name in names]
    assert len(set(parts)) == len(names)
    assert file_part_number(DCP_METADATA_NAME) == 0
    assert all(0 <= part < UNKNOWN_PART_COUNT for part in parts)
    assert file_part_number("__1023_1021.distcp") < UNKNOWN_PART_COUNT


@given(st.text(min_size=1, max_size=40))
def test_every_name_has_a_part(name):
    assert (file_part_number(name) == 0) == (name == DCP_METADATA_NAME)
    assert file_part_number(name) < UNKNOWN_PART_COUNT


def test_a_files_place_in_its_shard_does_not_depend_on_its_size():
    layout = one_file_layout("__0_0.distcp")
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
    place = parse_tiered_path(path)
    assert (place.job, place.step, place.name) == found


@pytest.mark.parametrize("path", ["job/other", "job/step-1/folder/file", "job/step-1/model.json", "job/step--1"])
def test_paths_of_other_files(path):
    place = parse_tiered_path(path)
    assert (place.job, place.step, place.name, f"job/{place.other}") == ("job", None, "", path)


@pytest.mark.parametrize("path", ["", "a b", "..", "job//x", "job/x/..", "job/other/.metadata", "job/__0_0.distcp"])
def test_invalid_paths_are_refused(path):
    with pytest.raises(UsageError):
        parse_tiered_path(path)
