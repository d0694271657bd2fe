PYTHON ?= python3
BIN := .venv/bin
PROCESSES ?= 1

.PHONY: run test fuzz zoo lint format clean

run: .venv/ready  ## train, prune and compare a small network; about a minute after installation
	$(BIN)/hap demo

test: .venv/ready lint  ## everything that CI checks
	$(BIN)/python -m pytest

fuzz: .venv/ready  ## check 2,000 random modules; a quarter of an hour on one core
	$(BIN)/python tests/fuzz.py --count 2000

zoo: .venv/ready  ## prune the models of other libraries listed in examples/zoo.txt; hours with PROCESSES=1
	$(BIN)/hap zoo examples/zoo.txt --processes $(PROCESSES) --seconds 200
	$(BIN)/python -m hap_reproduction.zoo_sweep.page

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: requirements.lock pyproject.toml reproduction/pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e reproduction
	touch $@

clean:
	rm -rf .venv runs build
