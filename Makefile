# SPDX-License-Identifier: Apache-2.0
# Needs make, Python 3.11 or newer and a package index; everything else is made here. `make help` lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

HARNESS_VENVS := .venv-harness .venv-harness-crewai

# The environments are installed without compiled files: what is imported is compiled once, not in each process.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv harness-venvs $(HARNESS_VENVS) test lint pytest demo bench figures test-compat seams clean
.DEFAULT_GOAL := help

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: ## .venv with vLLM 0.32 for CPUs, the tools and this package
	@$(PYTHON) scripts/setup_venv.py $(VENV) requirements/cpu-0.32.txt requirements/dev.txt

harness-venvs: $(HARNESS_VENVS) ## .venv-harness and .venv-harness-crewai: the agent frameworks, without vLLM and torch

$(HARNESS_VENVS): .venv-%:
	@$(PYTHON) scripts/setup_venv.py $@ requirements/$*.txt

test: ## lint, types and all tests
	@# Packages are downloaded and unpacked side by side.
	@$(MAKE) --no-print-directory -j3 venv harness-venvs
	@# mypy is the work of one core.
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: venv harness-venvs
	@# Unit tests wait more than they compute; those that start servers need all cores. Both run, whatever becomes of the first.
	$(BIN)/python -m pytest -q -m "not e2e" --ignore tests/e2e -n 3 --dist worksteal; unit=$$?; \
	$(BIN)/python -m pytest -q tests/e2e && exit $$unit

lint: venv harness-venvs ## ruff and mypy
	$(BIN)/ruff check .
	@# The sources lie where pyproject.toml's package-dir says; mypy needs them where they are imported.
	@rm -rf build/types && mkdir -p build/types/vllm_lifetime
	@ln -sfn $(addprefix ../../../,$(wildcard vllm_lifetime/*) connectors patches) build/types/vllm_lifetime/
	$(BIN)/mypy build/types/vllm_lifetime scripts
	@# Each adapter where its framework is.
	@for module in openai_agents langchain autogen; do \
	  (cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --python-executable ../../.venv-harness/bin/python \
	    vllm_lifetime/harness/$$module.py) || exit 1; done
	@cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml \
	  --python-executable ../../.venv-harness-crewai/bin/python vllm_lifetime/harness/crewai.py

demo: venv ## the demonstration, with its figures
	$(BIN)/python -m benchmarks.demo

bench: venv ## compare with stock vLLM, LMCache and plain LRU (50 minutes; the machine should be quiet); BENCH=--quick: 6 minutes
	@$(PYTHON) scripts/setup_venv.py .venv-lmcache requirements/cpu-0.32.txt requirements/lmcache.txt
	$(BIN)/python -m benchmarks.comparison run $(BENCH)

figures: venv ## measure everything that the documentation quotes (50 minutes; the machine should be quiet)
	$(BIN)/python -m benchmarks.block_pool --json build/block_pool.json
	$(BIN)/python -m benchmarks.host_copies --json build/host_copies.json
	$(BIN)/python -m benchmarks.flash_device --cache warm --json build/flash_warm.json
	$(BIN)/python -m benchmarks.flash_device --cache cold --directory build --working-set-mib 64 --json build/flash_cold.json
	$(BIN)/python -m benchmarks.no_hints
	$(BIN)/python -m benchmarks.boundary_load --events-per-post 10 --model-layers 8 --model-hidden 768 --repeats 2 --json build/boundary_load_batched.json
	$(BIN)/python -m benchmarks.boundary_load --events-per-post 10 --model-layers 8 --model-hidden 768 --seconds 8 --repeats 13 --json build/boundary_load_short.json
	$(BIN)/python -m benchmarks.decision_costs --json build/decision_costs.json
	$(BIN)/python -m benchmarks.rank_cost --json build/rank_cost.json
	$(BIN)/python -m benchmarks.placement --json build/placement.json
	$(BIN)/python -m benchmarks.demo
	$(BIN)/python -m scripts.update_figures

test-compat: ## end-to-end tests on vLLM 0.31, in .venv-0.31
	@$(PYTHON) scripts/setup_venv.py .venv-0.31 requirements/cpu-0.31.txt requirements/dev.txt
	.venv-0.31/bin/python -m pytest -q tests/e2e

seams: venv ## look for every seam of scripts/seams.py in the vLLM of .venv
	$(BIN)/python -m scripts.check_seams

clean: ## remove what was made, environments included
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis
