# Each target works alone on a fresh machine. TORCH is what pip is asked for, for example
# `make test TORCH=torch==2.14.1`; ARGS goes to the command that the target runs. WORKERS is how
# many processes share the tests; `make test WORKERS=0 ARGS='-s -k name'` runs in one.
TORCH ?= torch==2.13.0
PYTHON ?= python3
ARGS ?=
WORKERS ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Another TORCH or PYTHON is another key, hence a fresh environment.
KEY := $(shell printf '%s' '$(PYTHON) $(TORCH)' | cksum | cut -d' ' -f1)

.PHONY: help demo test lint clean

help:
	@echo "make demo | test | lint | clean   [TORCH=$(TORCH)] [PYTHON=$(PYTHON)] [WORKERS=$(WORKERS)] [ARGS=...]"

demo: .venv/.installed
	$(BIN)/fsdp-fx demo $(ARGS)

test: .venv/.installed
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

lint: .venv/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf .venv

.venv/.torch-$(KEY):
	$(PYTHON) -m venv --clear .venv
	$(PIP) install '$(TORCH)'
	@touch $@

.venv/.installed: .venv/.torch-$(KEY) pyproject.toml
	$(PIP) install -e '.[test]'
	@touch $@
