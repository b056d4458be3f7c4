"""Invalid files in place of cached batches, which are prepared again without large allocations."""

import os
import re
import resource
import socket
from pathlib import Path

import pytest
import torch

from elastic.batch_cache import BatchCache
from elastic.batch_cache.cache_directory import batch_file_name, partial_file_name
from tests.hostile.elastic.make import FILES, FINGERPRINT, INDEX, changed_batch, hostile_batches
from tests.support.batch_reader import file_names
from tests.support.bits import assert_same_bits

HOSTILE = sorted(FILES.iterdir())
"""The tests loop over these files, because each separate test would be checked for leaks."""


def prepare_batch(index):
    return {"ids": torch.full((100,), index)}


class CountingPrepare:
    def __init__(self):
        self.indices = []

    def __call__(self, index):
        self.indices.append(index)
        return prepare_batch(index)


@pytest.fixture
def cache(tmp_path):
    with BatchCache("job", fingerprint=FINGERPRINT, directory=tmp_path / "prepared", max_bytes=10_000) as one:
        yield one


@pytest.fixture
def limited_memory():
    """Limit the address space, so that allocating or mapping the 2 GiB that a file claims fails."""
    used = int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_stored_cases_match_the_generator_script():
    assert {path.stem: path.read_bytes() for path in HOSTILE} == hostile_batches()


def test_base_case_is_a_valid_batch(cache):
    (cache.directory / batch_file_name(INDEX)).write_bytes(changed_batch())
    found = cache.lookup(INDEX).batch
    assert found["a"].tolist() == [int.from_bytes(range(at, at + 8), "little") for at in range(0, 48, 8)]
    assert found["b"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_hostile_batch_is_prepared_again(cache, limited_memory):
    for number, file in enumerate(HOSTILE, start=1):
        prepare = CountingPrepare()
        (cache.directory / batch_file_name(INDEX)).write_bytes(file.read_bytes())
        assert_same_bits(prepare_batch(INDEX), cache.get(INDEX, prepare))
        assert_same_bits(prepare_batch(INDEX), cache.get(INDEX, prepare))
        assert prepare.indices == [INDEX], file.stem
        assert cache.counts.damaged == number, file.stem
        assert file_names(cache.directory) == [batch_file_name(INDEX), "tally"], file.stem


def test_partial_file_is_never_read(cache):
    for file in HOSTILE:
        prepare = CountingPrepare()
        (cache.directory / partial_file_name(INDEX)).write_bytes(file.read_bytes())
        assert_same_bits(prepare_batch(INDEX), cache.get(INDEX, prepare))
        assert prepare.indices == [INDEX], file.stem
        assert file_names(cache.directory) == [batch_file_name(INDEX), "tally"], file.stem
        cache.clear()


def test_invalid_usage_file_is_recounted(cache):
    for file in HOSTILE:
        prepare = CountingPrepare()
        (cache.directory / "tally").write_bytes(file.read_bytes())
        for index in range(12):
            cache.get(index, prepare)
            assert cache.used_bytes() <= 10_000, file.stem
        assert prepare.indices == list(range(12)), file.stem
        cache.clear()


# -- links, pipes, folders and sockets ----------------------------------------------------------------------------


def make_link(path, victim):
    path.symlink_to(victim)


def make_dangling_link(path, victim):
    path.symlink_to(path.parent / "nowhere")


def make_fifo(path, victim):
    os.mkfifo(path)


def make_folder(path, victim):
    path.mkdir()
    (path / "mine").write_bytes(b"mine")


def make_socket(path, victim):
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(path.parent)  # the full path is too long for a socket address
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


STRANGE = [make_link, make_dangling_link, make_fifo, make_folder, make_socket]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("plant", [*STRANGE, os.link], ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("name", [batch_file_name(INDEX), partial_file_name(INDEX), "tally"])
def test_non_file_is_not_followed_and_does_not_block(cache, tmp_path, plant, name):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 100)
    (cache.directory / name).unlink(missing_ok=True)
    if plant is os.link:
        os.link(victim, cache.directory / name)
    else:
        plant(cache.directory / name, victim)
    prepare = CountingPrepare()
    assert_same_bits(prepare_batch(INDEX), cache.get(INDEX, prepare))
    assert_same_bits(prepare_batch(INDEX), cache.get(INDEX, prepare))
    assert victim.read_bytes() == b"precious" * 100
    if plant is make_folder:  # the cache does not remove foreign folders
        assert (cache.directory / name / "mine").read_bytes() == b"mine"
    else:
        assert prepare.indices == [INDEX]
        assert cache.cached_indices() == [INDEX]


def test_foreign_files_are_neither_counted_nor_removed(cache):
    strangers = ["readme.txt", "7.batch", "0000000000000000000x.batch", ".00000000000000000007.batch", "f-xyz"]
    for name in strangers:
        (cache.directory / name).write_bytes(bytes(20_000))
    cache.get(1, prepare_batch)
    cache.clear()
    root, place = cache.directory.parents[2], cache.directory
    cache.close()
    with BatchCache("job", fingerprint="another", directory=root) as other:
        assert other.cached_indices() == []
    assert file_names(place) == sorted(strangers)


def test_stream_with_foreign_directories_is_swept_around_them(cache, tmp_path):
    stream = cache.directory.parent
    (stream / ("f-" + "0" * 32)).symlink_to(tmp_path)
    (stream / ("f-" + "1" * 32)).write_bytes(b"a stranger's")
    (tmp_path / batch_file_name(1)).write_bytes(b"precious")
    with BatchCache("job", fingerprint="another", directory=cache.directory.parents[2]):
        assert (tmp_path / batch_file_name(1)).read_bytes() == b"precious"
        assert (stream / ("f-" + "1" * 32)).read_bytes() == b"a stranger's"


def test_file_that_grows_after_mapping_has_no_effect(cache):
    """Writers never change a mapped page, so batches are mapped and not copied."""
    batch_file = cache.directory / batch_file_name(INDEX)
    found = cache.get(INDEX, prepare_batch)
    with batch_file.open("ab") as file:
        file.write(b"more")
    assert_same_bits(prepare_batch(INDEX), found)
    assert not cache.lookup(INDEX).is_cached
    assert not batch_file.exists()
