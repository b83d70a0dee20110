# `make demo` and `make test` set up everything they need in .venv the first time; nothing outside this folder is touched
# but the model cache (~/.cache/penstock). `make` alone lists the targets.

VENV := .venv
BIN := $(VENV)/bin

# The first interpreter that runs and is new enough: a pyenv shim may exist and still not run.
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$python && break; done)

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format docs clean

help:
	@echo "make demo     install, start everything, stream one answer, stop everything"
	@echo "make test     install, run the tests but the slow ones (SLOW_MINUTES=60: those too)"
	@echo "make lint     formatting, types and import rules"
	@echo "make format   let ruff rewrite the files"
	@echo "make docs     write docs/protocol.md again from the message definitions"
	@echo "make clean    remove .venv and the tools' caches"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11 to 3.13: install one, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }

# torch first and pinned: a CPU wheel of exactly this version is taken where pip finds one.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "setting up $(VENV): torch (the largest part, once)"
	@$(PIP) -c constraints.txt torch
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	@echo "setting up $(VENV): penstock"
	@$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run constraints-dev.txt
	@echo "setting up $(VENV): the tests' tools"
	@$(PIP) -c constraints-dev.txt -e '.[dev]'
	@touch $@

setup: $(VENV)/.dev

demo: $(VENV)/.run
	@$(BIN)/penstock demo

# SLOW_MINUTES=20: tests marked `slow` as well, after the others, as long as the run is younger than this.
test: $(VENV)/.dev
	@$(BIN)/python -m pytest --slow-minutes $(or $(SLOW_MINUTES),0)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.run
	$(BIN)/python -m common.protocol.document > docs/protocol.md

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
