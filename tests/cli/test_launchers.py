"""Who starts the processes of a run: what each launcher sets, and the ranks that cogfast makes of it."""

import os
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cogfast.__main__ import main
from cogfast.cli.launchers import adopt_ranks, check_ranks
from cogfast.distributed import process_groups
from cogfast.finetune.trainer import Trainer
from tests.support.refusals import assert_command_refused, assert_refused
from tests.support.runs import Run

PLACE = "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
OPEN_MPI = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0"
OF_TORCHRUN = f"RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 {PLACE}"
TORCHRUN = f"{OF_TORCHRUN} LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x GROUP_RANK=1"
SBATCH = "SLURM_JOB_ID=7 SLURM_NTASKS={0} SLURM_NPROCS={0} SLURM_PROCID=0 SLURM_LOCALID=0"
SRUN = "SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2"

STARTS = {
    "a shell": ("", (0, 1, 0)),
    "torchrun": (TORCHRUN, (3, 4, 1)),
    "accelerate launch, which calls torchrun": (
        f"{TORCHRUN} ACCELERATE_MIXED_PRECISION=no",
        (3, 4, 1),
    ),
    "deepspeed": (f"{OF_TORCHRUN} CROSS_RANK=0 CROSS_SIZE=1 LOCAL_SIZE=4", (3, 4, 1)),
    "kubeflow's PyTorchJob": (f"RANK=1 WORLD_SIZE=2 {PLACE} PET_NNODES=2", (1, 2, 0)),
    "open mpi": (f"{OPEN_MPI} {PLACE}", (1, 2, 0)),
    "open mpi, one process": (
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0",
        (0, 1, 0),
    ),
    "mvapich": (
        f"MV2_COMM_WORLD_RANK=2 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=2 {PLACE}",
        (2, 4, 2),
    ),
    "intel mpi, mpich": (f"PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=1 {PLACE}", (2, 4, 1)),
    "srun --mpi=pmi2": (f"PMI_RANK=1 PMI_SIZE=2 {SRUN} {PLACE}", (1, 2, 1)),
    "pmix with a number": (f"PMIX_RANK=1 WORLD_SIZE=2 {PLACE}", (1, 2, 0)),
    "torchrun in mpirun": (f"{TORCHRUN} {OPEN_MPI}", (3, 4, 1)),
    "as many of torchrun as of mpirun": (
        TORCHRUN.replace("=4", "=2").replace("RANK=3", "RANK=0") + f" {OPEN_MPI}",
        (0, 2, 1),
    ),
    "deepspeed in mpirun": (f"{OF_TORCHRUN} CROSS_SIZE=2 {OPEN_MPI}", (3, 4, 1)),
    "a script's ranks in mpirun of one": (
        f"{OF_TORCHRUN} OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
        (3, 4, 1),
    ),
    "mpirun in a shell with one rank": (f"RANK=0 WORLD_SIZE=1 {OPEN_MPI} {PLACE}", (1, 2, 0)),
    "mpirun in a shell with a stale rank": (f"RANK=0 {OPEN_MPI} {PLACE}", (1, 2, 0)),
    "srun with an address": (f"{SRUN} {PLACE}", (1, 2, 1)),
    "srun torchrun": (f"{SRUN} {TORCHRUN}", (3, 4, 1)),
    "a script's ranks in srun": (f"{SRUN} {OF_TORCHRUN}", (3, 4, 1)),
    "sbatch, one task": (SBATCH.format(1), (0, 1, 0)),
    "sbatch, one process on purpose": (f"{SBATCH.format(4)} RANK=0 WORLD_SIZE=1", (0, 1, 0)),
    "salloc": ("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_NPROCS=4", (0, 1, 0)),
    "salloc's interactive step": (f"{SBATCH.format(4)} SLURM_STEP_NUM_TASKS=1", (0, 1, 0)),
    "kubeflow's TrainJob, one pod": ("PET_NODE_RANK=0 PET_NNODES=1", (0, 1, 0)),
    "stale RANK of the first": ("RANK=0", (0, 1, 0)),
    "stale size of one": ("WORLD_SIZE=1", (0, 1, 0)),
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Sets the variables of a launcher, and no others of one."""

    def set_(words: str) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CROSS_SIZE")
        starts = ("MASTER_", "SLURM_", "OMPI_", "PMI", "MV2_", "PET_", "TORCHELASTIC", "SKYPILOT")
        for name in {*names, *(n for n in os.environ if n.startswith(starts))}:
            # Set first, so that the test's end also removes what the code under test sets.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for word in shlex.split(words):
            monkeypatch.setenv(*word.split("=", 1))

    return set_


@pytest.mark.parametrize("start", STARTS)
def test_the_ranks_are_those_of_the_launcher(start: str, environment) -> None:
    words, wanted = STARTS[start]
    environment(words)
    for _ in range(2):
        check_ranks()
        names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        assert tuple(int(os.environ.get(*each)) for each in names.items()) == wanted


NO_PLACE = "but MASTER_ADDR and MASTER_PORT, by which they find each other, are not set; start the"
NO_RANK = "but RANK and WORLD_SIZE are not both set; start the processes with torchrun (under Slurm: srun torchrun"
REFUSED = {
    "srun": (SRUN, f"^SLURM_STEP_NUM_TASKS=2, {NO_PLACE}"),
    "srun, of which only the tasks are known": (
        "SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_LOCALID=1",
        f"^SLURM_NTASKS=2, {NO_RANK}",
    ),
    "srun --mpi=pmix": (f"PMIX_RANK=1 {SRUN}", "(under Slurm: srun torchrun, docs/launch.md)"),
    "sbatch": (SBATCH.format(2), f"^SLURM_NTASKS=2, {NO_RANK}"),
    "mpirun": (OPEN_MPI, f"^OMPI_COMM_WORLD_SIZE=2, {NO_PLACE}"),
    "mpich": ("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0", f"^PMI_SIZE=2, {NO_PLACE}"),
    "pmix": ("PMIX_RANK=1", f"^PMIX_RANK=1, {NO_RANK}"),
    "kubeflow's TrainJob": ("PET_NODE_RANK=1 PET_NNODES=1:2", f"^PET_NNODES=1:2, {NO_RANK}"),
    "skypilot": ("SKYPILOT_NODE_RANK=0 SKYPILOT_NUM_NODES=2", f"^SKYPILOT_NUM_NODES=2, {NO_RANK}"),
    "stale RANK": ("RANK=1", f"^RANK=1, {NO_RANK}"),
    "stale size": (f"WORLD_SIZE=2 {PLACE}", f"^WORLD_SIZE=2, {NO_RANK}"),
    "stale size of mpi": ("OMPI_COMM_WORLD_SIZE=2", f"^OMPI_COMM_WORLD_SIZE=2, {NO_RANK}"),
    "stale address": ("RANK=0 WORLD_SIZE=2", f"^WORLD_SIZE=2, {NO_PLACE}"),
    "a rank too high": (
        f"RANK=2 WORLD_SIZE=2 {PLACE}",
        "^WORLD_SIZE=2, but RANK=2 is not one of 0 to 1",
    ),
    "no number": ("RANK=one WORLD_SIZE=2", "^ranks are whole numbers, but <...>RANK='one'"),
}


@pytest.mark.parametrize("start", REFUSED)
def test_processes_that_would_not_find_each_other_end(start: str, environment) -> None:
    words, line = REFUSED[start]
    environment(words)
    adopt_ranks()  # as every command does
    assert_refused(check_ranks, line)


@pytest.mark.parametrize("start", ["srun", "sbatch", "mpirun", "mpich", "pmix", "stale address"])
def test_the_advice_leads_to_one_process(start: str, environment) -> None:
    left = dict(word.split("=") for word in REFUSED[start][0].split())
    for _ in range(len(left) + 1):
        environment(" ".join(f"{name}={value}" for name, value in left.items()))
        if not (problem := adopt_ranks()):
            break
        del left[problem.partition(" or unset ")[2].partition(" to run")[0]]
    check_ranks()


@pytest.mark.parametrize("name", ["train", "cache", "sample"])
def test_every_command_on_ranks_says_so(name: str, environment, capsys, tmp_path: Path) -> None:
    run = Run(tmp_path / "data", tmp_path)  # before anything else is found wrong
    words = ["--prompt", "a", "--out", str(tmp_path / "out")] if name == "sample" else []
    environment(SBATCH.format(2))
    command = run.command(*words, name=name)
    assert_command_refused(capsys, command, f"^cogfast: SLURM_NTASKS=2, {NO_RANK}")
    if name != "cache":
        assert main([*command, "--dry-run"]) == 0


def test_finetune_says_so_when_it_begins(environment) -> None:
    environment(SBATCH.format(2))
    trainer = Trainer.__new__(Trainer)  # what is configured does not matter
    assert_refused(trainer.fit, NO_RANK)


def test_idle_gpus_are_named(environment, monkeypatch, log) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(process_groups, "use_expandable_segments", lambda device: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    environment("")
    process_groups.start_processes()
    line = "1 of 8 GPUs is used, 7 are idle; to use all: torchrun --standalone --nproc_per_node=8 --no-python"
    assert line in log.text
    log.clear()
    environment("RANK=0 WORLD_SIZE=1 TORCHELASTIC_RUN_ID=x")  # as many as were asked for
    process_groups.start_processes()
    assert "GPUs" not in log.text
