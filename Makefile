# Every target does its own set-up: a virtual environment in .venv for tox, and tox's own for the work.
PYTHON ?= python3
TOX := .venv/bin/tox

.PHONY: help test check demo bench docs soak test-system clean

help:
	@echo "make demo         train, kill, restore, drain: the whole story in two minutes"
	@echo "make test         all tests that need nothing but pip"
	@echo "make check        lint, types, import layers"
	@echo "make bench        measure everything in docs/benchmarks.md again"
	@echo "make docs         check the documentation"
	@echo "make test-system  tests that need Debian packages or root (says what it skips and why)"
	@echo "make soak         long randomised runs"

$(TOX): requirements/tox.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/tox.txt
	@touch $(TOX)

test: $(TOX)
	$(TOX) -e py -- $(ARGS)

check: $(TOX)
	$(TOX) -e check

demo: $(TOX)
	$(TOX) -q -e demo -- $(ARGS)

bench: $(TOX)
	$(TOX) -q -e bench -- $(ARGS)

docs: $(TOX)
	$(TOX) -q -e docs -- $(ARGS)

soak: $(TOX)
	$(TOX) -e soak -- $(ARGS)

test-system: $(TOX)
	$(TOX) -e system -- $(ARGS)

clean:
	rm -rf .venv .tox build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
