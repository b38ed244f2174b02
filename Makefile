# make demo        `massl demo` in .venv: train on bundled images on the CPU and show what was learnt on an HTML page
# make test        lint, types, architecture and all quick tests: below five minutes on two cores
# make test-slow   the long tests: learning runs, more faults, whole suite, documentation site, browser, benchmarks
# make test-all    quick and long tests in one go, which collects them once: what CI runs
# make test-gpu    the tests that need a GPU, by the Python given: make test-gpu PYTHON=python3 (installs nothing)
# make reliability new random examples, then 10,000 cases of every fault class (CASES=300 KILLS=5: a short look)
# make test-minimum  a share of the tests with the oldest versions of all dependencies (its own environment, .venv-min)
# make audit       the licences of all dependencies
# make lint        ruff and mypy
# make format      let ruff rewrite what it can
# make docs        the documentation site, into site/ (open site/index.html)
# make clean-demo  delete what `make demo` wrote
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BARE_STAMP := $(VENV)/.installed-bare
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# A file stays with one worker, so that its fixtures are made once; folders in their order: the longest tests come first.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
# The oldest declared versions, and what is most likely to notice: whatever uses timm, safetensors, Pillow, YAML or torch.
MIN_VENV := .venv-min
MIN_STAMP := $(MIN_VENV)/.installed
MIN_TESTS := tests/unit/weights tests/unit/nn tests/unit/data/sources tests/unit/commands/test_arguments.py \
	tests/unit/training/test_checkpoint.py tests/unit/test_config.py tests/unit/test_cli.py \
	tests/unit/ops/scoring tests/unit/reports/test_tables.py

.PHONY: demo test test-quick test-slow test-all test-gpu test-minimum audit reliability lint format clean-demo docs

# All that a user needs, and no more.
$(BARE_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable .
	touch $(BARE_STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable ".[dev,docs]"
	touch $(BARE_STAMP) $(STAMP)

$(MIN_STAMP): pyproject.toml constraints-min.txt
	test -x $(MIN_VENV)/bin/python || $(PYTHON) -m venv $(MIN_VENV)
	$(MIN_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-min.txt \
		--editable . hypothesis pyarrow pytest pytest-xdist
	touch $(MIN_STAMP)

demo: $(BARE_STAMP)
	$(BIN)/massl demo --output runs/demo

clean-demo:
	rm -rf runs/demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Lint and tests side by side: the tests wait for processes now and then, which leaves a core for mypy.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 lint test-quick

test-quick: $(STAMP)
	$(PYTEST) -m "not slow and not gpu"

test-slow: $(STAMP)
	$(PYTEST) -m "slow and not gpu"

test-all: $(STAMP)
	$(PYTEST) -m "not gpu"

test-gpu:
	PYTHONPATH="src:$$PYTHONPATH" $(PYTHON) -m pytest -p no:xdist -m gpu tests/unit

CASES ?= 10000
KILLS ?= 100
reliability: $(STAMP)
	$(PYTEST) -m "hypothesis and not gpu" --hypothesis-profile random tests/unit
	$(BIN)/python -m tests.reliability --table --cases $(CASES) --kills $(KILLS)

# Warnings are no errors here: old packages warn about newer ones.
test-minimum: $(MIN_STAMP)
	$(MIN_VENV)/bin/python -m pytest -n auto --dist loadfile -W default -p no:cacheprovider \
		-m "not slow and not gpu and not kernel" $(MIN_TESTS)

audit: $(STAMP)
	$(BIN)/python scripts/audit_dependencies.py

docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict
