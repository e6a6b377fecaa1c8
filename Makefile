# One target per task; CI runs the same targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
# --no-compile: most installed modules are never imported; Python compiles the others on first import.
PIP_WORDS := install --quiet --disable-pip-version-check --no-input --no-compile
PIP_INSTALL := $(BIN)/python -m pip $(PIP_WORDS) $(PIP_ARGS) -c constraints.txt
# Environments without pip of their own, which takes seconds to unpack, are filled by that of .venv.
PIP_INTO = $(BIN)/python -m pip --python $(1)/bin/python $(PIP_WORDS)
LIGHT := $(VENV)/.light.stamp
FULL := $(VENV)/.full.stamp
NULL_VENV := .venv-null
SITE_VENV := .venv-site
SITE := $(SITE_VENV)/.stamp
PAGE_VENV := .venv-page
PAGE_PLATFORMS := --platform pyemscripten_2026_0_wasm32 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
PAGE := build/page-modules/.stamp build/page-wheels/.stamp build/page-memcalc/.stamp
NULL := $(NULL_VENV)/.stamp
# Parallel test processes, one per core: each collects all tests, imports torch and fills caches, for a minute.
# Without them: make test WORKERS=
WORKERS ?= -n $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() or 1))') --dist worksteal
# Always empty (off): the tests start Python hundreds of times, and byte code saves compiling each time.
export PYTHONDONTWRITEBYTECODE :=
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: .venv-null help demo test test-all lint format types pytest docs site page page-serve page-pictures browser pictures bench gpu-suite gpu-compare gpu-probe gpu-snapshots clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(LIGHT) ## Install memcalc (without torch) and estimate GPT-3
	$(BIN)/memcalc estimate gpt3.yaml

test: ## Lint, types and tests; installs what they need
	@$(MAKE) --no-print-directory -j2 $(FULL) .venv-null
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory -j2 types pytest

test-all: lint types $(FULL) .venv-null ## Lint, types and all tests, long ones too; then regenerate the docs
	$(BIN)/python -m pytest $(WORKERS)
	$(MAKE) docs

lint: $(FULL) ## Lint, and check the formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# In one process: on a busy machine mypy's workers do not start within its three seconds, which ends it.
types: $(FULL) ## Check the types
	$(BIN)/mypy

pytest: $(FULL) .venv-null ## Tests only, without the long ones
	$(BIN)/python -m pytest -m "not long" $(WORKERS)

format: $(FULL) ## Format, and apply the linter's fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(FULL) ## Regenerate the generated parts of README.md and docs/
	$(BIN)/python tools/docs.py

site: $(SITE) ## Build the documentation site into build/site; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=true $(SITE_VENV)/bin/mkdocs build --strict --quiet

page: $(PAGE) ## Build the web page into build/page, from PyPI and npm alone (needs node 20); any static host can serve it
	$(PYTHON) tools/build_page.py --modules build/page-modules --wheels build/page-wheels --memcalc build/page-memcalc/*.whl --site build/page

page-serve: page ## Build the web page and serve it on http://127.0.0.1:8000/
	$(PYTHON) -m http.server --bind 127.0.0.1 --directory build/page 8000

browser: $(FULL) ## Install Playwright for the tests of the web page (Chromium itself comes from the system)
	$(PIP_INSTALL) playwright

page-pictures: page browser ## Take the web page's screenshots for docs/
	PYTHONPATH=. $(BIN)/python tools/page_pictures.py

pictures: $(FULL) ## Redraw the plots of README.md and docs/
	$(BIN)/python tools/pictures.py

bench: $(FULL) .venv-null ## Benchmarks: start-up, estimates per second, traces, checks, grids, the null device
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/trace.py
	$(BIN)/python benchmarks/check.py
	$(BIN)/python benchmarks/grids.py
	$(BIN)/python benchmarks/nullcuda.py $(NULL_VENV)/bin/python

DEVICE ?= cuda
GPU_RECORDS ?= benchmarks/recordings/gpu/new
RECORDS ?= $(GPU_RECORDS)/suite.jsonl
TRACES ?= fake
PROBES ?= $(GPU_RECORDS)/probe.jsonl
SNAPSHOTS ?= $(GPU_RECORDS)/snapshots

# On a machine with a GPU, and a Python with a CUDA build of torch: make gpu-suite GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python

gpu-suite: ## On a GPU: measure the runs of the suite; resumes after an interruption (DEVICE=null:h100-80gb simulates a GPU)
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m memcalc measure --suite benchmarks/suite.yaml --device $(DEVICE) --record $(RECORDS)

gpu-compare: ## Anywhere: compare traces with the records of gpu-suite (TRACES="fake null")
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m memcalc measure --compare $(RECORDS) $(TRACES:%=--trace %) --record $(dir $(RECORDS))traces/$(notdir $(RECORDS))

gpu-probe: ## On a GPU: compare the workspaces of operators with memcalc's rules (DEVICE as for gpu-suite)
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m benchmarks.probe --device $(DEVICE) --record $(PROBES)

gpu-snapshots: ## On a GPU: record memory snapshots of two small programs, which the allocator model must reproduce
	mkdir -p $(SNAPSHOTS)
	for scenario in training shuffled; do PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) benchmarks/record_snapshots.py $$scenario $(SNAPSHOTS) || exit 1; done

clean: ## Remove environments, caches and builds
	rm -rf .venv .venv-null .venv-site .venv-page build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find memcalc tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment, filled in two steps. A stamp is renewed when the files it depends on change.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"memcalc needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Choose another: make PYTHON=python3.12 ...")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot create virtual environments: on Debian and Ubuntu install python3-venv." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	-$@ -m pip $(PIP_WORDS) $(PIP_ARGS) --upgrade pip # Python 3.11's own takes three times as long to choose versions

$(LIGHT): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

# torch is pinned by constraints.txt: unpinned, pip installs the newest build, on Linux with gigabytes of CUDA
# libraries, and byte-exact tests of saved tensors would run against an untested version.
$(FULL): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[dev,hf,peft,null,parquet,plan,plot,cluster]"
	@touch $(LIGHT) $@

# PyTorch's CUDA build without NVIDIA's libraries, for the tests of the null device. `===` selects PyPI's own build, even
# if an index offers one for the CPU; --no-deps omits the libraries. These tests are skipped on other systems than Linux.
ifeq ($(shell uname -s),Linux)
.venv-null: $(NULL)
else
.venv-null:
endif

$(NULL): constraints.txt | $(BIN)/python
	$(PYTHON) -m venv --without-pip $(NULL_VENV)
	$(call PIP_INTO,$(NULL_VENV)) -c constraints.txt \
		typing_extensions sympy networkx jinja2 fsspec filelock numpy pydantic pyyaml transformers nvidia-ml-py
	$(call PIP_INTO,$(NULL_VENV)) --no-deps "torch===$(TORCH)"
	@touch $@

# The web page: Pyodide and uPlot from npm, wheels from PyPI, each with its checksum; and the wheel of this checkout.
build/page-modules/.stamp: tools/page/package.json tools/page/package-lock.json
	@node --version >/dev/null || { echo "make page needs node 20 or newer and npm: on Debian and Ubuntu install nodejs and npm." >&2; exit 1; }
	mkdir -p build/page-modules
	cp tools/page/package.json tools/page/package-lock.json build/page-modules
	npm ci --prefix build/page-modules --ignore-scripts --no-audit --no-fund --silent
	@touch $@

build/page-wheels/.stamp: tools/page/wheels.txt
	rm -rf build/page-wheels
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
		--python-version 3.14 $(PAGE_PLATFORMS) --requirement tools/page/wheels.txt --dest build/page-wheels
	@touch $@

$(PAGE_VENV)/.stamp: tools/page/build.txt | $(BIN)/python
	$(PYTHON) -m venv --without-pip $(PAGE_VENV)
	$(call PIP_INTO,$(PAGE_VENV)) --no-deps --require-hashes --requirement $<
	@touch $@

build/page-memcalc/.stamp: $(PAGE_VENV)/.stamp pyproject.toml $(shell find memcalc configs -type f -not -path '*/__pycache__/*' 2>/dev/null)
	rm -rf build/page-memcalc
	SOURCE_DATE_EPOCH=315532800 $(PAGE_VENV)/bin/hatchling build -t wheel -d build/page-memcalc
	@touch $@

# MkDocs and its theme, in a separate environment.
$(SITE): constraints-site.txt | $(BIN)/python
	$(PYTHON) -m venv --without-pip $(SITE_VENV)
	$(call PIP_INTO,$(SITE_VENV)) $(PIP_ARGS) -c constraints-site.txt mkdocs-material
	@touch $@
