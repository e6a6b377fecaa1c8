# One word for each thing one does here. CI runs the same words (.ci/run).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
# Most of what is installed is never imported here: what is, is compiled then.
PIP_WORDS := install --quiet --disable-pip-version-check --no-input --no-compile
PIP_INSTALL := $(BIN)/python -m pip $(PIP_WORDS) $(PIP_ARGS) -c constraints.txt
LIGHT := $(VENV)/.light.stamp
FULL := $(VENV)/.full.stamp
NULL_VENV := .venv-null
SITE_VENV := .venv-site
SITE := $(SITE_VENV)/.stamp
PAGE_VENV := .venv-page
PAGE_PLATFORMS := --platform pyemscripten_2026_0_wasm32 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
PAGE := build/page-modules/.stamp build/page-wheels/.stamp build/page-memcalc/.stamp
NULL := $(NULL_VENV)/.stamp
# The tests side by side, each process with a copy of torch in memory; none: make test WORKERS=
WORKERS ?= -n auto --maxprocesses 4 --dist worksteal
# Empty is off, whatever the caller has set: the tests start Python hundreds of times, and it need not compile each time.
export PYTHONDONTWRITEBYTECODE :=
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: .venv-null help demo test test-all lint format types pytest docs site page page-serve page-pictures browser pictures bench gpu-suite gpu-compare gpu-probe gpu-snapshots clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(LIGHT) ## Install memcalc (no torch) and size GPT-3
	$(BIN)/memcalc estimate gpt3.yaml

test: ## Everything that guards a change: lint, types, tests; sets itself up, under 10 minutes
	@$(MAKE) --no-print-directory -j2 lint types .venv-null
	@$(MAKE) --no-print-directory pytest

test-all: lint types $(FULL) .venv-null ## The same with the long tests, then regenerate the docs
	$(BIN)/python -m pytest $(WORKERS)
	$(MAKE) docs

lint: $(FULL) ## Lint and check the format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(FULL) ## Check the types
	$(BIN)/mypy --num-workers 2

pytest: $(FULL) .venv-null ## The tests alone, without the long ones
	$(BIN)/python -m pytest -m "not long" $(WORKERS)

format: $(FULL) ## Format, and fix what the linter can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(FULL) ## Regenerate the parts of README.md and docs/ that are output
	$(BIN)/python tools/docs.py

site: $(SITE) ## Build the documentation's site into build/site; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=true $(SITE_VENV)/bin/mkdocs build --strict --quiet

page: $(PAGE) ## Build the web page into build/page, from PyPI and npm alone (needs node 20); any static host serves it
	$(PYTHON) tools/build_page.py --modules build/page-modules --wheels build/page-wheels --memcalc build/page-memcalc/*.whl --site build/page

page-serve: page ## The same, served on http://127.0.0.1:8000/
	$(PYTHON) -m http.server --bind 127.0.0.1 --directory build/page 8000

browser: $(FULL) ## Install what drives Chromium in the tests of the web page (Chromium itself is the system's)
	$(PIP_INSTALL) -e ".[browser]"

page-pictures: page browser ## Take the web page's screenshots for docs/
	PYTHONPATH=. $(BIN)/python tools/page_pictures.py

pictures: $(FULL) ## Redraw the plots of README.md and docs/
	$(BIN)/python tools/pictures.py

bench: $(FULL) .venv-null ## How quick the program is: start-up, estimates a second, the null device
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

# On a machine that has a GPU, and a CUDA build of torch in the Python that is named: make gpu-suite GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python

gpu-suite: ## On a GPU: measure the project's own runs; goes on where it was interrupted (DEVICE=null:h100-80gb rehearses)
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m memcalc measure --suite benchmarks/suite.yaml --device $(DEVICE) --record $(RECORDS)

gpu-compare: ## Anywhere: traces beside what gpu-suite recorded, made afterwards (TRACES="fake null")
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m memcalc measure --compare $(RECORDS) $(TRACES:%=--trace %) --record $(dir $(RECORDS))traces/$(notdir $(RECORDS))

gpu-probe: ## On a GPU: what each operator that matters allocates inside, beside what memcalc says (DEVICE likewise)
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m benchmarks.probe --device $(DEVICE) --record $(PROBES)

gpu-snapshots: ## On a GPU: memory snapshots of two small programs, which the model of the allocator must reproduce
	mkdir -p $(SNAPSHOTS)
	for scenario in training shuffled; do PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) benchmarks/record_snapshots.py $$scenario $(SNAPSHOTS) || exit 1; done

clean: ## Remove environments, caches and builds
	rm -rf .venv .venv-null .venv-site .venv-page build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
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
	$(PIP_INSTALL) -e ".[dev,hf,peft,null,parquet,plan,plot,cluster]"
	@touch $(LIGHT) $@

# PyTorch's CUDA build without NVIDIA's libraries, for the tests of the null device. `===` takes PyPI's own build, also
# where an index offers one for the CPU; --no-deps leaves the libraries away. Elsewhere than on Linux those tests skip.
ifeq ($(shell uname -s),Linux)
.venv-null: $(NULL)
else
.venv-null:
endif

$(NULL): constraints.txt | $(BIN)/python
	$(PYTHON) -m venv $(NULL_VENV)
	$(NULL_VENV)/bin/python -m pip $(PIP_WORDS) -c constraints.txt \
		typing_extensions sympy networkx jinja2 fsspec filelock numpy pydantic pyyaml transformers nvidia-ml-py
	$(NULL_VENV)/bin/python -m pip $(PIP_WORDS) --no-deps "torch===$(TORCH)"
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

$(PAGE_VENV)/.stamp: tools/page/build.txt
	$(PYTHON) -m venv $(PAGE_VENV)
	$(PAGE_VENV)/bin/python -m pip $(PIP_WORDS) --no-deps --require-hashes --requirement $<
	@touch $@

build/page-memcalc/.stamp: $(PAGE_VENV)/.stamp pyproject.toml $(shell find memcalc configs -type f -not -path '*/__pycache__/*' 2>/dev/null)
	rm -rf build/page-memcalc
	SOURCE_DATE_EPOCH=315532800 $(PAGE_VENV)/bin/hatchling build -t wheel -d build/page-memcalc
	@touch $@

# MkDocs and its theme, apart from what the tests run with.
$(SITE): constraints-site.txt
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip $(PIP_WORDS) $(PIP_ARGS) -c constraints-site.txt mkdocs-material
	@touch $@
