"""Who starts the processes of a run: what each launcher sets, and the ranks that cogfast makes of it."""

import os
import shlex
from pathlib import Path

import pytest

from cogfast.core.launchers import describe_idle, ranks
from tests.support.refusals import assert_command_refused, assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import write_clips

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
    assert ranks() == ranks() == wanted
    # torch and DeepSpeed read these.
    assert int(os.environ.get("RANK", "0")) == wanted[0]
    assert int(os.environ.get("WORLD_SIZE", "1")) == wanted[1]


NO_PLACE = "MASTER_ADDR and MASTER_PORT, by which they find each other, are not set; start"
NO_RANK = "announces 2 processes, but no variable gives this process its rank; start them"
REFUSED = {
    "srun": (SRUN, f"SLURM_STEP_NUM_TASKS=2 announces 2 processes, but {NO_PLACE}"),
    "srun, of which only the tasks are known": (
        "SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_LOCALID=1",
        f"SLURM_NTASKS=2 {NO_RANK}",
    ),
    "srun --mpi=pmix": (f"PMIX_RANK=1 {SRUN}", "(under Slurm: srun torchrun, docs/launch.md)"),
    "sbatch": (
        SBATCH.format(2),
        f"SLURM_NTASKS=2 {NO_RANK} with torchrun (under Slurm: srun torchrun",
    ),
    "mpirun": (OPEN_MPI, f"^OMPI_COMM_WORLD_SIZE=2 announces 2 processes, but {NO_PLACE}"),
    "mpich": (
        "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0",
        f"PMI_SIZE=2 announces 2 processes, but {NO_PLACE}",
    ),
    "pmix": (
        "PMIX_RANK=1",
        "^PMIX_RANK=1, but no variable has the number of ranks; start them with",
    ),
    "kubeflow's TrainJob": ("PET_NODE_RANK=1 PET_NNODES=1:2", f"PET_NNODES=2 {NO_RANK}"),
    "skypilot": ("SKYPILOT_NODE_RANK=0 SKYPILOT_NUM_NODES=2", f"SKYPILOT_NUM_NODES=2 {NO_RANK}"),
    "stale RANK": ("RANK=1", "^RANK=1, but no variable has the number of ranks"),
    "stale size": (
        f"WORLD_SIZE=2 {PLACE}",
        "WORLD_SIZE=2 announces 2 processes, but RANK is not set",
    ),
    "stale size of mpi": ("OMPI_COMM_WORLD_SIZE=2", f"OMPI_COMM_WORLD_SIZE=2 {NO_RANK}"),
    "stale address": ("RANK=0 WORLD_SIZE=2", f"WORLD_SIZE=2 announces 2 processes, but {NO_PLACE}"),
    "a rank too high": (f"RANK=2 WORLD_SIZE=2 {PLACE}", "but RANK=2 is not one of 0 to 1"),
    "no number": (
        "RANK=one WORLD_SIZE=2",
        "are whole numbers, but the environment has RANK='one', WORLD_SIZE='2'",
    ),
}


@pytest.mark.parametrize("start", REFUSED)
def test_processes_that_would_not_find_each_other_end(start: str, environment) -> None:
    words, line = REFUSED[start]
    environment(words)
    assert_refused(ranks, line)


@pytest.mark.parametrize("name", ["train", "cache", "sample"])
def test_every_command_on_ranks_says_so(name: str, environment, capsys, tmp_path: Path) -> None:
    run = Run(write_clips(tmp_path / "data", num_clips=2), tmp_path)
    words = {"sample": ("--prompt", "a", "--out", f"{tmp_path}/out", "args.force_inference=true")}
    words |= {"cache": (f"args.latent_cache={tmp_path}/cache",)}
    environment(SBATCH.format(2))
    line = f"SLURM_NTASKS=2 {NO_RANK} with torchrun (under Slurm: srun torchrun"
    assert_command_refused(capsys, run.command(*words.get(name, ()), name=name), line)
    assert not (tmp_path / "runs").exists()


def test_idle_gpus_are_named(environment) -> None:
    environment("")
    assert describe_idle(8).startswith("1 of 8 GPUs is used, 7 are idle; to use all: torchrun ")
    assert "--nproc_per_node=8" in describe_idle(8)
    assert describe_idle(1) == ""
    environment(TORCHRUN)  # --nproc_per_node=1
    assert describe_idle(8) == ""
