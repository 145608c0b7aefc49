"""These tests need a CUDA build of PyTorch in another environment: only `make test-cuda` runs them."""

import os

collect_ignore_glob = [] if "TEST_CUDA_VENV" in os.environ else ["test_*.py"]
