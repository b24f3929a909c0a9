# `make demo` and `make test` need nothing before them but git, pip and a Python >= 3.12.

BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-jax bench lint format types layers docs check constraints clean

help:  ## list these targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

setup:  ## make .venv, or bring it up to date
	@sh scripts/setup.sh

demo: setup  ## from raw files to a trained model on a small simulated study
	@$(BIN)/donorloader demo

test: setup  ## the tests, without the slow ones
	$(BIN)/python -m pytest --numprocesses=logical --maxprocesses=4 --dist=worksteal

test-slow: setup  ## the slow tests and the soaks
	$(BIN)/python -m pytest -m "slow or soak"

test-jax: setup  ## the tests of batches as JAX arrays; adds JAX to .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt jax
	$(BIN)/python -m pytest tests/test_jax.py

bench: setup  ## the benchmarks, small; FULL=1 for the full size, which rewrites README's table
	$(BIN)/python -m benchmarks $(if $(FULL),--full --update-readme)

lint: setup  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## mypy
	$(BIN)/mypy

layers: setup  ## import-linter: imports go down the layers only
	$(BIN)/lint-imports

docs: setup  ## the documentation, in docs/_build/html
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html docs docs/_build/html

check: lint types layers docs  ## every gate but the tests

constraints:  ## renew constraints.txt (needs uv)
	@{ sed -n '/^#/p' constraints.txt; \
	   uv pip compile -q pyproject.toml --all-extras --universal --python-version 3.12 --no-header --no-annotate \
	   | grep -vE '^(cuda-|nvidia-|triton|donorloader)|win32' | sed 's/ *;.*//'; } > constraints.new
	@mv constraints.new constraints.txt

clean:  ## remove what these targets made
	rm -rf .venv docs/_build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
