"""`cogfast doctor` on this machine, and on machines that lack something."""

import importlib.metadata
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import cogfast
from cogfast.__main__ import main
from cogfast.extensions.doctor import doctor
from cogfast.extensions.plan.gpus import find_gpu


def named(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in findings}


def test_this_machine_can_train(tmp_path: Path, answer) -> None:
    """The suite runs here, so training works, and what is found can be compared with the system."""
    text = answer("doctor", "--folder", tmp_path / "runs")
    found = named(doctor.examine(tmp_path / "runs"))
    report = json.loads(answer("doctor", "--folder", tmp_path / "runs", "--json"))
    assert [one["what"] for one in report["findings"]] == list(found)
    assert report["cogfast"] == cogfast.__version__
    assert all(one["status"] == found[one["what"]].status for one in report["findings"])
    assert not [one for one in found.values() if one.status == "error"]
    assert found["processor"].found.startswith(str(len(os.sched_getaffinity(0))))
    free = shutil.disk_usage(tmp_path).free / 2**30
    assert float(found["disk"].found.split()[0]) == pytest.approx(free, abs=2)
    for one in found.values():  # what is not ok says what it costs and what to do
        assert one.status == "ok" or (one.cost in text and f"fix: {one.fix}" in text), one


def test_a_package_that_is_absent_or_old_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The requirements come from the package itself: any of them may be the one that is missing."""
    needed = importlib.metadata.requires("cogfast") or []
    assert any(text.startswith("safetensors") for text in needed)
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "einops":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.0.1" if name == "safetensors" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "einops" in out and "pip install 'einops>=0.8'" in out
    assert "version 0.0.1" in out and "pip install 'safetensors>=0.6'" in out
    assert err.strip() == "cogfast: training cannot work on this machine: see einops, safetensors"


def fake_torch(available: bool, cuda: str | None, name: str = "", **gpu: object) -> SimpleNamespace:
    """A torch whose `cuda` answers as that of a machine with one GPU would."""
    properties = SimpleNamespace(name=name, **({"major": 9, "minor": 0} | gpu))
    module = SimpleNamespace(
        is_available=lambda: available,
        device_count=lambda: 1,
        get_device_properties=lambda index: properties,
        mem_get_info=lambda index: (gpu.get("free", 80 * 2**30), 80 * 2**30),
        get_arch_list=lambda: ["sm_80", "sm_86", "sm_90"],
    )
    return SimpleNamespace(cuda=module, version=SimpleNamespace(cuda=cuda), __version__="2.13.0")


@pytest.mark.parametrize(
    "cuda, cost, fix",
    [
        (None, "torch 2.13.0 is built for CPUs", "pip install --force-reinstall torch"),
        ("13.0", "torch 2.13.0 for CUDA 13.0 cannot use driver 470.1", "install a newer driver"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_an_error(
    cuda: str | None, cost: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_output_of", lambda *argv: "NVIDIA L40S, 470.1")
    (finding,) = doctor._devices(fake_torch(False, cuda))
    assert (finding.status, finding.found) == ("error", "NVIDIA L40S")
    assert finding.cost == cost and finding.fix.startswith(fix)


@pytest.mark.parametrize(
    "gpu, status, words",
    [
        ({}, "ok", ""),
        ({"major": 8, "minor": 9}, "ok", ""),  # code for 8.6 runs on 8.9
        ({"major": 12, "minor": 0}, "error", "no code for compute capability 12.0"),
        ({"major": 7, "minor": 5}, "error", "no code for compute capability 7.5"),
        ({"free": 20 * 2**30}, "note", "another process holds 60.0 GiB"),
    ],
)
def test_a_gpu_is_described(
    gpu: dict, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_output_of", lambda *argv: "NVIDIA H100 80GB HBM3, 580.1")
    found = named(list(doctor._devices(fake_torch(True, "13.0", "NVIDIA H100 80GB HBM3", **gpu))))
    assert found["gpu 0"].status == status
    assert words in found["gpu 0"].cost
    assert "driver 580.1, CUDA 13.0" in found["gpu 0"].found


def test_small_limits_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    found = named([*doctor._shared_memory(), doctor._disk(tmp_path)])
    assert "--shm-size" in found["shared memory"].fix
    assert found["disk"].status == "note" and "89 GB for 5B" in found["disk"].cost


def test_a_folder_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    finding = doctor._disk(tmp_path / "a" / "b")
    assert finding.status == "error" and str(tmp_path) in finding.found


@pytest.mark.parametrize(
    "device, memory, name",
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40"),
        ("NVIDIA B300 SXM6 AC", 267.7, "b300"),
        ("NVIDIA GeForce RTX 5090", 31.4, "5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.0, "rtx-pro-6000"),
        ("Tesla T4", 14.6, None),
    ],
)
def test_the_data_sheet_of_a_device(device: str, memory: float, name: str | None) -> None:
    gpu = find_gpu(device, memory)
    assert (gpu and gpu.name) == name


@pytest.mark.parametrize(
    "device, major, words",
    [
        ("NVIDIA H100 80GB HBM3", 9, "124 of the 889 ms of a step of 2B"),
        ("NVIDIA GeForce RTX 5090", 12, "on this GPU it has not been timed"),
        ("NVIDIA B200", 10, None),  # cuDNN is as fast there
        ("NVIDIA A100-SXM4-80GB", 8, None),  # flash-attn 4 does not support it
    ],
)
def test_what_lacks_without_flash_attention(
    device: str, major: int, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_import", lambda name: None)
    torch = fake_torch(True, "13.0", device, major=major, total_memory=80 * 2**30)
    finding = named(list(doctor._optional(torch))).get("flash-attention")
    assert (finding is None) == (words is None)
    if finding is not None:
        assert words in finding.cost and finding.fix == "pip install '.[fa4]'"
