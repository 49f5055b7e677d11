# `make demo` and `make test` need python3 (3.11+) and make alone; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One process per core: XLA compiles on one core most of the time.
WORKERS ?= 2

# Beside the library: launch scripts, T5X, benchmarks, the audit. CI runs their tests too.
OUTSIDE := tests/launch tests/integrations tests/benchmarks tests/testing/test_auditing.py
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --durations=20

.PHONY: demo test test-outside test-all lint types checks unit docs format clean

demo: $(VENV)/.eval
	$(BIN)/specjax demo

# Lint, types and docs run beside the tests; what they say comes after.
test: $(VENV)/.test $(VENV)/.docs
	@mkdir -p build
	@$(MAKE) --no-print-directory checks >build/checks.txt 2>&1 & checks=$$!; \
	$(MAKE) --no-print-directory unit; unit=$$?; \
	wait $$checks; checks=$$?; cat build/checks.txt; \
	exit $$((unit | checks))

test-outside: $(VENV)/.test
	$(PYTEST) $(OUTSIDE)

# With the tests marked exhaustive: more seeds, shapes and kills of what `make test` holds.
test-all: checks
	$(PYTEST) -m ''

checks: lint types docs

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.house

types: $(VENV)/.test
	$(BIN)/mypy

unit: $(VENV)/.test
	$(PYTEST) $(OUTSIDE:%=--ignore=%)

# The site in build/site; a warning, such as a link that leads nowhere, is an error (not with --quiet,
# under which mkdocs counts none).
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.eval: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specjax needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[eval]'
	touch $@

$(VENV)/.docs: $(VENV)/.eval
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[docs]'
	touch $@

$(VENV)/.test: $(VENV)/.eval
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build/site .pytest_cache .hypothesis .mypy_cache .ruff_cache *.egg-info
