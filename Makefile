# `make demo` and `make test` need python3 (3.11+) and make alone; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One process per core: XLA compiles on one core most of the time.
WORKERS ?= 2

# The checkouts t5x, airio and jestimator, which are not on PyPI (docs/t5x.md).
T5X_SOURCES ?= ../shared/t5x_sources
T5X_PACKAGES := t5x/t5x airio/airio jestimator/jestimator

# Around the library: what compares, trains, audits, measures and launches, and T5X. CI runs these tests too.
LAB := tests/study tests/training tests/runs tests/launch tests/benchmarks tests/testing/test_auditing.py \
  $(wildcard tests/cli/test_train*.py) tests/cli/test_compare.py tests/cli/test_papers.py
RUN_TESTS := -m pytest -q -n $(WORKERS) --dist worksteal --durations=20
PYTEST := $(BIN)/python $(RUN_TESTS)

.PHONY: demo test test-lab lab test-t5x test-outside test-all lint types checks unit docs format clean

demo: $(VENV)/.eval
	$(BIN)/specjax demo

# The library alone. Lint, types and docs run beside the tests; what they say comes after.
test: $(VENV)/.test $(VENV)/.docs
	@mkdir -p build
	@$(MAKE) --no-print-directory checks >build/checks.txt 2>&1 & checks=$$!; \
	$(MAKE) --no-print-directory unit; unit=$$?; \
	wait $$checks; checks=$$?; cat build/checks.txt; \
	exit $$((unit | checks))

test-lab: lab test-t5x

lab: $(VENV)/.test
	$(PYTEST) $(LAB)

ifeq ($(words $(wildcard $(T5X_PACKAGES:%=$(T5X_SOURCES)/%))),3)
# The import fails where pytest would skip.
test-t5x: $(VENV)/.t5x
	sources=$(abspath $(T5X_SOURCES)); export PYTHONPATH=$$sources/t5x:$$sources/airio:$$sources/jestimator; \
	$(VENV)/t5x/bin/python -c 'import specjax.integrations.t5x' && \
	$(VENV)/t5x/bin/python $(RUN_TESTS) tests/integrations
else
test-t5x: $(VENV)/.test
	$(PYTEST) tests/integrations
	@echo 'NOT TESTED: tests/integrations with T5X, because $(T5X_SOURCES) has no t5x, airio and jestimator:' \
	  'put their checkouts there (docs/t5x.md), or make $@ T5X_SOURCES=DIR'
endif

# With the systems that specjax works inside, reads or answers, each in an environment of its own; and
# a dry run of a GPU's measurements.
test-outside: $(VENV)/.maxtext $(VENV)/.tunix $(VENV)/.clients $(VENV)/.test
	$(PYTEST) -m '' tests/benchmarks/test_gpu_day.py
	$(VENV)/maxtext/bin/python $(RUN_TESTS) tests/integrations/test_maxtext.py
	$(VENV)/tunix/bin/python $(RUN_TESTS) tests/integrations/test_tunix.py
	$(VENV)/clients/bin/python $(RUN_TESTS) tests/integrations/test_ray.py tests/integrations/test_lm_eval.py tests/integrations/test_clients.py

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
	$(PYTEST) $(LAB:%=--ignore=%) --ignore=tests/integrations

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
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[cpu,eval]'
	touch $@

$(VENV)/.docs: $(VENV)/.eval
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[docs]'
	touch $@

$(VENV)/.test: $(VENV)/.eval
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[test]'
	touch $@

# An environment of its own: TensorFlow stays out of the other tests.
$(VENV)/.t5x: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)/t5x
	$(VENV)/t5x/bin/python -m pip install --quiet -c constraints.txt --editable '.[t5x]' pytest pytest-xdist
	touch $@

# MaxText asks for Python 3.12, which nothing that is used of it needs, and names no dependencies.
$(VENV)/.maxtext: pyproject.toml constraints.txt constraints-maxtext.txt
	$(PYTHON) -m venv $(VENV)/maxtext
	$(VENV)/maxtext/bin/python -m pip install --quiet -c constraints.txt --editable '.[int8]' pytest pytest-xdist pydantic transformers
	$(VENV)/maxtext/bin/python -m pip install --quiet --no-deps --ignore-requires-python -r constraints-maxtext.txt
	touch $@

# tunix wants an older safetensors.
$(VENV)/.tunix: pyproject.toml constraints-tunix.txt
	$(PYTHON) -m venv $(VENV)/tunix
	$(VENV)/tunix/bin/python -m pip install --quiet -c constraints-tunix.txt --editable '.[tunix]' matplotlib pytest pytest-xdist
	touch $@

$(VENV)/.clients: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)/clients
	$(VENV)/clients/bin/python -m pip install --quiet -c constraints.txt --editable '.[cpu,ray,serve]' 'lm_eval[api]' openai transformers pytest pytest-xdist
	touch $@

clean:
	rm -rf $(VENV) build/site .pytest_cache .hypothesis .mypy_cache .ruff_cache *.egg-info
