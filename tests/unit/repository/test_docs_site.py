"""``docs/site_hooks.py``: links, lists and navigation of the site."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs/how-to/migrate.md"


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[a](../architecture.md#1-purpose)", "[a](../architecture.md#1-purpose)"),
        ("[a](../../CHANGELOG.md#changes)", "[a](../project/CHANGELOG.md#changes)"),
        ("[a](../../README.md#use)", "[a](../index.md)"),
        ("[a](../../examples/loop.py)", "[a](../source/examples/loop.py.md)"),
        ("the [`examples`](../../examples) there", "the `examples` there"),
        ("[a](https://example.org/b.md)", "[a](https://example.org/b.md)"),
        ("[a](#here)", "[a](#here)"),
        ("```\n[a](../../README.md)\n```", "```\n[a](../../README.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(hooks, link, shown):
    assert hooks.relink(link, GUIDE, "how-to/migrate.md") == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("text\n- a\n- b", "text\n\n- a\n- b"),
        ("- a\n  more\n\n  rest\nend", "- a\n    more\n\n    rest\nend"),
        ("1. a\n\n   ```sh\n   - b\n   ```\n\nend", "1. a\n\n    ```sh\n    - b\n    ```\n\nend"),
        ("- a\n  - b", "- a\n    - b"),
        ("| `a\\|b` | c \\| d |", "| `a|b` | c \\| d |"),
        ("```\ntext\n- a\n```", "```\ntext\n- a\n```"),
    ],
)
def test_lists_and_tables_suit_python_markdown(hooks, text, shown):
    assert hooks.as_python_markdown(text) == shown


def test_navigation_lists_each_page_of_a_folder_once(hooks):
    nav = [{"Home": "index.md"}, {"Reference": ["reference/cli.md", "reference/*"]}, {"None": "no-such-folder/*"}]
    home, reference = hooks.expand(nav, set(hooks.pages_in(nav)))
    assert home == {"Home": "index.md"}
    [pages] = reference.values()
    assert pages[0] == "reference/cli.md"
    assert sorted(pages) == sorted(f"reference/{path.name}" for path in (ROOT / "docs/reference").glob("*.md"))


def test_navigation_of_the_site_names_existing_pages():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nplugins:")[0]
    pages = re.findall(r"[\w/-]+\.md", nav)
    assert pages
    assert [page for page in pages if not (ROOT / "docs" / page).is_file()] == []
