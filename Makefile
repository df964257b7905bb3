# Works with the make 3.81 of a stock Mac.
PY := .venv/bin/python
export PYTHONPATH := gym:.:tests

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## make .venv with all dependencies
	@sh tools/setup.sh

developer: setup  ## install what checks, docs and tests use as well
	@sh tools/developer.sh

demo: setup  ## fine-tune the bundled model on two local ranks, WER before and after
	@$(PY) cli_typer.py demo

test: developer  ## all quick tests
	@sh tools/system_packages.sh
	@sh tools/runtimes.sh
	$(PY) -m pytest -n 3 --dist loadgroup -m "not slow" --durations=15

test-long: developer  ## the long tests
	@sh tools/system_packages.sh
	@sh tools/runtimes.sh
	FUZZ_EXAMPLES=500 FUZZ_FAULT_RUNS=300 $(PY) -m pytest -n 3 --dist loadgroup -m slow --durations=15

test-all: test test-long  ## every test

fuzz: developer  ## 5,000 runs with random faults, and 100,000 damaged files for those who read them (half an hour)
	FUZZ_EXAMPLES=4000 FUZZ_FAULT_RUNS=5000 $(PY) -m pytest -q -n 2 --timeout=3600 tests/exogym/test_exogym_faults.py tests/fuzz

check: developer  ## lint, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: developer  ## build the pages of docs/ and the Python API as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

reference: developer  ## write docs/configuration.md and docs/messages.md from the source
	$(PY) tools/write_reference.py

resolve: developer  ## whether all dependencies have wheels for a Mac, by the package index
	$(PY) tools/check_resolution.py

lab: setup  ## three hosts on this Linux machine (root); `make lab-down` removes them
	@sh tools/system_packages.sh
	$(PY) -m lab up
	@echo "For example: $(PY) -m lab exec h1 -- hostname"

lab-down: setup  ## remove the lab
	$(PY) -m lab down

bench: developer  ## list the benchmarks
	@ls benchmarks/*.py

.DEFAULT_GOAL := help
.PHONY: help setup developer demo test test-long test-all fuzz check docs reference resolve lab lab-down bench
