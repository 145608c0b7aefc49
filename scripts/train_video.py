"""Upstream's `python train_video.py --base model.yaml sft.yaml`, as `cogfast train`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an installation

from cogfast.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    sys.exit(main())
