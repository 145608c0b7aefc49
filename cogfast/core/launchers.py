"""The processes of a launch, as its launcher announces them in the environment.

torch reads RANK, WORLD_SIZE and LOCAL_RANK, which torchrun, deepspeed, accelerate and Kubeflow set. MPI's
launchers and srun have names of their own.
"""

from __future__ import annotations

import os

_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# Variables of the rank, the number of ranks, and the rank on this machine, for which several names are tried in
# order. The first row that has the first two counts.
_ADOPTED = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    # MPICH, Intel MPI, Cray PALS, srun --mpi=pmi2
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # srun
    ("PMIX_RANK", "WORLD_SIZE"),  # PMIx says no number
)
# Variables that show that a launcher started this process, and the number of tasks or machines on which
# torchrun is expected. Shells of salloc have no SLURM_PROCID.
_ANNOUNCED = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("PET_NODE_RANK", "PET_NNODES"),  # Kubeflow Trainer, for torchrun
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
)
# Set by torchrun (and accelerate), and by deepspeed: they start the ranks inside of another launcher.
_INNER = ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "CROSS_SIZE")
_FIX = (
    "start them with torchrun (under Slurm: srun torchrun, docs/launch.md), or set RANK=0 WORLD_SIZE=1 to run "
    "one process alone"
)
_UNKNOWN = f"no variable has the number of ranks; {_FIX}"


def adopt_ranks() -> str:
    """Copy the ranks of another launcher to the names that torch reads.

    Return what is wrong with the environment, or "" if its processes will find each other.
    """
    env = os.environ
    source = next((row for row in _ADOPTED if row[0] in env and row[1] in env), _OWN)
    try:
        if source != _OWN and not _stands(source):
            local = next((env[name] for name in source[2:] if name in env), "0")
            env.update(zip(_OWN, (env[source[0]], env[source[1]], local), strict=True))
        is_source = [env.get(name) for name in source[:2]] == [env.get(name) for name in _OWN[:2]]
        return _problem_of(source[1] if is_source else "WORLD_SIZE")
    except ValueError:
        shown = [f"{name}={env[name]!r}" for name in (*_OWN, *source) if name in env]
        text = ", ".join(dict.fromkeys(shown))
        return (
            f"ranks are whole numbers, but the environment has {text}; unset them, or use torchrun"
        )


def ranks() -> tuple[int, int, int]:
    """Return the rank, the number of ranks, and the rank on this machine. ValueError if they are not known."""
    if problem := adopt_ranks():
        raise ValueError(problem)
    rank, number, local = (int(os.environ.get(n, d)) for n, d in zip(_OWN, "010", strict=True))
    return rank, number, local


def _stands(source: tuple[str, ...]) -> bool:
    """Whether RANK and WORLD_SIZE are not those of a shell around the launcher `source`."""
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return False
    # Scripts for srun often set them.
    is_inner = source[0] in ("SLURM_PROCID", "PMIX_RANK") or any(name in env for name in _INNER)
    return is_inner or int(env["WORLD_SIZE"]) > int(env[source[1]])


def _problem_of(name: str) -> str:
    """Return what is wrong after ranks were adopted. name: the variable that has WORLD_SIZE's value."""
    env, lacks = os.environ, ""
    rank, number, _ = (int(env.get(n, d)) for n, d in zip(_OWN, "010", strict=True))
    if "RANK" in env and "WORLD_SIZE" in env:
        if not 0 <= rank < number:
            lacks = f"RANK={rank} is not one of 0 to {number - 1}"
        elif number > 1 and not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
            lacks = "MASTER_ADDR and MASTER_PORT, by which they find each other, are not set"
    elif number > 1:
        lacks = "RANK is not set"
    else:
        rows = [*((n, r in env) for r, n in _ANNOUNCED), *((row[1], True) for row in _ADOPTED)]
        # A range, MIN:MAX, is that of torchrun's --nnodes.
        sizes = {n: int(env.get(n, "1").rpartition(":")[2]) for n, is_meant in rows if is_meant}
        name = max(sizes, key=lambda each: sizes[each])
        number, lacks = sizes[name], "no variable gives this process its rank"
        if number < 2:
            names = ("RANK", *(row[0] for row in _ADOPTED))
            name = next((n for n in names if int(env.get(n, "0")) > 0), "")
            return f"{name}={env[name]}, but {_UNKNOWN}" if name else ""
    return f"{name}={number} announces {number} processes, but {lacks}; {_FIX}" if lacks else ""


def describe_idle(num_gpus: int) -> str:
    """Return the line about the GPUs that a process without a launcher leaves idle; "" if there are none."""
    if num_gpus < 2 or any(name in os.environ for name in _INNER):
        return ""
    return (
        f"1 of {num_gpus} GPUs is used, {num_gpus - 1} are idle; to use all: torchrun --standalone "
        f"--nproc_per_node={num_gpus} --no-python cogfast ... (CUDA_VISIBLE_DEVICES chooses some of them)"
    )
