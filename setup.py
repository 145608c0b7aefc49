"""Installation. The pinned versions that development and CI use are in constraints.txt.

The CPU kernels are compiled if a C++ compiler and PyTorch are installed (pip install
--no-build-isolation). Without them cogfast installs and runs, with PyTorch's ops on a CPU.
"""

import logging
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "cogfast" / "__init__.py").read_text())[1]
OPS = re.search(r"_OPS = (\d+)", (ROOT / "cogfast" / "kernels" / "torch_library.py").read_text())[1]
CPU = Path("cogfast/kernels/cpu")
VECTORS = {
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
}
LINUX_X86 = "; sys_platform == 'linux' and platform_machine == 'x86_64'"


class BuildKernels(build_ext):
    """Compile the CPU kernels; without a compiler or on an error, leave them out."""

    def get_ext_filename(self, name: str) -> str:
        import torch

        # The library works with this version of PyTorch and these ops alone; kernels/torch_library.py
        # looks for it.
        path, version = Path(*name.split(".")), torch.__version__.partition("+")[0]
        return str(path.with_name(f"{path.name}-{OPS}-torch{version}.so"))

    def run(self) -> None:
        try:
            super().run()
        except (OSError, subprocess.CalledProcessError) as error:
            self.warn(f"the CPU kernels are not compiled: {error}")

    def build_extension(self, ext: Extension) -> None:
        from torch.utils.cpp_extension import include_paths, library_paths

        library = Path(self.get_ext_fullpath(ext.name))
        if not newer_group([__file__, *ext.sources, *ext.depends], str(library), "newer"):
            return
        compiler = os.environ.get("CXX", "g++")
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        # Contraction into FMA is off, so that every compiler rounds alike; the kernels call fmadd.
        options = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno"]
        options += ["-fno-trapping-math", "-w", *(f"-I{path}" for path in include_paths())]
        tensor_level, *kernels = ext.sources
        # The tensor level first: it includes most of PyTorch and takes longest.
        commands = [[compiler, *options, "-c", tensor_level]]
        for name, flags in VECTORS.items():
            defines = [f"-DCPU_CAPABILITY={name}", f"-DCPU_CAPABILITY_{name}"]
            commands += [[compiler, *options, *flags, *defines, "-c", path] for path in kernels]
        outputs = [str(objects / f"{i}.o") for i in range(len(commands))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            run = lambda command, output: subprocess.run([*command, "-o", output], check=True)
            list(pool.map(run, commands, outputs))
        library.parent.mkdir(parents=True, exist_ok=True)
        # libgomp is not named: torch_cpu brings the one whose threads PyTorch's ops use.
        link = [compiler, "-shared", *outputs, *(f"-L{path}" for path in library_paths())]
        new = Path(f"{library}.new")
        subprocess.run([*link, "-ltorch_cpu", "-lc10", "-o", new], check=True)
        # Some compilers link what cannot be loaded: clang++ without libomp leaves symbols undefined.
        load = "import sys, torch; torch.ops.load_library(sys.argv[1])"
        try:
            subprocess.run([sys.executable, "-c", load, new.absolute()], check=True)
            os.replace(new, library)
        finally:
            new.unlink(missing_ok=True)


def cpu_kernels() -> list[Extension]:
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return []
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # pip's isolated builds do not see the installed one
        logging.warning("the CPU kernels are not compiled: torch cannot be imported (%s)", error)
        return []
    sources = [CPU / "registration.cpp", *sorted((CPU / "vector").glob("*.cpp"))]
    headers = [*CPU.glob("*.h"), *CPU.glob("vector/*.h"), *CPU.glob("vector/*.inc")]
    name = "cogfast.kernels.cpu._kernels"
    return [Extension(name, [*map(str, sources)], depends=[*map(str, headers)])]


setup(
    name="cogfast",
    version=VERSION,
    description="Fast, exact training of CogVideoX video diffusion transformers",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["cogfast", "cogfast.*"]),
    package_data={"cogfast": ["py.typed", "train/run/page/static/*"]},
    ext_modules=cpu_kernels(),
    cmdclass={"build_ext": BuildKernels},
    data_files=[
        ("share/cogfast/configs", sorted(map(str, Path("configs").glob("*.yaml")))),
        (
            "share/cogfast/docs",
            ["docs/options.md", "docs/cogfast.schema.json"],
        ),  # for --help-all, and for editors
    ],
    install_requires=[
        "torch>=2.11,<2.14",
        f"triton>=3.6,<3.8{LINUX_X86}",
        "deepspeed>=0.19.8,<0.20",
        "diffusers>=0.42",
        "transformers>=5.17,<6",
        "huggingface_hub",
        "sentencepiece",
        "omegaconf>=2.4,<2.5",
        "pydantic>=2.13,<3",
        "einops>=0.8",
        "safetensors>=0.6",
        "xxhash>=3.5",
        "numpy>=2",
        "psutil",
        "jinja2>=3.1",
        f"decord>=0.6{LINUX_X86}",
        "av>=18",
        "pillow",
        "tensorboard",
    ],
    extras_require={
        "fa4": ["flash-attn-4[cu13]==4.0.0b36"],
        "dali": ["nvidia-dali-cuda130>=2.4,<3"],
        "gpu": ["flash-attn-4[cu13]==4.0.0b36", "nvidia-dali-cuda130>=2.4,<3"],
        "test": ["matplotlib", "pytest", "pytest-xdist", "peft", "scikit-video", "ruff"],
    },
    entry_points={"console_scripts": ["cogfast = cogfast.__main__:main"]},
)
