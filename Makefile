# Each target sets up what it needs in .venv and leaves alone what is there; see scripts/setup_venv.sh.
#
#   make test                                the short suite, with two workers more than cores, at most eight
#   make test ARGS="tests/ops -k cosine"     in one process: ARGS goes to pytest
#   PYTHON, EECORE_TORCH, EECORE_CUDA, EECORE_CUDA_ARCHS, MAX_JOBS are heeded

SHELL := /bin/bash
# Each worker and each command that tests start would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help demo test test-all quick fuzz sanitize soak same-text lint format docs bench clean

ARGS ?=
MINUTES ?= 10
STEPS ?= 1000000
REQUESTS ?= 10000
# A worker that runs out of tests takes over those of another.
SIDE_BY_SIDE := -n auto --dist worksteal
SETUP := scripts/setup_venv.sh
PYTHON_IN_VENV := .venv/bin/python
CXX_SOURCES = $$(git ls-files --cached --others --exclude-standard '*.cpp' '*.h' '*.cu' '*.cuh')

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /make \1\t/' | expand -t 16

demo:  ## the shipped model in its modes, downloads none; ARGS=--chat adds SmolLM2
	@$(SETUP)
	@$(PYTHON_IN_VENV) scripts/demo.py $(ARGS)

test:  ## the short suite: some six minutes on two cores
	@$(SETUP) test
	@$(if $(ARGS),,$(PYTHON_IN_VENV) tests/emulated.py)
	@OMP_WAIT_POLICY=passive $(PYTHON_IN_VENV) -m pytest $(or $(ARGS),$(SIDE_BY_SIDE))

test-all:  ## all tests: every case of every op, slow ones, other compilers' targets
	@$(MAKE) --no-print-directory test ARGS="--all $(or $(ARGS),$(SIDE_BY_SIDE))"

quick:  ## tests of everything in a minute, while you work on it
	@$(SETUP) test
	@OMP_WAIT_POLICY=passive $(PYTHON_IN_VENV) -m pytest -m quick $(SIDE_BY_SIDE) $(ARGS)

fuzz:  ## hostile inputs of every kind, with new seeds, for MINUTES=10
	@$(SETUP) test
	@$(PYTHON_IN_VENV) tests/fuzz/campaign.py --minutes $(MINUTES) $(ARGS)

sanitize:  ## ops under AddressSanitizer and UBSan: their tests, then fuzzing for MINUTES=10
	@$(SETUP) test
	@$(PYTHON_IN_VENV) tests/sanitized.py -m pytest --all tests/ops tests/across_ops/test_op_refusals.py \
	  tests/across_ops/test_rows_alone.py tests/across_ops/test_random_calls.py -k "not emulated" -p no:cacheprovider $(ARGS)
	@$(PYTHON_IN_VENV) tests/sanitized.py tests/fuzz/campaign.py ops --minutes $(MINUTES)

soak:  ## an engine for STEPS=1000000 steps: pages and memory stay where they are
	@$(SETUP) test
	@$(PYTHON_IN_VENV) tests/fuzz/soak.py --steps $(STEPS) $(ARGS)

same-text:  ## REQUESTS=10000 requests alone and in random company, in five number formats: no text may differ
	@$(SETUP)
	@for format in "--dtype float32" "--dtype bfloat16" "--weights int8" "--weights int4" "--kv-cache-dtype fp8"; do \
	  OMP_WAIT_POLICY=passive $(PYTHON_IN_VENV) -m eecore verify --minutes 0 --requests $$(($(REQUESTS) / 5)) $$format $(ARGS) || exit; \
	done

lint:  ## ruff, mypy and clang-format: changes nothing
	@$(SETUP) lint
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m ruff format --check .
	@$(PYTHON_IN_VENV) -m mypy
	@.venv/bin/clang-format --dry-run -Werror $(CXX_SOURCES)
	@echo "clang-format: nothing to change"

format:  ## rewrite the sources as make lint wants them
	@$(SETUP) lint
	@$(PYTHON_IN_VENV) -m ruff check --fix .
	@$(PYTHON_IN_VENV) -m ruff format .
	@.venv/bin/clang-format -i $(CXX_SOURCES)

docs: export NO_MKDOCS_2_WARNING = 1
docs:  ## the manual, into build/site: a link that leads nowhere fails; ARGS=serve shows it
	@$(SETUP) docs
	@$(PYTHON_IN_VENV) -m mkdocs $(or $(ARGS),build) --strict

bench:  ## microbenchmarks of the ops, into bench/results/ops.json and its tables; ARGS="-k accept_mask": these alone
	@$(SETUP) test
	@mkdir -p build
	@$(PYTHON_IN_VENV) -m pytest bench/ops --benchmark-columns=min,median,rounds \
	  --benchmark-sort=fullname --benchmark-max-time=0.3 --benchmark-json=build/bench.json $(ARGS)
	@$(PYTHON_IN_VENV) -m bench ops-table build/bench.json

clean:  ## remove .venv, .peers, build products and caches
	rm -rf .venv .peers build dist .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis
	rm -rf python/*.egg-info python/eecore/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
