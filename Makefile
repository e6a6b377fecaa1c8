# One word for each thing one does here. CI runs the same words (.ci/run).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input $(PIP_ARGS) -c constraints.txt
LIGHT := $(VENV)/.light.stamp
FULL := $(VENV)/.full.stamp

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format types pytest docs bench clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(LIGHT) ## Install memcalc (no torch) and size GPT-3
	$(BIN)/memcalc estimate gpt3.yaml

test: lint types pytest ## Everything that guards a change: lint, types, tests; sets itself up, under 10 minutes

test-all: lint types $(FULL) ## The same with the long tests, then regenerate the docs
	$(BIN)/python -m pytest
	$(MAKE) docs

lint: $(FULL) ## Lint and check the format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(FULL) ## Check the types
	$(BIN)/mypy

pytest: $(FULL) ## The tests alone, without the long ones
	$(BIN)/python -m pytest -m "not long"

format: $(FULL) ## Format, and fix what the linter can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(FULL) ## Regenerate the parts of README.md and docs/ that are output
	$(BIN)/python tools/docs.py

bench: $(FULL) ## How quick the program is: start-up and estimates a second
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/throughput.py

clean: ## Remove environments, caches and builds
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find memcalc tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment, filled in two steps. A stamp is remade when what it was installed from changes.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"memcalc needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Name another: make PYTHON=python3.12 ...")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: on Debian and Ubuntu install python3-venv." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(LIGHT): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

# torch is pinned by constraints.txt: unpinned, pip takes the newest build, on Linux with gigabytes of CUDA libraries,
# and tests that count saved tensors to the byte would run against a release nobody has looked at.
$(FULL): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[dev,hf]"
	@touch $(LIGHT) $@
