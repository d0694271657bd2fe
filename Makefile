PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test lint format clean

run: .venv/ready  ## train, prune and compare a small network; about a minute after installation
	$(BIN)/hap demo

test: .venv/ready lint  ## everything that CI checks
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf .venv runs build
