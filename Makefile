# make setup       .venv with everything, once
# make quickstart  train a tiny model and look at its videos
# make test        all tests;  make soak: the long ones
# make check       lint, types and the fast tests
# make test-dali   install DALI, which decodes videos on a GPU, and test what of it needs none
# make test-cuda   train on a CUDA runtime without a device, with the CUDA builds of the newest and the oldest
#                  PyTorch that pyproject.toml allows, each in a .venv of its own (6 GB); test-cuda-newest: only that one
# make docs        the site of docs/, into site/
# make bench       time a training step on this machine

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
SEED ?= 1234
# conftest.py orders the files.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# DALI with what decoding videos takes: its image codecs are 0.3 GB more.
DALI := nvidia-dali-cuda130 astunparse gast makefun nvtx optree six

# Virtual environments with CUDA builds of PyTorch; those that exist are used as they are.
TEST_CUDA_VENV ?= .venv-cuda
TEST_CUDA_OLDEST_VENV ?= .venv-cuda-oldest

.PHONY: setup quickstart test test-dali test-cuda test-cuda-newest test-cuda-oldest check soak docs bench clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt constraints-no-torch.txt scripts/setup.sh $(wildcard cogfast/kernels/cpu/*.* cogfast/kernels/cpu/vector/*)
	PYTHON=$(PYTHON) scripts/setup.sh
	@touch $@

quickstart: $(INSTALLED)
	SEED=$(SEED) scripts/quickstart.sh

# Processes of the tests take what an earlier one has compiled, also where the shell asks for no files.
test check soak: export PYTHONDONTWRITEBYTECODE =

test: $(INSTALLED)
	$(PYTEST) -m "not soak"

test-dali: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt $(DALI)
	$(BIN)/python -m pytest tests/extensions/dali/test_dali_reader.py

test-cuda: test-cuda-newest test-cuda-oldest
test-cuda-newest: export TEST_CUDA_VENV := $(TEST_CUDA_VENV)
test-cuda-oldest: export TEST_CUDA_VENV := $(TEST_CUDA_OLDEST_VENV)
test-cuda-newest test-cuda-oldest: $(INSTALLED)
	PYTHON=$(PYTHON) tests/cuda/setup.sh $(@:test-cuda-%=%)
	$(BIN)/python -m pytest -n 2 tests/cuda

check: $(BIN)/pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(PYTEST) -m "not soak and not slow and not forks"

# pyright comes with Node.js (244 MB, 7 s), so it is installed when it is first used.
$(BIN)/pyright: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt "pyright[nodejs]"
	@touch $@

soak: $(INSTALLED)
	$(BIN)/python -m scripts.soak

docs: $(BIN)/mkdocs
	$(BIN)/mkdocs build --strict

# Only this target needs mkdocs, so it is installed when it is first used.
$(BIN)/mkdocs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt mkdocs-material
	@touch $@

bench: $(INSTALLED)
	$(BIN)/python -m bench.step

clean:
	rm -rf .venv .venv-cuda .venv-cuda-oldest build dist *.egg-info .pytest_cache .ruff_cache quickstart site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
