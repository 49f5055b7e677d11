# `make demo` and `make test` need python3 (3.11+) and make alone; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One process per core: XLA compiles on one core most of the time.
WORKERS ?= 2

.PHONY: demo test test-all lint types unit docs format clean

demo: $(VENV)/.eval
	$(BIN)/specjax demo

test: lint types docs unit

# With the tests marked exhaustive: more seeds, shapes and kills of what `make test` holds.
test-all: lint types docs
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --durations=20 -m ''

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.house

types: $(VENV)/.test
	$(BIN)/mypy

unit: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --durations=20

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
