# `make test` is all that a newcomer needs: it installs what it uses.
# Needs Python 3.11+ and make. Uses uv if it is installed, else venv and pip.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Each stamp names what is installed: the package as its users have it, or all that development needs.
PACKAGE := $(VENV)/.package
DEVELOPMENT := $(VENV)/.development
COMPILED := $(VENV)/.compiled
BENCH_FLAGS ?=
CHAOS_FLAGS ?=
PYTEST_FLAGS ?=
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
# Tests start many processes, which start faster with compiled files. Those go to .venv, not beside the sources.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/pycache

# $(call install,FILE) installs what requirements/FILE.txt lists, then the package. Every file of every dependency must
# have a hash that is listed; what builds the package is listed too, so that nothing else is downloaded.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Lineshaft needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing requirements/$(1).txt into $(VENV) (once, or after a change of dependencies)"
	@if command -v uv >/dev/null; then \
	  [ -x $(BIN)/python ] || uv venv --quiet --python "$$(command -v $(PYTHON))" $(VENV); \
	  uv pip install --quiet --python $(BIN)/python --require-hashes --requirements requirements/$(1).txt; \
	  uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .; \
	else \
	  $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV); \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements/$(1).txt; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .; \
	fi
endef

COMPILE := uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --generate-hashes

.PHONY: help setup test test-full demo check collected lint types layers format schema bench bench-single bench-fleet bench-agents bench-http bench-sources bench-footprint bench-reads bench-artifacts bench-redis bench-dashboard bench-peers bench-page docs screenshots chaos fuzz lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

setup: $(DEVELOPMENT) ## Create .venv with everything that development needs

$(PACKAGE): pyproject.toml requirements/package.txt
	$(call install,package)
	@touch $@

# Also installs the package, so that `make demo` after it has nothing left to do.
$(DEVELOPMENT): pyproject.toml requirements/development.txt
	$(call install,development)
	@touch $(PACKAGE) $@

test: $(COMPILED) ## Run the quick tests on the newest PostgreSQL
	$(PYTEST) $(PYTEST_FLAGS)

# Before the first run, two processes find all tests, so that these are compiled once, and not by each worker.
$(COMPILED): $(DEVELOPMENT)
	@for folders in 'tests/[a-d]*/' 'tests/[e-z]*/'; do \
	  $(BIN)/python -m pytest --collect-only -qq $$folders >/dev/null 2>&1 & \
	done; wait
	@touch $@

test-full: $(DEVELOPMENT) ## Run all tests, on every PostgreSQL found, on the database and over HTTP
	$(PYTEST) --full $(PYTEST_FLAGS)

demo: $(PACKAGE) ## Watch a small fleet work, in under a minute
	@$(BIN)/lineshaft demo

check: $(DEVELOPMENT) ## Run everything that CI runs
	$(MAKE) --jobs 2 lint types layers collected
	$(MAKE) test-full

# Finds all tests, so that they are compiled once, on the core that mypy leaves free, and not by each worker.
collected: $(DEVELOPMENT)
	@$(BIN)/python -m pytest --full --collect-only -qq >$(VENV)/collected || { cat $(VENV)/collected; exit 1; }

lint: $(DEVELOPMENT)
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: $(DEVELOPMENT)
	$(BIN)/mypy

layers: $(DEVELOPMENT)
	$(BIN)/lint-imports

format: $(DEVELOPMENT) ## Format the code and apply automatic fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

schema: $(DEVELOPMENT) ## Write src/lineshaft/engine/postgres/schema.sql from the migrations
	$(BIN)/python -m tests.write_schema

bench: $(DEVELOPMENT) ## Measure the engine against plain SQL (some minutes)
	$(BIN)/python -m benchmarks.engine $(BENCH_FLAGS)

bench-single: $(DEVELOPMENT) ## Measure one task at a time against plain SQL (some minutes)
	$(BIN)/python -m benchmarks.single $(BENCH_FLAGS)

bench-fleet: $(DEVELOPMENT) ## Measure what 10,000 agents with long tasks cost PostgreSQL (some minutes)
	$(BIN)/python -m benchmarks.fleet $(BENCH_FLAGS)

bench-agents: $(DEVELOPMENT) ## Measure agents against the engine and the database (some minutes)
	$(BIN)/python -m benchmarks.agents $(BENCH_FLAGS)

bench-footprint: $(DEVELOPMENT) ## Measure what a task costs: CPU, WAL, rows, disk
	$(BIN)/python -m benchmarks.footprint $(BENCH_FLAGS)

bench-reads: $(DEVELOPMENT) ## Measure reads with a million ended and 100,000 live tasks (some minutes)
	$(BIN)/python -m benchmarks.large_database $(BENCH_FLAGS)

bench-artifacts: $(DEVELOPMENT) ## Measure uploads and downloads against a bare copy and bare S3
	$(BIN)/python -m benchmarks.artifacts $(BENCH_FLAGS)

bench-http: $(DEVELOPMENT) ## Measure the server with many waiting agents, and against a bare route (some minutes)
	$(BIN)/python -m benchmarks.http $(BENCH_FLAGS)

bench-sources: $(DEVELOPMENT) ## Measure webhooks against a bare insert over HTTP, and ticks of schedules
	$(BIN)/python -m benchmarks.sources $(BENCH_FLAGS)

bench-redis: $(DEVELOPMENT) ## Measure wake-ups through Redis against PostgreSQL's notifications (some minutes)
	$(BIN)/python -m benchmarks.redis $(BENCH_FLAGS)

bench-dashboard: $(DEVELOPMENT) ## Measure pages on a large database, and what open tabs cost the server (some minutes)
	$(BIN)/python -m benchmarks.dashboard $(BENCH_FLAGS)

bench-peers: $(DEVELOPMENT) ## Measure Lineshaft, other queues and plain SQL in turns (most of an hour)
	$(BIN)/python -m benchmarks.peers $(BENCH_FLAGS)

bench-page: $(DEVELOPMENT) ## Write the results of bench-peers into docs/performance.md
	$(BIN)/python -m benchmarks.peers --page

docs: $(DEVELOPMENT) ## Build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "Open site/index.html"

screenshots: $(DEVELOPMENT) ## Write docs/images/ from real pages (needs Chromium)
	$(BIN)/python -m tests.dashboard.screenshots

chaos: $(DEVELOPMENT) ## Inject the faults of SEED for MINUTES (1), with ATTACKS=1 under attack, with REDIS=1 those of Redis, and check that nothing was lost
	$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) --minutes $(or $(MINUTES),1) $(if $(ATTACKS),--attacks) $(if $(REDIS),--redis) $(CHAOS_FLAGS)

fuzz: $(DEVELOPMENT) ## Send REQUESTS (100000) random requests to a server, and those of schemathesis before
	$(BIN)/python -m tests.fuzz --requests $(or $(REQUESTS),100000) $(if $(SEED),--seed $(SEED))

lock: ## Choose new versions of all dependencies (needs uv)
	$(COMPILE) --upgrade --all-extras --output-file requirements/development.txt pyproject.toml requirements/build.in
	$(COMPILE) --constraints requirements/development.txt --output-file requirements/package.txt pyproject.toml requirements/build.in

clean: ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis site
