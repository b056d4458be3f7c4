"""Each mutant changes code that occurs exactly once, and names an existing test."""

from __future__ import annotations

import ast
import shutil

import pytest

from tests.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_mutant_changes_the_product_into_valid_python(mutant, tmp_path):
    there = tmp_path / mutant.file
    there.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutant.file, there)
    mutant.apply(tmp_path)
    ast.parse(there.read_text())


def test_mutants_have_unique_names_and_existing_tests():
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)
    for one in MUTANTS:
        file, _, name = one.test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), one.test


def test_mutant_target_must_occur_exactly_once(tmp_path):
    path = tmp_path / MUTANTS[0].file
    path.parent.mkdir(parents=True)
    path.write_text("nothing of it")
    with pytest.raises(ValueError, match="0 times"):
        MUTANTS[0].apply(tmp_path)
