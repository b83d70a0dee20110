# `make demo` and `make test` set up everything they need in .venv the first time; nothing outside this folder is touched
# but the model cache (~/.cache/penstock). `make` alone lists the targets.

VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients

# The first interpreter that runs and is new enough: a pyenv shim may exist and still not run.
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$python && break; done)

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Images for containers often set it; the tests start hundreds of processes, each of which would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test clients-setup clients lint format docs clean

help:
	@echo "make demo     install, start everything, stream one answer, stop everything"
	@echo "make test     install, run the tests but the slow ones (SLOW_MINUTES=60: those too)"
	@echo "make clients  install clients that people use in .venv-clients, run tests/clients with them"
	@echo "make lint     formatting, types and import rules"
	@echo "make format   let ruff rewrite the files"
	@echo "make docs     write docs/protocol.md and docs/metrics.md again from the sources"
	@echo "make clean    remove .venv, .venv-clients and the tools' caches"

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
	@$(PIP) -c constraints-dev.txt --no-deps nixl nixl-cu13 || echo "NIXL can't be installed here: tests of KV between hosts are skipped"
	@touch $@

setup: $(VENV)/.dev

demo: $(VENV)/.run
	@$(BIN)/penstock demo

# SLOW_MINUTES=20: tests marked `slow` as well, after the others, as long as the run is younger than this.
# Two processes share the tests (tests/fixtures/processes.py), since one alone uses less than half of two cores. With slow tests
# it is one, so that these come after all others. TEST_PROCESSES=4: another number; 0: all in the process that is started.
test: $(VENV)/.dev
	@$(BIN)/python -m pytest --slow-minutes $(or $(SLOW_MINUTES),0) \
		-n $(or $(TEST_PROCESSES),$(if $(filter-out 0,$(SLOW_MINUTES)),0,2))

# torch is not fetched a second time: guidellm gets Penstock's, by links.
$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/requirements-no-deps.txt $(VENV)/.torch
	@echo "setting up $(CLIENTS): the clients"
	@$(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --prefer-binary -r tests/clients/requirements.txt
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/clients/requirements-no-deps.txt
	@mkdir -p $(CLIENTS)/torch
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		for name in torch torchgen functorch triton nvidia; do \
			if [ -e "$$site/$$name" ]; then ln -sfn "$$(realpath "$$site/$$name")" $(CLIENTS)/torch/; fi; \
		done
	@echo $(abspath $(CLIENTS))/torch > $$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth
	@touch $@

# Clients of npm are tested where there is npm and its registry.
tests/clients/npm/node_modules/.installed: tests/clients/npm/package-lock.json
	@if command -v npm >/dev/null && (cd tests/clients/npm && \
		npm ci --silent --no-audit --no-fund --fetch-retries=1 --fetch-timeout=60000); then touch $@; \
		else rm -rf tests/clients/npm/node_modules; echo "the clients of npm are left out: npm ci failed"; fi

clients-setup: $(VENV)/.run $(CLIENTS)/.installed tests/clients/npm/node_modules/.installed

clients: clients-setup
	@SERVER_PYTHON=$(abspath $(BIN)/python) $(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini tests/clients

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
	$(BIN)/python -m tests.unit.metrics_page > docs/metrics.md

clean:
	rm -rf $(VENV) $(CLIENTS) tests/clients/npm/node_modules .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
