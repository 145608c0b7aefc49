"""The files of docs/clusters: what they start is read by the parsers of torchrun and of `cogfast train`."""

import argparse
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from cogfast.__main__ import _load
from cogfast.cli.options import parse_train
from tests.support.tiny_run import ROOT

FILES = ROOT / "docs/clusters"
# Stands in for srun, scontrol and torchrun: prints a word a line.
STAND_IN = '#!/bin/bash\nprintf "%s\\n" "$@"\n'


def run_script(script: str, tmp_path: Path, *programs: str, **environment: str) -> list[str]:
    """Return the words that the last program of a bash script gets."""
    for name in programs:
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    given = {"PATH": path, "HOME": str(tmp_path), "USER": "me", **environment}
    done = subprocess.run(["bash", "-eu", "-c", script], env=given, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


def slurm(tmp_path: Path) -> list[str]:
    script = (FILES / "slurm.sh").read_text()
    # Slurm reads the lines before the first command.
    comments = script[: script.index("\nset -eu")].splitlines()
    options = shlex.split(" ".join(line[8:] for line in comments if line.startswith("#SBATCH ")))
    assert len(options) == len([word for word in options if word.startswith("--")]) == 11
    assert {"--nodes=4", "--signal=USR1@600", "--no-kill"} <= {*options}
    # scontrol's stand-in prints "show" first.
    job = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NNODES": "4", "SLURM_JOB_ID": "7"}
    words = run_script(script, tmp_path, "scontrol", "srun", **job)
    assert words[:3] == ["--no-kill", "--kill-on-bad-exit=0", "torchrun"]
    return words[3:]


def kubernetes(tmp_path: Path) -> list[str]:
    service, job = yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # Pods have the names of the service for which the first of them waits.
    name = service["metadata"]["name"]
    assert pod["subdomain"] == name == job["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert f"--rdzv_endpoint={name}-0.{name}:29500" in container["command"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}
    assert pod["terminationGracePeriodSeconds"] >= int(container["env"][0]["value"])
    program, *words = [*container["command"], *container["args"]]
    assert program == "torchrun" and all(isinstance(word, str) for word in words)
    return words


def skypilot(tmp_path: Path) -> list[str]:
    task = yaml.safe_load((FILES / "skypilot.yaml").read_text())
    found = {
        "SKYPILOT_NODE_IPS": "first\nsecond\nthird\nfourth",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
        "SKYPILOT_TASK_ID": "sky-7",
    }
    assert all(isinstance(value, str) for value in task["envs"].values())
    return run_script(task["run"], tmp_path, "torchrun", **found, **task["envs"])


@pytest.mark.parametrize("start", [slurm, kubernetes, skypilot])
def test_what_a_cluster_starts_is_a_run(start, tmp_path: Path) -> None:
    found: argparse.Namespace = get_args_parser().parse_args(start(tmp_path))
    assert (found.nnodes, found.nproc_per_node, found.rdzv_backend) == ("1:4", "8", "c10d")
    assert found.max_restarts > 0 and found.no_python and found.rdzv_id
    assert re.fullmatch(r"[\w.-]+:29500", found.rdzv_endpoint)
    program, command, *words = [found.training_script, *found.training_script_args]
    assert (program, command) == ("cogfast", "train")
    config = _load(parse_train(words))
    args = config.args
    assert (args.elastic, args.experiment_name) == ("shrink", "my-run")  # which resumes
    # Else the first start decides the global batch, with the machines that are there.
    assert config.deepspeed.train_batch_size == 32 and args.seed == 1
    assert str(args.save).endswith("/runs") and str(args.train_data[0]).startswith(("s3:", "/"))


def test_torchrun_hands_out_no_signal_that_slurm_does_not_send() -> None:
    """The signals of torchrun's default, and the one of --signal."""
    text = (FILES / "slurm.sh").read_text()
    listed = re.findall(r"--signals-to-handle=(\S+)", text)[0].split(",")
    default = get_args_parser().get_default("signals_to_handle").split(",")
    sent = "SIG" + re.findall(r"--signal=(\w+)@", text)[0]
    assert sorted(listed) == sorted([*default, sent])
