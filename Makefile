# Each target sets up all that it needs first; `make setup` alone does only that.
#   make demo    the real SGLang, on this machine, serving through a CPU -> SSD -> Redis chain
#   make test    every test that this machine can run; ARGS="-k ssd" goes to pytest
#   make check   formatting, lint, types, import rules
#   make bench   the figures of docs/benchmarks.md, measured here

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# SGLang's CPU stand-ins for three GPU packages (see tests/support/sglang_cpu_shim/README.md).
SHIM := $(CURDIR)/tests/support/sglang_cpu_shim

.PHONY: setup demo test check bench format

setup:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV)

demo: setup
	@PYTHONPATH=$(SHIM) $(BIN)/flexkv demo --work .cache/demo $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/packaging -k import

format: setup
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# One script a question (benchmarks/): what each prints goes into docs/benchmarks.md, with the machine.
bench: setup
	@$(BIN)/python scripts/bench.py $(ARGS)
