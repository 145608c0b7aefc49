"""The null runtime and the stream check report what is planted, and nothing else."""

import json

import pytest

from tests.cuda.null_device import start


@pytest.fixture(scope="module")
def found() -> dict:
    done = start(["-m", "tests.cuda.planted_faults"])
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("addition", []),
        ("item", ["cudaStreamSynchronize"]),
        ("large pageable copy", ["copy from pageable memory"]),
        ("small pageable copy", []),
        ("pinned copy", []),
    ],
)
def test_waits_of_the_host_are_seen(found: dict, name: str, waits: list[str]) -> None:
    assert found[name]["waits"] == waits and found[name]["error"] is None


def test_launches_are_counted_by_kernel(found: dict) -> None:
    assert found["addition"]["counts"]["launches"] == 1
    assert found["kernel"]["counts"] == {"launches": 1, "launch triton _kernel": 1}


def test_a_launch_that_a_device_refuses_is_an_error(found: dict) -> None:
    assert faults(found, "kernel") == []
    (fault,) = faults(found, "grid")
    assert fault.startswith("fault launch of triton _kernel: grid 1x70000x1")
    assert found["grid"]["error"].startswith("RuntimeError")


def test_memory_beyond_an_allocation_is_a_fault(found: dict) -> None:
    assert faults(found, "last bytes") == []
    assert faults(found, "beyond the end") == ["fault cudaMemsetAsync of 16 bytes where 8 are left"]


def test_memory_ends(found: dict) -> None:
    assert found["out of memory"]["error"].startswith("OutOfMemoryError: CUDA out of memory")
    assert "79.18 GiB" in found["out of memory"]["error"]


def test_memory_that_cannot_be_pinned_is_used_all_the_same(found: dict) -> None:
    # CUDA keeps an error, and PyTorch raises it after the next launch.
    assert found["refused pinning, raw"]["error"].startswith("AcceleratorError: CUDA error: out of")
    assert found["refused pinning"]["error"] is None
    assert "cannot pin 4194304 bytes of host memory" in found["log"]


def test_buffers_do_not_share_a_page(found: dict) -> None:
    assert found["buffers on a page"]["error"] is None
    assert found["buffers on a page"]["counts"]["cudaHostRegister"] == 2


def test_memory_that_a_stream_may_still_use_is_found(found: dict) -> None:
    streams = found["streams"]
    assert found["stream_uses"] == len(streams) == 4
    assert streams["recorded"] == streams["waited_for"] == []
    for name in ("forgotten", "waited_too_early"):
        (problem,) = streams[name]
        assert "aten.sum" in problem and "planted_faults.py" in problem


def faults(found: dict, name: str) -> list[str]:
    return [key for key in found[name]["counts"] if key.startswith("fault ")]


def test_kernels_are_launched_on_the_device_of_their_tensors() -> None:
    """PyTorch's are, and so a user of `apply_to_diffusers` need not set the current device."""
    done = start(["-m", "tests.cuda.two_devices"], NULLCUDA_DEVICES="2", CUDA_VISIBLE_DEVICES="0,1")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, counts in found.items():
        assert any(key.startswith("launch triton") for key in counts), name
        assert counts["launches on device 1"] == counts["launches"], name
