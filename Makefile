# make demo   pre-train on bundled images on the CPU and show that it learns, on a page to open in a browser
# make test   lint, types, architecture, tests
# make docs   the documentation site, into site/ (open site/index.html)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint format clean-demo docs

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,docs]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/massl pretrain --recipe demo --output runs/demo
	$(BIN)/massl report runs/demo --output runs/demo/report.html

clean-demo:
	rm -rf runs/demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest

docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict
