# One command per job; `make help` lists them. Everything lives in $(VENV), which is made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -q
# Images of containers often set it. Every process would then compile every module that it imports: a rank takes 28
# instead of 10 CPU seconds to start.
unexport PYTHONDONTWRITEBYTECODE
# Extras of setup.cfg that fit this machine; `make install EXTRAS=hf,train` takes others.
GPU := $(shell command -v nvidia-smi)
ifneq ($(GPU),)
EXTRAS ?= gpu,train,hf,plot,slurm,serve,shell
else
EXTRAS ?= hf,plot,slurm,serve,shell
endif
# PyPI has no CPU builds of torch for Linux.
CPU_BUILDS := https://download.pytorch.org/whl/cpu
NPROC ?= 2
# Steps of the demo; 400 are those of configs/demo.yaml.
STEPS ?= 120

.DEFAULT_GOAL := help
.PHONY: help install dev demo test test-all test-others test-slurm lint format gpu-check clean slurm-up slurm-down

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/installed ## make .venv and install Megakernel with what fits this machine

dev: $(VENV)/installed-dev ## the same with what tests and lint need

demo: $(VENV)/installed ## prepare text, pretrain a small model on 2 processes, write a sample; STEPS=400 trains longer
	$(BIN)/megakernel prepare --source stdlib --tokenizer byte --out data/stdlib
	$(BIN)/megakernel pretrain configs/demo.yaml training.steps=$(STEPS) --nproc $(NPROC)
	$(BIN)/megakernel generate runs/demo --prompt 'def ' --max-new-tokens 400 > runs/demo/sample.txt
	@echo; cat runs/demo/sample.txt; echo
	@echo "That sample is in runs/demo/sample.txt. To see the curves:"
	@echo "  $(BIN)/tensorboard --logdir runs"

test: $(VENV)/installed-dev ## run the first tier of the tests; PYTEST_ARGS=tests/unit runs a part, both tiers of it
ifdef PYTEST_ARGS
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	@$(TESTS) TIER='-m "not second"'
endif

test-all: $(VENV)/installed-dev ## run both tiers: the whole suite
	@$(TESTS)

# Slurm's tests mostly wait, so they run beside the others, whose folders with the longest files come first.
TESTS := OMP_NUM_THREADS=1 $(MAKE) --no-print-directory --keep-going --jobs=2 test-slurm test-others
OTHERS := tests/distributed tests/e2e tests/kernels tests/unit
PYTEST := $(BIN)/python -m pytest --durations=10

test-others:
	@$(PYTEST) $(TIER) -n 2 --dist loadfile --no-loadscope-reorder $(OTHERS)

test-slurm:
	@log=$$(mktemp) status=0; $(PYTEST) $(TIER) tests/slurm >$$log 2>&1 || status=$$?; \
	cat $$log; rm $$log; exit $$status

lint: $(VENV)/installed-dev ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

gpu-check: $(VENV)/installed-dev ## on a GPU: a step's profile, are the kernels right, how fast, how fast is training; 4 x 9 minutes
	@for part in profile correctness speed training; do $(BIN)/python -m benchmarks.gpu_check $$part || status=$$?; done; \
	exit $${status:-0}

format: $(VENV)/installed-dev ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

slurm-up: ## a Slurm cluster of two nodes on this machine (root, slurm-wlm and munge)
	@slurm/local_cluster start

slurm-down: ## end it, and the jobs in it
	@slurm/local_cluster stop

clean: ## remove .venv and caches; data/ and runs/ stay
	rm -rf $(VENV) build *.egg-info .ruff_cache .mypy_cache .pytest_cache .import_linter_cache .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=python3.11 ..." if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -c 'import ensurepip' || { echo "venv is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Torch comes first. Without a GPU its CPU build takes a tenth of the disk.
$(VENV)/installed: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing $(TORCH) and megakernel[$(EXTRAS)]"
	@if [ -n '$(GPU)' ]; then $(INSTALL) '$(TORCH)'; else \
		$(INSTALL) '$(TORCH)+cpu' 2>/dev/null || \
		$(INSTALL) '$(TORCH)+cpu' --extra-index-url $(CPU_BUILDS) 2>/dev/null || { \
		echo "pip finds no CPU build of torch; taking the default one, which may bring CUDA (several GB)"; \
		$(INSTALL) '$(TORCH)'; }; fi
	DS_BUILD_OPS=0 $(INSTALL) -e '.[$(EXTRAS)]' -c constraints.txt
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	DS_BUILD_OPS=0 $(INSTALL) -e '.[dev]' -c constraints.txt
	@touch $@
