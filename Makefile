# `make` alone lists the targets. A fresh machine needs make and Python >= 3.11, no more.

PYTHON ?= python3
VENV ?= .venv
CASES ?= 300
SEED ?= 0
REPORT ?= report.jsonl
BATCHES ?= 1000
JOBS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPING := $(VENV)/.developing
ENGINE := build/engines/sglang
ENGINE_CASES ?= 100

# Several threads only slow down tensors as small as those of a case.
export OMP_NUM_THREADS ?= 1
# What dozens of processes import is compiled once, wherever else Python may be told not to keep it.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help conformance test test-all lint example engine mutants opinfo bench soak clean

help: ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do \
		printf '  make %-12s %s\n' "$$target" "$$text"; done

conformance: $(INSTALLED) ## Ask every built-in backend on the fakes; print the matrix, write REPORT=report.jsonl
	@rm -f $(REPORT)
	$(BIN)/conformance run --cases $(CASES) --seed $(SEED) --report $(REPORT)

test: $(INSTALLED) ## Run the tests that need no GPU (pytest -m cpu), JOBS=2 files at a time
	$(BIN)/python -m pytest -m cpu -n $(JOBS) --dist loadfile

test-all: $(INSTALLED) ## Run also those that take too long for every change
	$(BIN)/python -m pytest -m 'cpu or slow' -n $(JOBS) --dist loadfile

lint: $(DEVELOPING) ## Check style, format, types and which package imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

example: $(INSTALLED) ## Install the wheel and examples/my_engine as a user would, and test that engine
	PYTHON=$(BIN)/python examples/as_a_user.sh

engine: $(INSTALLED) $(ENGINE)/.installed ## Install SGLang 0.5.23 beside and ask its own attention backends, unchanged
	$(BIN)/conformance run --engine-path $(ENGINE) --device-sim full --cases $(ENGINE_CASES) --seed $(SEED) \
		--backend backends.engines.sglang:FlashInfer --backend backends.engines.sglang:FlashAttention
	$(BIN)/python -m pytest -q -m engine conformance/test_engines.py

mutants: $(INSTALLED) ## Check that every mutant is caught by the check that claims it
	$(BIN)/conformance mutants

opinfo: $(INSTALLED) ## Put all of torch's own sample inputs through the full simulated device
	$(BIN)/python -m fakes.cuda.full.opinfo

bench: $(INSTALLED) ## Measure speed and what each value kind detects
	$(BIN)/conformance bench

soak: $(INSTALLED) ## Run 20,000 random cases and sessions per backend; with TRACES=folder also BATCHES=1000 of each trace in it
	$(BIN)/conformance run --cases 20000 --sessions 20000 --seed $(SEED)
	$(if $(TRACES),set -e; for trace in $(wildcard $(TRACES)/*.csv $(TRACES)/*.jsonl); do \
		$(BIN)/conformance run --trace "$$trace" --page-size 16 --batches $(BATCHES); done)

clean: ## Remove what the targets above made
	rm -rf $(VENV) build dist *.egg-info $(REPORT) .hypothesis .pytest_cache .ruff_cache .import_linter_cache

# Setting up happens again only when one of these files changes, or when a run of it broke off. What is imported is
# compiled here; all of torch would take half a minute.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt pip expecttest -e '.[full,parallel,upgrade]'
	@$(BIN)/conformance backends >/dev/null
	@touch $@

$(ENGINE)/.installed: backends/engines/sglang.txt | $(INSTALLED)
	@rm -rf $(ENGINE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(ENGINE) \
		-r backends/engines/sglang.txt
	@touch $@

$(DEVELOPING): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --group dev
	@touch $@
