# make setup       .venv with everything, once
# make quickstart  train a tiny model and look at its videos
# make test        all tests;  make check: lint and the fast ones;  make soak: the long ones
# make test-dali   install DALI, which decodes videos on a GPU, and test what of it needs none
# make bench       time a training step on this machine

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
SEED ?= 1234
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

# DALI with what decoding videos takes: its image codecs are 0.3 GB more.
DALI := nvidia-dali-cuda130 astunparse gast makefun nvtx optree six

.PHONY: setup quickstart test test-dali check soak bench clean

setup: $(INSTALLED)

$(INSTALLED): setup.py constraints.txt scripts/setup.sh
	PYTHON=$(PYTHON) scripts/setup.sh
	@touch $@

quickstart: $(INSTALLED)
	SEED=$(SEED) scripts/quickstart.sh

test: $(INSTALLED)
	$(PYTEST) -m "not soak and not forks"
	$(PYTEST) -m "forks and not soak"

test-dali: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt $(DALI)
	$(BIN)/python -m pytest tests/data/video/test_dali_reader.py

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m "not soak and not slow and not forks"

soak: $(INSTALLED)
	$(BIN)/python -m pytest -m "soak and not forks"
	$(BIN)/python -m pytest -m "soak and forks"

bench: $(INSTALLED)
	$(BIN)/python -m bench.step

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache quickstart
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
