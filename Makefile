# Every target does its own set-up: a virtual environment in .venv for tox, and tox's own for the work.
PYTHON ?= python3
TOX := .venv/bin/tox
BIN := .tox/py/bin

.PHONY: help test check demo demo-hyperpod bench docs nightly test-system test-gpu clean

help:
	@echo "make demo         kill a rank, lose a node, shrink, grow, drain: the whole story in two minutes"
	@echo "make demo-hyperpod  the same under HyperPod's agents and our operator, from a job's YAML"
	@echo "make test         all tests that need nothing but pip; up to 5 that fail beside others are run once more, alone"
	@echo "make check        lint, types, import layers"
	@echo "make bench        measure everything in docs/benchmarks.md again"
	@echo "make docs         check the documentation"
	@echo "make test-system  tests that need Debian packages or root (says what it skips and why)"
	@echo "make test-gpu     checks and figures of a GPU in under 8 minutes, in build/gpu/report.html (on fakes without one)"
	@echo "make nightly      what takes hours; goes on where it was stopped, and writes build/nightly/page.md"

$(TOX): requirements/tox.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/tox.txt
	@touch $(TOX)

# The environment of `tox -e py`, brought up to date; the other targets run their tools in it.
.PHONY: env
env: $(TOX)
	@$(TOX) -q -e py --notest

# Up to four workers for each core: many tests wait. With ARGS: only what they name, in this process.
WORKERS ?= $(shell echo $$((4 * $$(nproc))))

# At most so many tests that failed beside others are run once more, alone; what fails then has failed. 0: none.
AGAIN ?= 5
test-system: AGAIN = 3

test: $(TOX)
	$(TOX) -e py -- $(or $(ARGS),--workers $(WORKERS) --again $(AGAIN) --forked-starts --durations 20)

# With ARGS: only tasks whose names have one of these words.
nightly: env
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.nightly $(ARGS)

test-system: $(TOX)
	$(TOX) -e py -- -m "system and not nightly" -rs --workers 1 --again $(AGAIN) $(ARGS)

# PYTHON is one that has torch 2.11 or later; nothing here installs torch. With WHEELS=folder, pip reads no index.
# With ARGS: "--list" names the sections, "--only copies,golden" runs some of them.
test-gpu:
	@$(PYTHON) tests/gpu/install.py $(if $(WHEELS),--wheels $(WHEELS))
	@OMP_NUM_THREADS=1 build/gpu/venv/bin/python -m tests.gpu $(ARGS)

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: env
	@OMP_NUM_THREADS=1 $(BIN)/elastic demo $(ARGS)

# AWS's own agent comes as it is: what it asks of torch is older than what it runs with.
demo-hyperpod: env
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/aws.txt
	@OMP_NUM_THREADS=1 $(BIN)/python -m integration.hyperpod.demo $(ARGS)

docs: env
	@$(BIN)/python docs/build.py $(ARGS)

bench: $(TOX)
	$(TOX) -q -e bench -- $(ARGS)

clean:
	rm -rf .venv .tox build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
