# `make test` is all a newcomer needs: it sets up what it uses.
# Needs Python 3.11+ and make. `uv` is used where it is installed, else venv and pip.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_FLAGS ?=
CHAOS_FLAGS ?=
PYTEST_FLAGS ?= -n 2 --dist worksteal

.PHONY: help setup test demo check lint types layers format schema bench bench-agents bench-http bench-footprint bench-peers bench-page chaos lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

setup: $(READY) ## Create .venv with everything the project needs

# Runs again only when what is installed would change.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Lineshaft needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) (once, or after a change of dependencies)"
	@if command -v uv >/dev/null; then \
	  [ -x $(BIN)/python ] || uv venv --quiet --python "$$(command -v $(PYTHON))" $(VENV); \
	  uv pip install --quiet --python $(BIN)/python --constraints constraints.txt --build-constraints constraints.txt --editable '.[dev]'; \
	else \
	  $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV); \
	  PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'; \
	fi
	@touch $@

test: $(READY) ## Run the tests
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

demo: $(READY) ## Watch a small fleet work, in under a minute
	@$(BIN)/lineshaft demo

check: lint types layers test ## Everything that CI runs

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports

format: $(READY) ## Format the code and fix what can be fixed by itself
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

schema: $(READY) ## Write src/lineshaft/engine/postgres/schema.sql from the migrations
	$(BIN)/python tests/write_schema.py

bench: $(READY) ## Measure the engine against plain SQL (some minutes)
	$(BIN)/python -m benchmarks.engine $(BENCH_FLAGS)

bench-agents: $(READY) ## Measure agents against the engine and the database (some minutes)
	$(BIN)/python -m benchmarks.agents $(BENCH_FLAGS)

bench-footprint: $(READY) ## Measure what a task costs: CPU, WAL, rows, disk
	$(BIN)/python -m benchmarks.footprint $(BENCH_FLAGS)

bench-peers: $(READY) ## Measure Lineshaft, other queues and plain SQL in turns (most of an hour)
	$(BIN)/python -m benchmarks.peers $(BENCH_FLAGS)

bench-page: $(READY) ## Bring the results of bench-peers into docs/benchmarks.md
	$(BIN)/python -m benchmarks.peers --page

chaos: $(READY) ## Break things for MINUTES (1) with the faults of SEED, and prove that nothing was lost
	$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) --minutes $(or $(MINUTES),1) $(CHAOS_FLAGS)

bench-http: $(READY) ## Measure the server with many waiting agents, and against a bare route (some minutes)
	$(BIN)/python -m benchmarks.http $(BENCH_FLAGS)

lock: ## Choose new versions of all dependencies (needs uv)
	uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras --no-header --no-annotate --output-file constraints.txt pyproject.toml

clean: ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
