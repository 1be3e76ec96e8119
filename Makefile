# `make demo` and `make test` are all there is to know. Each sets up what it needs, once, in $(VENV).
#   make test-all                                 the tests of the bus on every other Python that is found, too
#   PYTHON=python3.12 VENV=.venv-3.12 make test   another interpreter, beside the first
#   make demo ARGS=--help                         arguments for what is started

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

bin := $(VENV)/bin
install := $(bin)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e

.PHONY: demo test test-bus test-all chaos bench clean

demo: $(VENV)/.demo
	@$(bin)/python -m trainer demo $(ARGS)

test: $(VENV)/.dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-bus: $(VENV)/.bus
	$(bin)/python -m pytest -n 2 --dist loadfile tests/chaos tests/eventbus tests/sinks $(ARGS)

test-all: test
	@$(bin)/python .ci/other-pythons.py

# make chaos ARGS="--seconds=3600 --seed=7"; a failure names the seed that replays it
chaos: $(VENV)/.dev
	@$(bin)/python -m tests.chaos $(ARGS)

bench: $(VENV)/.dev
	@$(bin)/python -m benchmarks $(ARGS)

# The stamps: written after a complete set-up, older than what they depend on after a change.
$(VENV)/.demo: pyproject.toml constraints.txt | $(bin)/python
	@echo "Installing what the demo needs into $(VENV) (once; a few minutes on a slow line) …"
	@$(install) '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(bin)/python
	@echo "Installing what the tests need into $(VENV) (once; a few minutes on a slow line) …"
	@$(install) '.[dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.bus: pyproject.toml constraints.txt | $(bin)/python
	@echo "Installing what the tests of eventbus and sinks need into $(VENV) (once; without torch) …"
	@$(install) '.[test-bus]'
	@touch $@

$(bin)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trainbus needs Python 3.11 or newer: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .venv-3.*
