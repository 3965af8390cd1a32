# Every target sets up what it needs, once. `make help` lists them.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
# One word of the shell, whatever is in it.
quoted = '$(subst ','\'',$(1))'
# Another torch sets the environment up anew. Its checksum stands for it, since a requirement may
# hold what neither make nor a file name allows.
STAMP := $(VENV)/.ready-$(shell printf '%s' $(call quoted,$(TORCH)) | cksum | tr ' ' -)

.PHONY: help demo test lint bench-gpu clean setup
.DEFAULT_GOAL := help

help:
	@echo "make demo        replay a chat workload through the whole system (under a minute)"
	@echo "make test        run the tests, here and then on the fake device"
	@echo "make lint        ruff and mypy"
	@echo "make bench-gpu   measure an accelerator; skipped, with the reason, where there is none"
	@echo "make clean       remove everything that was set up or built"
	@echo "TORCH='torch==2.13.0' chooses another torch, PYTHON=python3.12 another Python"

setup: $(STAMP)

# torch is pinned in the same command, so that nothing else chooses another build of it. A change of
# these files sets the environment up anew, too.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.ready-*
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(call quoted,$(TORCH)) -e ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/kvoffload replay

test: $(STAMP)
	$(BIN)/pytest
	$(BIN)/pytest --kv-on fake

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# BENCH='--out docs/measurements/h200.md' adds options.
bench-gpu: $(STAMP)
	$(BIN)/kvoffload bench gpu --or-skip $(BENCH)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
