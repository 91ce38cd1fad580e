# Two commands do everything on a fresh machine (git, make, python3 >= 3.11, pip): `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
WORKERS ?= 2

.PHONY: help demo serve test triton check setup clean

help:  ## Show the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.installed  ## Build, serve and ask a small model, then stop
	@$(BIN)/stoker demo

serve: $(VENV)/.installed  ## The same, with the server left running
	@$(BIN)/stoker demo --serve

test: $(VENV)/.installed-dev  ## The whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

triton: $(VENV)/.installed-dev  ## A real Triton server with the repository REPO (stoker export triton ENGINE REPO)
	$(BIN)/python scripts/real_triton.py $(REPO)

check: $(VENV)/.installed-dev  ## Lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/.installed-dev  ## Everything that development needs, in .venv

clean:  ## Remove what these targets made here
	rm -rf $(VENV) .cache build dist src/*.egg-info

# Debian splits ensurepip off; pip can then install itself into the environment from outside.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Stoker needs python3 >= 3.11; name one: make PYTHON=python3.12 ...")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) 2>/dev/null \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

# torch first and by itself, so that pip takes the build that is provided for this machine, be it for a GPU or for a CPU.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "installing torch"
	@$(PIP) $$(grep '^torch==' constraints.txt)
	@touch $@

$(VENV)/.installed: constraints.txt pyproject.toml $(VENV)/.torch
	@echo "installing Stoker"
	@$(PIP) -c constraints.txt -e .
	@touch $@

# triton: the one torch brought; else the one the kernels were tested with, for the interpreter and for compiling without a GPU.
$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what development needs"
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.6.0
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@
