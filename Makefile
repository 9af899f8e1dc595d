# `make train` and `make test` need nothing but Python >= 3.11 and make: each creates .venv, installs, and does its job.
PYTHON ?= python3
WORKDIR ?= runs/tiny
ARGS ?=
BIN := .venv/bin

.PHONY: train demo test test-slow lint clean

train: .venv/installed
	$(BIN)/fbt train --config=configs/tiny.py --workdir=$(WORKDIR) $(ARGS)

demo: .venv/installed
	$(BIN)/python launch/word_problem.py --workdir=runs/demo $(ARGS)

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)
	@echo 'left out: the slow tests (make test-slow)'

test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
