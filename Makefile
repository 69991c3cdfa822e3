# Everything works on a fresh checkout with Python >= 3.11, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build of torch by version: without it pip may choose a CUDA build of 5 GB.
TORCH ?= torch==2.13.0
EXTRAS ?= diffusers,ocr,track,dev
# Threads that spin while they wait slow everything on a busy machine; tests use one thread each.
export OMP_WAIT_POLICY ?= PASSIVE
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: install quickstart test lint types bench evidence clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "stepcredit needs Python >= 3.11; say which with: make install PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[$(EXTRAS)]"
	@touch $@

quickstart: install
	$(BIN)/stepcredit train spell-stepwise --iterations 12 --eval-every 4

test: install lint types
	$(TEST_ENV) $(BIN)/pytest -n 2

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

bench: install
	$(BIN)/python benchmarks/iteration.py

evidence: install
	$(BIN)/python benchmarks/papers.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
