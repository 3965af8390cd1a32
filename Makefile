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

# vLLM brings a torch of its own, so it has an environment of its own.
VLLM_VENV ?= .venv-vllm
VLLM_PINS := requirements/vllm-cpu.txt requirements/vllm-test.txt
VLLM_STAMP := $(VLLM_VENV)/.ready
# What it takes: 2.5 GB installed, and as much again while pip unpacks.
VLLM_FREE_KB := 5000000

.PHONY: help demo test test-vllm lint bench-gpu clean setup
.DEFAULT_GOAL := help

help:
	@echo "make demo       replay a chat workload through the whole system (under a minute)"
	@echo "make test       run the tests, here and then on the fake device"
	@echo "make test-vllm  run vLLM on it, on this machine's CPU (5 GB of free disk, minutes)"
	@echo "make lint       ruff and mypy"
	@echo "make bench-gpu  measure an accelerator; skipped, with the reason, where there is none"
	@echo "make clean      remove everything that was set up or built"
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

test-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/pytest tests/integrations/vllm --show-capture=no

$(VLLM_STAMP): pyproject.toml $(VLLM_PINS)
	@free=$$(df -Pk $(dir $(abspath $(VLLM_VENV))) | awk 'NR == 2 {print $$4}'); \
	if [ ! -e $(VLLM_VENV) ] && [ "$$free" -lt $(VLLM_FREE_KB) ]; then \
		echo "make test-vllm: vLLM needs $(VLLM_FREE_KB) KiB of free disk for $(VLLM_VENV)," \
			"but there are $$free KiB; free some, or set VLLM_VENV to a folder elsewhere" >&2; \
		exit 1; \
	fi
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps \
		$(addprefix -r ,$(VLLM_PINS))
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# BENCH='--out docs/measurements/h200.md' adds options.
bench-gpu: $(STAMP)
	$(BIN)/kvoffload bench gpu --or-skip $(BENCH)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
