"""JSON lines by number across files, and the errors for invalid lines."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from integration.finetune.finetune_job import DataError
from integration.finetune.inputs import open_corpus
from tests.support.example_counts import examples


@given(files=st.lists(st.lists(st.one_of(st.none(), st.text(max_size=5)), max_size=6), min_size=1, max_size=4), end=...)
@settings(max_examples=examples(40))
def test_corpus_lists_every_line_in_order_without_blank_lines(files: list, end: bool):
    """``None`` is a blank line; the last line of a file may lack a line end."""
    expected = [
        (number, line + 1, text)
        for number, all_ in enumerate(files)
        for line, text in enumerate(all_)
        if text is not None
    ]
    with tempfile.TemporaryDirectory() as folder:
        for number, texts in enumerate(files):
            whole = "\n".join(" " if text is None else json.dumps({"text": text}) for text in texts)
            (Path(folder) / f"{number}.jsonl").write_text(whole + "\n" * end)
        if not expected:
            with pytest.raises(DataError, match="not a single line"):
                open_corpus([folder])
            return
        corpus = pickle.loads(pickle.dumps(open_corpus([folder])))
        assert len(corpus) == len(expected)
        for index, (number, line, text) in enumerate(expected):
            assert corpus[index] == {"text": text}
            assert corpus.location_of(index) == f"{folder}/{number}.jsonl:{line}"
        firsts = [
            corpus.location_of(index).rpartition(":")[0]
            for index in corpus.first_index_of_files()
            if index < len(corpus)
        ]
        assert set(firsts) >= {f"{folder}/{number}.jsonl" for number, _, _ in expected}
        with pytest.raises(IndexError):
            corpus[len(expected)]


def test_other_bytes_are_another_digest(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n')
    before = open_corpus([str(file)]).digest
    assert open_corpus([str(tmp_path)]).digest == before
    file.write_text('{"text": "b"}\n')
    assert open_corpus([str(file)]).digest != before


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{\n", "a.jsonl:1 is not JSON"),
        ('{"text": "a"}\n[1]\n', "a.jsonl:2 is not an object"),
        ('{"text": "a"}\n{"text": "\xff"\n', "a.jsonl:2 is not JSON"),
    ],
)
def test_invalid_line_is_named(tmp_path, text, named):
    (tmp_path / "a.jsonl").write_text(text, encoding="latin-1")
    corpus = open_corpus([str(tmp_path)])
    with pytest.raises(DataError) as caught:
        [corpus[index] for index in range(len(corpus))]
    assert named in str(caught.value)


def test_missing_data_is_an_error(tmp_path):
    with pytest.raises(DataError, match="there is no file or folder"):
        open_corpus([str(tmp_path / "none")])
    with pytest.raises(DataError, match="has no file of JSON lines"):
        open_corpus([str(tmp_path)])
    with pytest.raises(DataError, match="say where the data is"):
        open_corpus([])
