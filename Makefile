# `make train` and `make test` need nothing but python3 (3.11 to 3.13) and make: they install into .venv by themselves.
PYTHON ?= python3
CONFIG ?= gpt_python_docs
ARGS ?=
BIN := .venv/bin

.PHONY: train test lint clean

train: .venv/installed
	$(BIN)/python train.py --config $(CONFIG) $(ARGS)

test: .venv/installed-test
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "Python 3.11 to 3.13 is needed, $(PYTHON) is $$($(PYTHON) --version); try make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	@echo "installing into .venv (the first time takes a minute or two)"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/installed-test: pyproject.toml | .venv/bin/python
	@echo "installing into .venv with what the tests need (the first time takes a minute or two)"
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@ .venv/installed

clean:
	rm -rf .venv
