"""Upstream's `python sample_video.py --base model.yaml inference.yaml`, as `cogfast sample`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an installation

from cogfast.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.argv.insert(1, "sample")
    sys.exit(main())
