# One command each. The first use of any target makes .venv; after that the set-up is repeated
# only when pyproject.toml or constraints.txt change.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Used once, to make the environment: the oldest supported Python is the one that is tested.
PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3))
PY := .venv/bin/python
INSTALL := $(PY) -m pip install --quiet --constraint constraints.txt

# Two levels: running needs neither torch nor the linters.
RUN := .venv/.installed-run
DEV := .venv/.installed-dev

# Exported, so that a prompt may hold any character that the shell minds.
PROMPT ?= def quicksort(xs):
override export PROMPT := $(value PROMPT)
TEST_WORKERS ?= 2
PYTEST_ARGS ?=

.PHONY: help setup demo test test-device lint format bench laws mutants hooks clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24

$(PY):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with PYTHON=...")'
	$(PYTHON) -m venv .venv

$(RUN): pyproject.toml constraints.txt | $(PY)
	@echo "Installing what generation needs into .venv ..."
	$(INSTALL) --editable .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(PY)
	@echo "Installing what tests, lint and training need into .venv ..."
	$(INSTALL) --editable '.[test,plot]'
	@touch $(RUN) $@

setup: $(DEV) hooks  ## the whole development environment

hooks: $(DEV)
	@if git rev-parse --git-dir >/dev/null 2>&1; then \
	    hook="$$(git rev-parse --git-path hooks)/pre-commit"; \
	    [ -e "$$hook" ] || install -m 755 -D tools/pre-commit "$$hook"; fi

demo: $(RUN)  ## generate text from the model that ships with the repository
	JAX_PLATFORMS=cpu $(PY) -m serve generate --model demo --echo --temperature 0 --prompt "$$PROMPT"

test: $(DEV)  ## the default suite, on the CPU
	OPENBLAS_NUM_THREADS=1 JAX_PLATFORMS=cpu $(PY) -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-device: $(DEV)  ## adds the tests that need an accelerator
	$(PY) -m pytest --device $(PYTEST_ARGS)

lint: $(DEV)  ## ruff, pyright, the import table
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	$(PY) -m pytest -q tests/test_imports.py tests/test_style.py

format: $(DEV)  ## apply ruff's formatting and safe fixes
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(DEV)  ## run the tests, then time (refuses on red)
	$(PY) -m benchmarks.run

laws: $(DEV)  ## the schedule laws in full, with a log of record, and the cases marked full
	JAX_PLATFORMS=cpu $(PY) -m pytest -q --full -m full
	JAX_PLATFORMS=cpu $(PY) -m benchmarks.laws

mutants: $(DEV)  ## deliberate bugs, each of which must make a test fail, with a log of record
	JAX_PLATFORMS=cpu $(PY) -m tests.mutants.run

clean:  ## remove caches and build outputs, keep .venv
	rm -rf build dist .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
