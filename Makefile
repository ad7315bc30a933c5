# Every target sets up what it needs in .venv, once, and leaves nothing outside this folder.
SHELL := /bin/bash
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3)
MINUTES ?= 10
TORCH ?= 2.13.0
TRITON ?= 3.7.1
comma := ,
VENV := .venv
BIN := $(VENV)/bin
export PIP_NO_CACHE_DIR := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export XDG_CACHE_HOME := $(CURDIR)/.cache
export TMPDIR := $(CURDIR)/.cache/tmp
export NUMBA_CACHE_DIR := $(CURDIR)/.cache/numba
export TRITON_CACHE_DIR := $(CURDIR)/.cache/triton
# Without compiled files every process that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# pip asks for rustc's version, and rustup then makes a folder in a home that has none.
export RUSTUP_HOME ?= $(or $(wildcard $(HOME)/.rustup),$(CURDIR)/.cache/rustup)
export CARGO_HOME ?= $(or $(wildcard $(HOME)/.cargo),$(CURDIR)/.cache/cargo)

.PHONY: demo test slow fuzz soak chaos check kernels bench docs gallery smoke wheel clean
.DEFAULT_GOAL := demo

# `install` runs one step of the set-up: a line that says what is installed, a dot a package, and what pip said where it fails.
EXTRAS := dev,docs,etcd,gpu,huggingface,mpi,search,shrink,code,tensorboard,ray
define install
	@echo "$(1)"; set -o pipefail; \
	$(BIN)/pip install $(2) 2>&1 | tee -a .cache/setup.log | awk '/^ *(Collecting|Downloading)/ { printf "."; fflush() } END { print "" }' || \
	  { tail -n 40 .cache/setup.log; echo "set-up failed; all that was said is in .cache/setup.log"; exit 2; }
endef

# torch comes first: what else asks for it then finds it there. Its version is TORCH; its index is TORCH_INDEX where one is named, as PyTorch's own of
# builds for CPUs; and with SYSTEM_TORCH=1 it is the chosen Python's own.
$(VENV)/base: pyproject.toml
	@mkdir -p $(TMPDIR); : >.cache/setup.log; \
	for python in $(PYTHONS); do \
	  if $$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "laconic needs Python 3.11 or newer with its venv module, but found none (tried: $(PYTHONS)); name one with make PYTHON=…" >&2; \
	  exit 2; \
	fi; \
	echo "setting up $(VENV) with $$($$found --version), once"; \
	own=$$($$found -c 'import torch; print(torch.__version__)' 2>/dev/null); \
	if [ -n "$$own" ] && [ -z "$(SYSTEM_TORCH)" ]; then echo "$$found has torch $$own: make clean, then make demo SYSTEM_TORCH=1, takes it instead of another"; fi; \
	if [ -z "$$own" ] && [ -n "$(SYSTEM_TORCH)" ]; then echo "SYSTEM_TORCH=1, but $$found has no torch" >&2; exit 2; fi; \
	$$found -m venv $(if $(SYSTEM_TORCH),--system-site-packages) $(VENV) >>.cache/setup.log 2>&1 || { cat .cache/setup.log; exit 2; }
	$(if $(SYSTEM_TORCH),,$(call install,torch $(TORCH): the largest part,$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)))
	$(call install,laconic and what the demo needs,-e '.[lab]')
	@touch $@

# What the tests need beside it, with the Triton that this torch goes with.
$(VENV)/ready: $(VENV)/base
	$(call install,what the tests need: linters$(comma) frameworks$(comma) engines,triton==$(TRITON) -e '.[lab$(comma)$(EXTRAS)]')
	@touch $@

demo: $(VENV)/base
	@mkdir -p $(TMPDIR)
	@$(BIN)/laconic demo

# Kernels are compiled while types are checked, each on one core: else all processes that meet a kernel first compile it.
# Then four files at a time on two cores, in the order of their names: tests of real processes mostly wait, those of codecs
# compute, and side by side they take less than one after the other, as they would by the number of their tests. MPI's
# ranks wait by spinning, and would hold up whatever runs beside them.
test: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	@$(MAKE) --no-print-directory -j 2 check kernels
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m 'not slow and not alone'
	$(BIN)/python -m pytest -m 'alone and not slow'

slow: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/python -m pytest -m slow

# The tests draw the same examples in every run. Here chance looks for others, for MINUTES minutes.
fuzz: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/python -m benchmarks fuzz --minutes $(MINUTES)

soak: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/python -m benchmarks soak --kills 1000 --seed 1 --output .cache/soak.json

# Kills, stops, cuts, full disks, strangers, damaged and forged files, through every door, at every phase; docs/reference/faults.md.
chaos: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/python -m benchmarks chaos --minutes 18 --output benchmarks/results/chaos.json

check: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/ruff check .
	$(BIN)/mypy

kernels: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	@$(BIN)/laconic warm >/dev/null

bench: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/laconic bench codecs
	$(BIN)/python -m benchmarks approximation --samples 2500000 --plot .cache/approximation.html
	$(BIN)/laconic bench collectives -n 4

# The site is built from copies, so that links between pages, examples and results are the same here and there.
docs: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	rm -rf .cache/site-source && mkdir -p .cache/site-source/benchmarks
	cp -r README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md LICENSE docs examples .cache/site-source
	cp -r benchmarks/results .cache/site-source/benchmarks
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site is in .cache/site: open .cache/site/index.html"

# Pictures of what the commands draw, for docs/research/gallery.md.
gallery: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/python -m benchmarks gallery

# The wheel in an empty environment for every supported Python found, or for VERSIONS=3.12,3.13; each downloads torch.
smoke: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	$(BIN)/python tests/smoke.py --torch $(TORCH) $(if $(VERSIONS),--versions $(VERSIONS))

# The wheel in dist/, the same bytes from the same commit: times in it are the commit's.
wheel: $(VENV)/ready
	@mkdir -p $(TMPDIR)
	rm -rf build dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/twine check --strict dist/*.whl
	@sha256sum dist/*.whl

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
