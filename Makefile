# `make demo` and `make test` need Python 3.11 and a network, nothing else; `make help` lists the rest.

PYTHON_ENV := .venv/bin/python
CONFIG ?= examples/gcd.toml
BASE_MODEL := models/base/model.safetensors
# further pytest arguments, e.g. make test ARGS="tests/client -x"
ARGS ?=
TWO_AT_ONCE := -n 2 --dist loadscope --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo fast test lint format types chaos search check lock docs clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name what; do \
	    printf '  make %-8s %s\n' "$$name" "$$what"; done

setup:  ## .venv with everything at its locked version
	@scripts/setup

demo: setup $(BASE_MODEL)  ## train the example: server, two vLLM workers, a Megatron trainer
	@.venv/bin/roq up $(CONFIG)

$(BASE_MODEL):
	@$(PYTHON_ENV) examples/make_base_model.py --out models/base

fast:  ## set up and run every test that is not slow (5 to 8 minutes)
	@scripts/setup --tests
	@$(PYTHON_ENV) -m pytest $(TWO_AT_ONCE) -m "not slow" $(ARGS)

test:  ## set up and run every test, in two processes
	@scripts/setup --tests
	@$(PYTHON_ENV) -m pytest $(TWO_AT_ONCE) $(ARGS)

lint:  ## ruff; luacheck and StyLua over lua/
	@scripts/setup --lint
	@.venv/bin/ruff check .
	@scripts/lint-lua

format:  ## rewrite what StyLua and ruff's fixes can
	@scripts/setup --lint
	@.venv/bin/ruff check --fix .
	@scripts/lint-lua --write

types:  ## pyright: strict for roq/
	@scripts/setup --lint
	@.venv/bin/node scripts/node/node_modules/pyright/index.js

chaos: SEED ?= 7
chaos: MINUTES ?= 10
chaos:  ## kill, freeze and stop every kind of process; SEED=7 MINUTES=10
	@scripts/setup --tests
	@$(PYTHON_ENV) -m tests.system.chaos.driver --seed $(SEED) --minutes $(MINUTES)

search: DEPTH ?= 6
search:  ## every interleaving of calls on a small run, on an embedded server; DEPTH=6
	@scripts/setup --tests
	@$(PYTHON_ENV) -m tests.protocol.search --depth $(DEPTH)

check: lint types test  ## what CI runs

lock:  ## resolve requirements/cpu.in again, keeping what is locked
	@scripts/setup
	@scripts/lock

docs:  ## write what comes from the code: parts of docs/, Grafana's dashboard
	@$(PYTHON_ENV) scripts/config-reference
	@$(PYTHON_ENV) scripts/docs
	@$(PYTHON_ENV) scripts/dashboard
	@$(PYTHON_ENV) scripts/architecture

clean:  ## remove the environment, caches and builds (runs/ and models/ stay)
	rm -rf .venv .venv.lock scripts/node/node_modules dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
