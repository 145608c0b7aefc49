"""The processes of a launch: torch reads RANK, WORLD_SIZE and LOCAL_RANK, and some launchers set others."""

from __future__ import annotations

import os

# Variables of the rank, of the number of ranks, and of the rank on this machine, for which several are tried.
_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ADOPTED = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    # MPICH, Intel MPI, Cray PALS, srun --mpi=pmi2
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # srun
    ("PMIX_RANK", "WORLD_SIZE"),  # PMIx has no variable for the number
)
# A variable that shows that a launcher started this process, and one of the number of tasks or machines on which
# it expects torchrun: of sbatch (salloc's shells have no SLURM_PROCID), Kubeflow Trainer and SkyPilot.
_ANNOUNCED = (("SLURM_PROCID", "SLURM_NTASKS"), ("PET_NODE_RANK", "PET_NNODES"))
_ANNOUNCED += (("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),)
# Set by torchrun (and accelerate), and by deepspeed: they start the ranks inside of another launcher.
_INNER = {"TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "CROSS_SIZE"}


def adopt_ranks() -> str:
    """Copy the ranks of another launcher to the names that torch reads.

    Return what is wrong with the environment, or "" if its processes will find each other.
    """
    env = os.environ
    source = next((row for row in _ADOPTED if {row[0], row[1]} <= env.keys()), _OWN)
    try:
        if source != _OWN and not _stands(source):
            local = next((env[name] for name in source[2:] if name in env), "0")
            env.update(zip(_OWN, (env[source[0]], env[source[1]], local), strict=True))
        name, lacks = _problem_of(source)
    except ValueError:
        shown = ", ".join(f"{name}={env[name]!r}" for name in {*_OWN, *source} & env.keys())
        return f"ranks are whole numbers, but {shown}; unset them, or start with torchrun"
    return lacks and (
        f"{name}={env[name]}, but {lacks}; start the processes with torchrun (under Slurm: srun torchrun, "
        f"docs/launch.md), or unset {name} to run one alone"
    )


def check_ranks() -> None:
    """Raise ValueError if the processes of a command that works on ranks would not find each other."""
    if problem := adopt_ranks():
        raise ValueError(problem)


def _stands(source: tuple[str, ...]) -> bool:
    """Whether RANK and WORLD_SIZE are not those of a shell around the launcher `source`."""
    env = os.environ
    if not {"RANK", "WORLD_SIZE"} <= env.keys():
        return False
    # Scripts for srun often set them.
    is_inner = source[0] in ("SLURM_PROCID", "PMIX_RANK") or not _INNER.isdisjoint(env)
    return is_inner or int(env["WORLD_SIZE"]) > int(env[source[1]])


def _problem_of(source: tuple[str, ...]) -> tuple[str, str]:
    """Return a variable that announces processes, and what the environment lacks for them."""
    env, rows = os.environ, (_OWN, *_ADOPTED)
    if {"RANK", "WORLD_SIZE"} <= env.keys():
        name = source[1] if env.get(source[1]) == env["WORLD_SIZE"] else "WORLD_SIZE"
        number, _ = int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0"))
        if not 0 <= int(env["RANK"]) < number:
            return name, f"RANK={env['RANK']} is not one of 0 to {number - 1}"
        has_place = env.get("MASTER_ADDR") and env.get("MASTER_PORT")
        lacks = "MASTER_ADDR and MASTER_PORT, by which they find each other, are not set"
        return name, "" if number == 1 or has_place else lacks
    names = [n for r, n in _ANNOUNCED if r in env] + [row[1] for row in rows]
    # A range, MIN:MAX, is that of torchrun's --nnodes.
    numbers = {name: int(env.get(name, "1").rpartition(":")[2]) for name in names}
    numbers |= {row[0]: int(env.get(row[0], "0")) + 1 for row in rows}
    name = max(numbers, key=lambda each: numbers[each])
    return name, "RANK and WORLD_SIZE are not both set" if numbers[name] > 1 else ""
