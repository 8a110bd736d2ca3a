# Headroom. `make` alone lists the targets.
#
#   PYTHON=python3.12   the Python that makes the virtual environment
#   TORCH=cpu|cuda      which PyTorch build; auto: cuda where nvidia-smi finds a GPU, else cpu
#   PEERS=FOLDER        where other servers are installed, for `make bench-peers`
#   ARGS="..."          more arguments for the command, e.g. make serve ARGS="--port 9000"

PYTHON      ?= python3
VENV        ?= .venv
TORCH       ?= auto
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
MODEL       ?= smollm2-135m
PEERS       ?= peers
ARGS        ?=

BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check --no-input
PINS := pyproject.toml constraints.txt constraints-cpu.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help serve chat fetch test test-slow test-all lint format types imports check load cache-page fuzz soak \
        reliability-page bench bench-peers bench-page clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r name what; do printf '%-23s %s\n' "$$name" "$$what"; done

serve: $(VENV)/.ready-run ## serve the default model on http://127.0.0.1:8000
	@exec $(BIN)/headroom serve $(MODEL) $(ARGS)

chat: $(VENV)/.ready-run ## talk to the default model in the terminal
	@exec $(BIN)/headroom chat $(MODEL) $(ARGS)

fetch: $(VENV)/.ready-run ## download the default model and do nothing more
	@$(BIN)/headroom fetch $(MODEL) $(ARGS)

test: $(VENV)/.ready-test .model ## run the suite (no GPU needed)
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(VENV)/.ready-test .model ## run only the tests that `make test` leaves out
	@$(BIN)/python -m pytest -m slow $(ARGS)

test-all: test test-slow ## run `make test`, then the slow tests

lint: $(VENV)/.ready-dev ## ruff: rules and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/.ready-dev ## let ruff repair what it can
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

types: $(VENV)/.ready-dev ## mypy --strict on server, model and cache
	@$(BIN)/mypy

imports: $(VENV)/.ready-dev ## which room may import which
	@$(BIN)/lint-imports --no-logo

check: lint types imports test ## all that a change must pass

# The tests fetch the model and compile the kernels too; here it shows, and takes no test's time.
.PHONY: .model
.model: $(VENV)/.ready-run
	@$(BIN)/headroom fetch $(MODEL) || echo "Without the model, the tests that need it will be skipped"
	@$(BIN)/headroom kernels || echo "Without the kernels, the tests that need them will be skipped"

load: $(VENV)/.ready-test ## a minute of load, latency beside live cache bytes
	@$(BIN)/python -m loadtest.run --model $(MODEL) $(ARGS)

cache-page: $(VENV)/.ready-test ## measure the attention modes and write the tables of the pages anew
	@$(BIN)/python -m loadtest.cache_page --model $(MODEL) $(ARGS)

fuzz: $(VENV)/.ready-test ## twenty thousand requests that nobody should send, to a tiny model
	@$(BIN)/python -m loadtest.fuzz $(ARGS)

soak: $(VENV)/.ready-test ## half an hour of a crowd, every answer compared with its solo run
	@$(BIN)/python -m loadtest.soak --model $(MODEL) $(ARGS)

reliability-page: $(VENV)/.ready-test ## write what fuzz and soak found into docs/reliability.md
	@$(BIN)/python -m loadtest.reliability_page

bench: $(VENV)/.ready-test ## how fast our side is, in process and over HTTP (twenty minutes)
	@$(BIN)/python -m loadtest.bench --model $(MODEL) $(ARGS)

bench-peers: $(VENV)/.ready-test ## the same work for the servers in PEERS=FOLDER, see loadtest/PEERS.md (an hour)
	@$(BIN)/python -m loadtest.bench_peers --model $(MODEL) --peers "$(PEERS)" $(ARGS)

bench-page: $(VENV)/.ready-test ## write what they found into docs/benchmarks.md
	@$(BIN)/python -m loadtest.bench_page

clean: ## remove the virtual environment and what the tools left (fetched models stay)
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment grows as it is asked for: to run, to test, to check. Each stamp is renewed only
# when a pin or the project file changes.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Headroom needs Python 3.11 or newer; say which with: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) has no venv module; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.ready-torch: $(VENV)/.made constraints.txt constraints-cpu.txt
	@if [ "$(TORCH)" = cuda ] || { [ "$(TORCH)" = auto ] && nvidia-smi -L >/dev/null 2>&1; }; then \
		echo "Installing PyTorch's CUDA build (several GB)"; \
		$(PIP) install -c constraints.txt torch; \
	else \
		echo "Installing PyTorch's CPU build"; \
		$(PIP) install --quiet --no-deps -c constraints-cpu.txt torch 2>/dev/null || \
		$(PIP) install --no-deps -c constraints-cpu.txt --extra-index-url $(TORCH_INDEX) torch || \
		{ echo "No CPU build of PyTorch at $(TORCH_INDEX); name another index with TORCH_INDEX=URL," \
		       "or take the CUDA build with TORCH=cuda"; exit 1; }; \
	fi
	@touch $@

$(VENV)/.ready-run: $(VENV)/.ready-torch $(PINS)
	@echo "Installing Headroom's dependencies"
	@$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-run
	@echo "Installing what the tests need"
	@$(PIP) install --quiet -c constraints.txt -e '.[test,load,plot,fuzz]'
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-run
	@echo "Installing the checkers"
	@$(PIP) install --quiet -c constraints.txt -e '.[dev,plot]'
	@touch $@
