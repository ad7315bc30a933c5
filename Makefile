# Every target sets up what it needs in .venv, once, and leaves nothing outside this folder.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export PIP_NO_CACHE_DIR := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export XDG_CACHE_HOME := $(CURDIR)/.cache
export TMPDIR := $(CURDIR)/.cache/tmp
export NUMBA_CACHE_DIR := $(CURDIR)/.cache/numba

.PHONY: demo test slow soak check bench docs clean
.DEFAULT_GOAL := demo

# torch first, pinned to the CPU build: an open range would bring gigabytes of CUDA.
$(VENV)/ready: pyproject.toml
	@mkdir -p $(TMPDIR)
	@command -v $(PYTHON) >/dev/null || { echo "laconic needs Python 3.11 ($(PYTHON) not found; set PYTHON=…)"; exit 2; }
	@echo "setting up $(VENV) (about two minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q torch==2.13.0
	@$(BIN)/pip install -q -e '.[dev,mpi]'
	@touch $@

demo: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	@$(BIN)/laconic demo

# Three files at a time on two cores, in the order of their names: tests of real processes mostly wait, those of codecs
# compute, and side by side they take less than one after the other, as they would by the number of their tests. MPI's
# ranks wait by spinning, and would hold up whatever runs beside them.
test: check
	@mkdir -p $(TMPDIR)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'not slow and not alone'
	$(BIN)/python -m pytest -m 'alone and not slow'

slow: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/python -m pytest -m slow

soak: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/python benchmarks/soak_churn.py --kills 1000 --seed 1 --output .cache/churn.json

check: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/laconic bench codecs
	$(BIN)/laconic bench approximation --samples 2500000 --plot .cache/approximation.html
	$(BIN)/laconic bench collectives -n 4

docs: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/python -m pytest tests/docs

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
