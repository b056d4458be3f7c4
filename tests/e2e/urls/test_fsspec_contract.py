"""fsspec's own abstract tests and the cases that they lack, on ``tiered://``.

A push copies a quarter of the edge cases of a glob; a nightly run copies, gets and puts each of them.
"""

import fsspec
import fsspec.tests.abstract as abstract
import pytest
from fsspec.tests.abstract.common import GLOB_EDGE_CASES_TESTS

from tests.support.agents import agent_directory, module_agent
from tests.support.jobs import CheckpointJob
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings

pytestmark = [pytest.mark.e2e]


node = module_agent("contract", ".contract")


class _Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self):
        return fsspec.filesystem("tiered")

    @pytest.fixture
    def fs_path(self):
        return "contract/notes"

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)


class TestCopy(abstract.AbstractCopyTests, _Fixtures):
    @pytest.mark.parametrize(
        GLOB_EDGE_CASES_TESTS["argnames"],
        [
            pytest.param(*values, marks=() if number % 4 == 3 else pytest.mark.nightly)
            for number, values in enumerate(GLOB_EDGE_CASES_TESTS["argvalues"])
        ],
    )
    def test_copy_glob_edge_cases(
        self, path, recursive, maxdepth, expected, fs, fs_join, fs_glob_edge_cases_files, fs_target, fs_sanitize_path
    ):
        super().test_copy_glob_edge_cases(
            path, recursive, maxdepth, expected, fs, fs_join, fs_glob_edge_cases_files, fs_target, fs_sanitize_path
        )


class TestGet(abstract.AbstractGetTests, _Fixtures):
    test_get_glob_edge_cases = pytest.mark.nightly(abstract.AbstractGetTests.test_get_glob_edge_cases)


class TestPut(abstract.AbstractPutTests, _Fixtures):
    test_put_glob_edge_cases = pytest.mark.nightly(abstract.AbstractPutTests.test_put_glob_edge_cases)


class TestPipe(abstract.AbstractPipeTests, _Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, _Fixtures):
    pass


def write_half(fs, path):
    with fs.open(path, "wb") as file:
        file.write(b"x")
        raise RuntimeError("half")


def test_moving_touching_and_times():
    fs = fsspec.filesystem("tiered")
    fs.pipe("tiered://contract/a/b/one.json", b"1")
    assert fs.cat("tiered://contract/a/b/one.json") == b"1"
    assert fs.find("tiered://contract/a") == ["contract/a/b/one.json"]
    before = fs.modified("tiered://contract/a/b/one.json")
    fs.touch("tiered://contract/a/b/one.json")
    assert fs.modified("tiered://contract/a/b/one.json") > before
    assert fs.size("tiered://contract/a/b/one.json") == 0
    fs.mv("tiered://contract/a/b/one.json", "tiered://contract/a/two.json")
    assert fs.find("tiered://contract/a") == ["contract/a/two.json"]
    fs.rename("tiered://contract/a", "tiered://contract/c", recursive=True)
    assert fs.exists("tiered://contract/c/two.json")
    assert not fs.exists("tiered://contract/a/two.json")
    with pytest.raises(RuntimeError, match="half"):
        write_half(fs, "tiered://contract/c/broken")
    assert not fs.exists("tiered://contract/c/broken")
    with fs.open("tiered://contract/c/text", "w") as file:
        file.write("ü")
    with fs.open("tiered://contract/c/text") as file:
        assert file.read().decode() == "ü"
    fs.rm("tiered://contract/c", recursive=True)
    assert not fs.exists("tiered://contract/c")
    for nowhere in ("tiered://contract/x", "tiered://contract/step-1", "tiered://contract/step-1/x", "tiered://other"):
        assert not fs.exists(nowhere)
        assert not fs.isdir(nowhere)
        assert not fs.isfile(nowhere)
        with pytest.raises(FileNotFoundError):
            fs.info(nowhere)


def test_other_files_are_in_the_durable_tier_too(agent_dir, tmp_path, monkeypatch):
    durable = DurableSettings(url=f"file://{tmp_path}/durable")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", durable.url)
    fs = fsspec.filesystem("tiered")
    fs.pipe("tiered://kept/step-3/state.json", b"{}")
    assert fs.exists("tiered://kept/step-3/state.json")
    CheckpointJob(agent_dir, durable, "kept").lose_memory()
    close_sessions()
    assert fs.cat("tiered://kept/step-3/state.json") == b"{}"
    assert fs.find("tiered://kept") == ["kept/step-3/state.json"]
    fs.rm("tiered://kept/step-3", recursive=True)
    assert not fs.exists("tiered://kept/step-3/state.json")


def test_changes_of_another_node_are_visible(agent_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", f"file://{tmp_path}/durable")
    fs = fsspec.filesystem("tiered")
    for name, data in (("latest", b"step-1"), ("gone", b"x")):
        fs.pipe(f"tiered://two/{name}", data)
    with agent_directory() as elsewhere:
        monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(elsewhere))
        assert fs.cat("tiered://two/latest") == b"step-1"
        fs.pipe("tiered://two/latest", b"step-20")
        fs.rm("tiered://two/gone")
        close_sessions()
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(agent_dir))
    assert fs.cat("tiered://two/latest") == b"step-20"
    assert fs.size("tiered://two/latest") == 7
    assert not fs.exists("tiered://two/gone")
    assert fs.find("tiered://two") == ["two/latest"]


def test_names_of_all_kinds_are_listed_as_they_were_written():
    fs, names = fsspec.filesystem("tiered"), ["names/a b/%41@c.json", "names/ü/€.txt"]
    for name in names:
        fs.pipe(f"tiered://{name}", b"1")
    assert fs.find("tiered://names") == names


def test_oversized_file_is_refused():
    fs = fsspec.filesystem("tiered")
    with pytest.raises(Exception, match=r"dcp\.save"):
        fs.pipe("tiered://contract/large", bytes(40 << 20))
    assert not fs.exists("tiered://contract/large")
