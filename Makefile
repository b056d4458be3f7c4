# Every target does its own set-up: a virtual environment in .venv for tox, and tox's own for the work. The demos have
# one of their own, which holds what a user installs.
PYTHON ?= python3
TOX := .venv/bin/tox
BIN := .tox/py/bin
DEMO := .venv-demo

.PHONY: help quick test check demo demo-hyperpod bench docs nightly test-system test-gpu release-check clean

help:
	@echo "make demo         kill a rank, lose a node, shrink, grow, drain: the whole story, with its set-up in three minutes"
	@echo "make demo-hyperpod  the same under HyperPod's agents and our operator, from a job's YAML"
	@echo "make test         all tests that need nothing but pip; retries up to 5 failed tests alone and prints the flaky ones"
	@echo "make quick        before each commit: check, docs, unit and contract tests (3 minutes)"
	@echo "make check        untracked files, names, plain English, lint, types, import layers; without caches, as in a fresh clone"
	@echo "make bench        measure everything in docs/benchmarks.md again"
	@echo "make docs         check the documentation and build the site in site/; ARGS=--write: generate the reference pages first"
	@echo "make test-system  tests that need Debian packages or root (says what it skips and why)"
	@echo "make test-gpu     checks and figures of a GPU in under 8 minutes, in build/gpu/report.html (on fakes without one)"
	@echo "make release-check  build an sdist and a wheel, install them in clean environments, and run the README's loop there"
	@echo "make nightly      what takes hours; goes on where it was stopped, and writes build/nightly/page.md"

$(TOX): requirements/tox.txt
	@echo "Installing tox in .venv ..."
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/tox.txt
	@touch $(TOX)

# The environment of `tox -e py`; the other targets run their tools in it. It is installed again if its requirements
# have changed. That takes minutes, so pip's output is shown if there is a terminal.
INPUTS := cat pyproject.toml tox.ini requirements/*.txt
.PHONY: env
env: $(TOX)
	@$(INPUTS) | cmp -s - $(BIN)/installed-from || { \
	    echo "Installing the packages for tests and checks in .tox/py (2.4 GB; 2 to 10 minutes) ..." && \
	    $(TOX) -e py --notest $$(if [ -t 1 ]; then echo -vv; fi) && $(INPUTS) > $(BIN)/installed-from; }
test test-system: env

# Up to four workers for each core: many tests wait. With ARGS: only what they name, in this process.
WORKERS ?= $(shell echo $$((4 * $$(nproc))))

# Retry up to this many failed tests, each alone after all others. A test that fails twice fails the run. 0: no retries.
RETRY_FAILED ?= 5
test-system: RETRY_FAILED = 3

test: $(TOX)
	$(TOX) -e py -- $(or $(ARGS),--workers $(WORKERS) --retry-failed $(RETRY_FAILED) --forked-starts --durations 20)

# Slow, nightly and system tests are left out, and properties get fewer examples: `make test` runs them in full.
# mypy without its cache needs one core for a minute, so the tests run at the same time.
quick: env
	@$(MAKE) --no-print-directory --assume-old env --jobs 3 --output-sync=target check docs quick-tests

.PHONY: quick-tests
quick-tests: env
	@echo "unit and contract tests; the tests deselected (marked slow, nightly or system) run in make test, nightly, test-system"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit tests/contract -m "not slow and not nightly and not system" \
		--hypothesis-profile quick --workers $(WORKERS) --forked-starts --quiet

# With ARGS: only tasks whose names have one of these words.
nightly: env
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.nightly $(ARGS)

test-system: $(TOX)
	$(TOX) -e py -- -m "system and not nightly" -rs --workers 1 --retry-failed $(RETRY_FAILED) $(ARGS)

# PYTHON is one that has torch 2.11 or later; nothing here installs torch. With WHEELS=folder, pip reads no index.
# With ARGS: "--list" names the sections, "--only copies,golden" runs some of them.
test-gpu:
	@$(PYTHON) tests/gpu/install.py $(if $(WHEELS),--wheels $(WHEELS))
	@OMP_NUM_THREADS=1 build/gpu/venv/bin/python -m tests.gpu $(ARGS)

# No caches: mypy, ruff and lint-imports take a file with the same time and size for unchanged.
check: env
	$(BIN)/python .ci/untracked.py
	$(BIN)/python .ci/names.py
	$(BIN)/python .ci/words.py
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/mypy --cache-dir /dev/null
	$(BIN)/lint-imports --no-cache

# A torch that PYTHON already has is used; requirements/demo.py installs whatever is missing.
demo:
	@$(PYTHON) requirements/demo.py $(DEMO)
	@OMP_NUM_THREADS=1 $(DEMO)/bin/elastic demo $(ARGS)

demo-hyperpod:
	@$(PYTHON) requirements/demo.py --hyperpod $(DEMO)
	@OMP_NUM_THREADS=1 $(DEMO)/bin/python -m integration.hyperpod.demo $(ARGS)

docs: env
	@$(BIN)/python docs/build.py $(ARGS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html is the documentation"

bench: $(TOX)
	@[ -d .tox/bench ] || echo "Installing the packages for benchmarks in .tox/bench (2.4 GB; 2 to 10 minutes) ..."
	$(TOX) -q -e bench -- $(ARGS)

# With ARGS='--torch torch==2.11.0': another torch than that of requirements/torch.txt.
release-check:
	@mkdir -p build
	@$(PYTHON) .ci/release.py $(ARGS)

clean:
	rm -rf .venv $(DEMO) .tox build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
