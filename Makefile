# `make demo` and `make test` are all the set-up on a fresh machine with Python 3.11 or later and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test test-all check format bench clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/calc_plain/demo.py

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

test: check
	$(BIN)/python -m pytest -n 2

# Also what is slow: many seeds, long chaos, real engines. The last result is kept under results/.
test-all: check
	mkdir -p results
	$(BIN)/python -m pytest -n 2 -m 'slow or not slow' --hypothesis-profile=random --junit-xml=results/test-all.xml

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/gateway.py
	$(BIN)/python benchmarks/workers.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/loop.py
	$(BIN)/python benchmarks/tree.py
	$(BIN)/python benchmarks/loss_memory.py
	$(BIN)/python benchmarks/credit.py

clean:
	rm -rf $(VENV) .bench build dist
