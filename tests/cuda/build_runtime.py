"""Build the null CUDA runtime for the PyTorch of this Python: python tests/cuda/build_runtime.py FOLDER

FOLDER gets libnullcuda.so. Functions that PyTorch's libraries import and that runtime/ does not define
become stubs, which count their calls and return 0. It needs g++, nm, and the headers of the packages
nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-nccl-cu13.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).with_name("runtime")
LIBRARIES = ("libtorch_cuda", "libc10_cuda", "libtorch_python", "libtorch_cuda_linalg")
WANTED = re.compile(r"(cu[A-Z]|cuda|__cuda|cublas|cudnn|nccl|cusparse|cusolver|curand|cufft)")
# Their classes would need functions of the device compiler.
LEFT_OUT = ("-D__CUDA_FP16_H__", "-D__CUDA_BF16_H__", "-D__CUDA_FP8_H__")


def build(out: Path) -> None:
    site = Path(sysconfig.get_paths()["purelib"])
    found = sorted(site.glob("nvidia/*/include"))
    options = ["-std=c++17", "-O1", "-fPIC", "-w", *LEFT_OUT, *(f"-I{path}" for path in found)]
    compiler = os.environ.get("CXX", "g++")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_file(source: Path) -> Path:
            target = Path(folder, f"{source.stem}.o")
            subprocess.run([compiler, *options, "-c", source, "-o", target], check=True)
            return target

        objects = list(pool.map(compile_file, sorted(SOURCES.glob("*.cpp"))))
        defined = symbols("--defined-only", *objects)
        libraries = [site / "torch" / "lib" / f"{name}.so" for name in LIBRARIES]
        missing = symbols("-D", "--undefined-only", *libraries) - defined
        stubs = Path(folder, "stubs.cpp")
        stubs.write_text(stubs_for(sorted(filter(WANTED.match, missing))))
        # In one step, because a process may have the old one open.
        library, new = out / "libnullcuda.so", out / "libnullcuda.so.new"
        command = [compiler, "-shared", "-o", new, *objects, compile_file(stubs)]
        subprocess.run([*command, "-ldl", "-lpthread"], check=True)
        new.replace(library)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        link = out / name
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)


def symbols(*arguments: str | Path) -> set[str]:
    """Return the names that nm lists, without versions."""
    listed = subprocess.run(["nm", "-P", *arguments], capture_output=True, text=True, check=True)
    lines = (line.split() for line in listed.stdout.splitlines())
    return {words[0].partition("@")[0] for words in lines if len(words) > 1}


def stubs_for(names: list[str]) -> str:
    """Return the C++ source of stubs."""
    head = 'extern "C" void nullcuda_stub(const char*);'
    stub = 'extern "C" int {0}() {{ nullcuda_stub("{0}"); return 0; }}'
    return "\n".join([head, *(stub.format(name) for name in names)]) + "\n"


if __name__ == "__main__":
    build(Path(sys.argv[1]))
