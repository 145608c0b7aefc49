"""Installation. The pinned versions that development and CI use are in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "cogfast" / "__init__.py").read_text())[1]
LINUX_X86 = "; sys_platform == 'linux' and platform_machine == 'x86_64'"

setup(
    name="cogfast",
    version=VERSION,
    description="Fast, exact training of CogVideoX video diffusion transformers",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["cogfast", "cogfast.*"]),
    package_data={"cogfast": ["py.typed"]},
    data_files=[("share/cogfast/configs", sorted(map(str, Path("configs").glob("*.yaml"))))],
    install_requires=[
        "torch>=2.11,<2.14",
        f"triton>=3.6,<3.8{LINUX_X86}",
        "deepspeed>=0.19.8,<0.20",
        "diffusers>=0.42",
        "transformers>=5.17,<6",
        "sentencepiece",
        "omegaconf>=2.4,<2.5",
        "einops>=0.8",
        "safetensors>=0.6",
        "xxhash>=3.5",
        "numpy>=2",
        "psutil",
        f"decord>=0.6{LINUX_X86}",
        "av>=18",
        "pillow",
        "matplotlib",
        "rich",
        "tensorboard",
    ],
    extras_require={
        "fa4": ["flash-attn-4[cu13]==4.0.0b36"],
        "dali": ["nvidia-dali-cuda130>=2.4,<3"],
        "gpu": ["flash-attn-4[cu13]==4.0.0b36", "nvidia-dali-cuda130>=2.4,<3"],
        "test": ["pytest", "pytest-xdist", "pytest-benchmark", "peft", "scikit-video", "ruff"],
    },
    entry_points={"console_scripts": ["cogfast = cogfast.__main__:main"]},
)
