# Two commands do everything on a fresh machine (git, make, python3 >= 3.11, pip): `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
WORKERS ?= 2
MINUTES ?= 2
SEED ?= 0
RUNS ?= 3000
# Python keeps compiled modules, also where the environment forbids it: without them, each run and each process that a test starts compiles again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo serve test test-slow test-cluster test-fast chaos fuzz coverage bounds triton check check-deploy docs wheel setup clean

# Tests without a model that is trained or downloaded, and without processes that serve one. FAST_SKIPS are files of these folders that take long.
FAST := tests/test_architecture.py tests/test_vocabulary.py tests/project tests/unit tests/base tests/engine tests/deploy \
  tests/frontend tests/server tests/lmi tests/api/test_llm_settings.py tests/cli/test_documentation.py tests/cli/test_command_table.py
FAST_SKIPS := tests/server/test_server_processes.py tests/server/test_server_hostile_http.py tests/frontend/test_chat_template.py \
  tests/frontend/test_detokenizer.py tests/frontend/test_beam_search.py tests/frontend/test_executor_transport.py \
  tests/server/test_executor_restarts.py tests/server/test_monitoring.py tests/server/test_server_drain.py tests/deploy/test_draft_models.py \
  tests/unit/test_speculation_fuzz.py tests/frontend/test_llm_start.py tests/deploy/test_triton_lint_fill.py tests/deploy/test_sources_remote.py tests/engine/test_engine_cache.py
# The tests of the packages that [tool.coverage.run] in pyproject.toml names.
COVERAGE := tests/unit tests/base tests/deploy tests/frontend tests/server tests/lmi tests/console tests/triton tests/truss tests/runtime/test_executor_loop.py \
  -m "not triton and not truss and not slow"

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.installed  ## Build, serve and ask a small model, then stop
	@$(BIN)/stoker demo

serve: $(VENV)/.installed  ## The same, with the server left running
	@$(BIN)/stoker demo --serve

test: $(VENV)/.installed-dev  ## The test suite, except test-slow and test-cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 -m "not slow" --ignore=tests/cluster

test-slow: $(VENV)/.installed-dev  ## Kernels on an emulated device and compiled for GPUs, accuracy of quantization, memory of builds
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 -m slow --ignore=tests/cluster

test-cluster: $(VENV)/.installed-dev  ## Several hosts, Slurm, MPI and Ray: needs root; installs slurm-wlm, munge and iproute2 with apt if it can
	sh scripts/cluster_packages.sh
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10 tests/cluster

test-fast: $(VENV)/.installed-dev  ## Unit and contract tests, 90 s on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(FAST) $(FAST_SKIPS:%=--ignore=%)

chaos: $(VENV)/.installed-dev  ## All protocols at full load while processes and resources fail; MINUTES=2
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/chaos --minutes $(MINUTES) --seed $(SEED)

fuzz: $(VENV)/.installed-fuzz  ## Fuzz the readers of files and requests, /openapi.json and guided decoding; RUNS=3000 inputs for each reader
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py all --runs $(RUNS)
	OMP_NUM_THREADS=1 STOKER_LOG=error $(BIN)/python tests/fuzz/openapi.py --examples $$(($(RUNS) / 600))
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/grammars.py --count $$(($(RUNS) / 50))

coverage: $(VENV)/.installed-dev  ## Line coverage of the torch-free packages; fails below the minimum in pyproject.toml
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -n $(WORKERS) --dist worksteal $(COVERAGE)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

bounds: $(VENV)/.installed-dev  ## A smoke test with the lowest and the highest allowed dependencies (downloads packages)
	$(BIN)/python scripts/bounds.py

triton: $(VENV)/.installed-dev  ## A real Triton server with the repository REPO (stoker export triton ENGINE REPO)
	$(BIN)/python scripts/real_triton.py $(REPO)

check: $(VENV)/.installed-dev  ## Lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check-deploy: $(VENV)/.installed-deploy  ## Lint the Dockerfile, compose files, systemd unit, Helm chart and workflows
	$(BIN)/python scripts/check_deploy.py

docs: $(VENV)/.installed-docs  ## The documentation site, in build/site; fails at a broken link
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

wheel: $(VENV)/.installed-dev  ## The wheel of this version, in dist/
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation -w dist .
	@ls dist/stoker-$$($(BIN)/python -c 'import stoker; print(stoker.__version__)')-*.whl

setup: $(VENV)/.installed-dev  ## Everything that development needs, in .venv

clean:  ## Remove what these targets made here
	rm -rf $(VENV) .cache build dist src/*.egg-info

# Debian splits ensurepip off; pip can then install itself into the environment from outside.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Stoker needs python3 >= 3.11; name one: make PYTHON=python3.12 ...")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) 2>/dev/null \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

# torch first and by itself, so that pip takes the build that is provided for this machine, be it for a GPU or for a CPU. TORCH_INDEX_URL
# names another package index for it, such as the one with builds without CUDA (docs/installation.md).
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "installing torch"
	@$(PIP) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) $$(grep '^torch==' constraints.txt)
	@touch $@

$(VENV)/.installed: constraints.txt pyproject.toml $(VENV)/.torch
	@echo "installing Stoker"
	@$(PIP) -c constraints.txt -e .
	@touch $@

# triton: the one torch brought; else the one the kernels were tested with, for the interpreter and for compiling without a GPU.
# NIXL (59 MB): for the CUDA of the pinned torch, and without its dependencies, which are torch for CUDA and a second build of NIXL.
$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what development needs"
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.6.0
	@$(PIP) -c constraints.txt -e '.[dev]'
	@$(PIP) --no-deps $$(grep '^nixl' constraints.txt) || echo "NIXL cannot be installed: the tests of transfers over NIXL are skipped" >&2
	@touch $@

$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	@echo "installing the fuzzers"
	@$(PIP) -c constraints.txt -e '.[fuzz]'
	@touch $@

$(VENV)/.installed-deploy: $(VENV)/.installed-dev
	@echo "installing the linters of deploy/"
	@$(PIP) -c constraints.txt -e '.[deploy]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	@echo "installing what the documentation needs"
	@$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@
