# Everything runs in a virtual environment of its own, with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# Stamps: what is installed. `demo` needs the core alone, so that a newcomer does not wait for the tools.
CORE := $(VENV)/.stamp-core
TOOLS := $(VENV)/.stamp-tools
BENCH := $(VENV)/.stamp-bench

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(CORE)  ## fit four posteriors to embedded data and write a report page
	$(BIN)/noisygrad demo

test: export OMP_NUM_THREADS ?= 1
test: $(TOOLS)  ## the whole suite, with ruff, mypy and the documentation's build among its tests
	$(BIN)/python -m pytest -n 2

lint: $(TOOLS)  ## ruff and mypy alone, in seconds
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy --strict

docs: $(TOOLS)  ## the documentation, into site/; a warning fails
	$(BIN)/python -m mkdocs build --strict

bench: $(BENCH)  ## time the optimisers against their peers (ARGS="--output FILE" keeps the figures)
	$(BIN)/python benchmarks/run.py $(ARGS)

clean:  ## remove what was built and cached; the virtual environment stays
	rm -rf site build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis noisygrad-demo.html
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Order-only: the interpreter is a link to the system's, whose age says nothing.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by itself, so that nothing installed later can choose another one.
$(CORE): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0
	$(PIP) -e .
	@touch $@

$(TOOLS): $(CORE)
	$(PIP) -e ".[dev,docs,cluster,paper]"
	@touch $@

$(BENCH): $(CORE)
	$(PIP) -e ".[bench]"
	@touch $@
