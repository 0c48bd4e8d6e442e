# Every target makes the environment first, or finds it made: .venv, or with JAX=0.12 one beside it.
# ENV_PYTHON=python3 uses your own instead.
JAX := 0.11
ENV_PYTHON ?= .venv$(if $(filter-out 0.11,$(JAX)),-jax$(JAX))/bin/python
BIN := $(if $(findstring /,$(ENV_PYTHON)),$(dir $(ENV_PYTHON)))
SETUP := $(if $(filter file,$(origin ENV_PYTHON)),setup)
ifeq ($(SETUP)$(origin JAX),command line)
$(error JAX=$(JAX) names an environment that make sets up, ENV_PYTHON=$(ENV_PYTHON) your own: give one of them)
endif
PYTEST := $(ENV_PYTHON) -m pytest
# Whole files go to one worker, because tests of a file share what they compile; in the order of
# their names, which begins with the longest, those of processes, and ends with short ones. One file
# alone starts soonest without workers.
FILES := $(strip $(foreach word,$(ARGS),$(if $(findstring .py,$(word)),$(word))))
PARALLEL ?= $(if $(filter 1,$(words $(FILES))),-n 0,-n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder)
# Of a GPU's tests no worker need import all other tests.
GPU_FILES = $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)
# And of files that have no others, none of a machine without a GPU.
NO_GPU = --ignore-glob='*_gpu.py'
# A worker is a process of one core: NumPy's products would take all cores in each of them. A group's
# tests go to one worker: what needs several GB is not in memory twice.
ON_GPU = JAX_PLATFORMS=cuda,cpu OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
	$(PYTEST) -n logical --maxprocesses 14 --dist loadgroup
# A suite is a hundred processes: without bytecode each compiles all that it imports, which takes
# thrice as long as importing it.
unexport PYTHONDONTWRITEBYTECODE
# Faults at a time: each is a job of two or more processes.
FAULT_JOBS ?= $(shell n=$$(nproc); echo $$(( n > 3 ? n / 3 : 1 )))

.DEFAULT_GOAL := help
.PHONY: help setup train serve test test-full nightly numerics fuzz test-gpu test-gpu-full check format docs lock clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  ARGS=... goes to the command; FLAVOUR=cpu|cuda|auto and BASE_PYTHON=... to the set-up;"
	@echo "  JAX=0.12 runs any of them with JAX 0.12, in an environment of its own"

setup: ## Make .venv from the lock: CUDA where there is an NVIDIA GPU, else CPU
	@python3 tools/bootstrap.py --jax $(JAX) $(if $(FLAVOUR),--flavour $(FLAVOUR)) $(if $(BASE_PYTHON),--python $(BASE_PYTHON))

train: $(SETUP) ## Train a language model: make train ARGS="small --steps 100"
	$(BIN)jaxinfra train $(ARGS)

serve: $(SETUP) ## Serve a model, or what make train leaves: make serve ARGS="runs/small-1 --port 8000"
	$(BIN)jaxinfra serve $(ARGS)

test: $(SETUP) ## The tests, without the slow ones
	$(PYTEST) $(PARALLEL) -m "not slow and not gpu" $(NO_GPU) $(ARGS)

test-full: $(SETUP) ## The tests, with the slow ones
	$(PYTEST) $(PARALLEL) -m "not gpu" $(NO_GPU) $(ARGS)

nightly: $(SETUP) ## Every fault, all other tests with 60 random kills, numerics, fuzzer, newer JAX
	$(ENV_PYTHON) -m jaxinfra faults --all --jobs $(FAULT_JOBS)
	$(PYTEST) $(PARALLEL) -m "not gpu" --deselect tests/e2e/test_launch.py::test_fault $(ARGS)
	$(ENV_PYTHON) tools/numerics.py
	$(ENV_PYTHON) tools/fuzz.py
	$(if $(SETUP),$(MAKE) test JAX=0.12)

numerics: $(SETUP) ## The numerical tests on every instruction set of this CPU, threads, and 20 more seeds
	$(ENV_PYTHON) tools/numerics.py $(ARGS)

fuzz: $(SETUP) ## 2,000 spoilt files and command lines, given to every command: make fuzz ARGS="--seed 3"
	$(ENV_PYTHON) tools/fuzz.py $(ARGS)

test-gpu: $(SETUP) ## The tests that need an NVIDIA Hopper GPU, without the slow ones
	$(ON_GPU) -m "gpu and not slow" $(if $(FILES),,$(GPU_FILES)) $(ARGS)

test-gpu-full: $(SETUP) ## The tests that need an NVIDIA Hopper GPU, with the slow ones
	$(ON_GPU) -m gpu $(if $(FILES),,$(GPU_FILES)) $(ARGS)

check: $(SETUP) ## Formatter, linter, type checker, import contract and words
	$(BIN)ruff format --check .
	$(BIN)ruff check .
	$(BIN)pyrefly check
	$(BIN)lint-imports
	$(ENV_PYTHON) tools/words.py

format: $(SETUP) ## Format, and fix what the linter can
	$(BIN)ruff format .
	$(BIN)ruff check --fix .

docs: $(SETUP) ## The documentation site, into build/site
	$(ENV_PYTHON) tools/docs_site.py

lock: ## Renew tools/requirements/*.lock: ARGS=--upgrade for newer versions
	@python3 tools/lock.py $(ARGS)

clean: ## Remove the environment and every cache; runs/ stays
	rm -rf .venv .venv-docs .venv-jax* .bootstrap build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache .jax_cache
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
