# `make train` and `make test` need nothing but python3 (3.11 to 3.13) and make: they install into .venv by themselves.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= gpt_python_docs
ARGS ?=
BIN := $(VENV)/bin

.PHONY: train test lint clean

train: $(VENV)/installed
	$(BIN)/python train.py --config $(CONFIG) $(ARGS)

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "Python 3.11 to 3.13 is needed, $(PYTHON) is $$($(PYTHON) --version); try make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) (the first time takes a minute or two)"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/installed-test: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) with what the tests need (the first time takes a minute or two)"
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV)
