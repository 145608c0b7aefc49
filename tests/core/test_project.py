"""The project's own files: what the Dockerfile copies and installs, workflows, issue forms, citation."""

import json
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import cogfast
from tests.support.tiny_run import ROOT

GITHUB = ROOT / ".github"
FORMS = sorted(p for p in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if p.name != "config.yml")
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
BLOCKS = {"input", "textarea", "dropdown", "checkboxes", "markdown"}


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile: (name, arguments)."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def copied() -> list[tuple[list[str], str]]:
    """Sources and target of each COPY from the project."""
    words = [rest.split() for name, rest in instructions() if name == "COPY"]
    return [(one[:-1], one[-1]) for one in words if not one[0].startswith("--from")]


def test_dockerfile_is_well_formed() -> None:
    found = instructions()
    known = {"FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER", "ENTRYPOINT", "CMD"}
    assert found[0][0] == "FROM" and {name for name, _ in found} <= known
    stages: list[str] = []
    for name, rest in found:
        if name == "FROM":
            image, _, stage = rest.partition(" AS ")
            # A tag of the CUDA runtime, or an earlier stage.
            assert image in stages or re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-[\w.]+", image)
            stages.append(stage)
        elif name == "COPY" and rest.startswith("--from="):
            assert rest.split()[0].removeprefix("--from=") in stages
        elif name == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
        elif name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(rest))
    last = found[max(i for i, (name, _) in enumerate(found) if name == "FROM") :]
    (user,) = [rest for name, rest in last if name == "USER"]
    assert user not in ("root", "0")
    assert any("useradd" in rest and rest.split("&&")[0].strip().endswith(user) for _, rest in last)


def test_dockerfile_installs_the_versions_of_the_constraints() -> None:
    installs = [rest for name, rest in instructions() if name == "RUN" and "pip install" in rest]
    assert installs
    for command in installs:
        assert "-c constraints.txt" in command and "==" not in command
    pins = "".join(path.read_text() for path in ROOT.glob("constraints*.txt"))
    cuda = re.search(r"nvidia-dali-cuda(\d\d)0==", pins)
    (image,) = {rest.split()[0] for name, rest in instructions() if rest.startswith("nvidia/")}
    assert image.startswith(f"nvidia/cuda:{cuda[1]}.")


def test_what_docker_copies_is_enough_for_a_wheel(tmp_path: Path) -> None:
    """Every source exists and is not ignored, and a wheel is built from them alone."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule[0] == "!"]
    context, source = tmp_path / "context", tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for sources, target in copied():
        for name in sources:
            assert any(fnmatch(name, rule) for rule in kept), f"{name} is ignored"
            folder = source / target
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder, ignore=ignored)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(context), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert list(context.glob(f"cogfast-{cogfast.__version__}-*.whl"))
    # -c files of constraints are read from beside the file that names them.
    nested = re.findall(r"^-c (\S+)", (source / "constraints.txt").read_text(), re.MULTILINE)
    assert all((source / name).is_file() for name in nested)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert set(workflow) == {"name", True, "permissions", "jobs"}  # YAML reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert re.fullmatch(r"[a-z][a-z-]*", name) and job["timeout-minutes"] <= 60
        assert set(job.get("needs", [])) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert set(step) & {"uses", "run"}
            action = step.get("uses", "")
            assert not action or re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", action), action
            script = re.sub(r"\$\{\{.*?\}\}", "x", step.get("run", ""))
            subprocess.run(["bash", "-n", "-c", script], check=True)
        assert "secrets." not in json.dumps(job)
        # Only the job that publishes may ask for an identity, and it runs none of our code.
        if job.get("permissions", {}).get("id-token"):
            assert job["environment"] == "pypi" and not any("run" in step for step in job["steps"])


def test_there_are_workflows_for_tests_releases_and_links() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"ci", "release", "links"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert set(form) == {"name", "description", "labels", "body"}
    ids = [block["id"] for block in form["body"]]
    assert len(set(ids)) == len(ids)
    for block in form["body"]:
        assert block["type"] in BLOCKS and block["attributes"]["label"]
        assert set(block) <= {"type", "id", "attributes", "validations"}
    (doctor,) = [block for block in form["body"] if block["id"] == "doctor"]
    assert "cogfast doctor --json" in doctor["attributes"]["label"]


def test_citation_names_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["version"] == cogfast.__version__
    assert citation["license"] == "Apache-2.0" and citation["authors"] and citation["message"]
    assert len(FORMS) == 3
