"""Usual set-ups of clusters: links above the run, other umasks, group folders, users without a name, homes
that cannot be written. A run trains and resumes in each; nothing there is refused as if it were hostile."""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cogfast.__main__ import main
from tests.cli.hostile.forked_case import drop_rights, preload, run_case, set_rights
from tests.support.runs import Run

pytestmark = pytest.mark.forks

STRANGER, SQUASHED, GROUP = 12345, 65534, 5000  # none has an entry in /etc/passwd or /etc/group
KEEP_CAPABILITIES, CAP_DAC_READ_SEARCH = 8, 2


@dataclass
class Machine:
    """The folders, the user and the environment of a case, all below `root`; set-ups change them.

    user: whose process trains, this one's without root's rights by default. variables: of the
    environment, None to remove one. save, data: the words of the run.
    """

    root: Path
    save: Path
    data: Path
    user: int | None = None
    group: int | None = None
    umask: int = 0o022
    variables: dict[str, str | None] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.root / "home"

    def give(self, *folders: Path, user: int = STRANGER, group: int = STRANGER) -> None:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            os.chown(folder, user, group)

    def become(self) -> None:
        """Take the rights of the user: those of a process that he has started."""
        os.umask(self.umask)
        if self.group is not None:
            os.setgroups([self.group])
        if self.user is None:
            return drop_rights()
        # The interpreter may lie in the home of root: it is read as if all could read it.
        assert ctypes.CDLL(None).prctl(KEEP_CAPABILITIES, 1, 0, 0, 0) == 0
        os.setgid(self.user)
        os.setuid(self.user)
        return set_rights(1 << CAP_DAC_READ_SEARCH)

    def train(self, words: list[str]) -> int:
        for key, value in ({"HOME": str(self.home)} | self.variables).items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        tempfile.tempdir = None
        return main(words)


SetUp = Callable[[Machine], None]
SETUPS: dict[str, SetUp] = {}
QUICK = ("links above the run", "umask 002", "a group's folder", "a user without a name")
NEED_ROOT: set[str] = set()


def setup(name: str, needs_root: bool = False) -> Callable[[SetUp], SetUp]:
    def keep(function: SetUp) -> SetUp:
        SETUPS[name] = function
        if needs_root:
            NEED_ROOT.add(name)
        return function

    return keep


@setup("links above the run")
def _(machine: Machine) -> None:
    (machine.root / "disk" / "me").mkdir(parents=True)
    machine.save.symlink_to(machine.root / "disk" / "me")


@setup("a home that is a link")
def _(machine: Machine) -> None:
    machine.home.rmdir()
    (machine.root / "volume" / "me").mkdir(parents=True)
    machine.home.symlink_to(machine.root / "volume" / "me")
    machine.save = machine.home / "runs"


@setup("a link of a link")
def _(machine: Machine) -> None:
    (machine.root / "a").mkdir()
    (machine.root / "b").symlink_to("a")
    machine.save.symlink_to("b")


for umask in (0o002, 0o077, 0o000, 0o007):

    @setup(f"umask {umask:03o}")
    def _(machine: Machine, umask: int = umask) -> None:
        machine.umask = umask


@setup("a group's folder", needs_root=True)
def _(machine: Machine) -> None:
    machine.give(machine.save, machine.home, user=STRANGER, group=GROUP)
    machine.save.chmod(0o2775)
    machine.user, machine.group, machine.umask = STRANGER, GROUP, 0o002


@setup("a group's folder of another user", needs_root=True)
def _(machine: Machine) -> None:
    machine.give(machine.save, user=0, group=GROUP)
    machine.save.chmod(0o2775)
    machine.give(machine.home)
    machine.user, machine.group, machine.umask = STRANGER, GROUP, 0o002


@setup("a user without a name", needs_root=True)
def _(machine: Machine) -> None:
    machine.give(machine.save, machine.home)
    machine.user = STRANGER


@setup("a user without a name and a home", needs_root=True)
def _(machine: Machine) -> None:
    machine.give(machine.save)
    machine.user = STRANGER
    machine.variables = {"HOME": None, "XDG_CACHE_HOME": None}


@setup("the home of a container: /", needs_root=True)
def _(machine: Machine) -> None:
    machine.give(machine.save)
    machine.user = STRANGER
    machine.variables = {"HOME": "/", "XDG_CACHE_HOME": None}


@setup("a home that does not exist", needs_root=True)
def _(machine: Machine) -> None:
    machine.give(machine.save)
    machine.user = STRANGER
    machine.variables = {"HOME": "/nonexistent", "XDG_CACHE_HOME": None}


@setup("a home that cannot be written")
def _(machine: Machine) -> None:
    machine.home.chmod(0o555)
    machine.variables = {"XDG_CACHE_HOME": None}


@setup("a disk that makes root a stranger", needs_root=True)
def _(machine: Machine) -> None:
    machine.give(machine.save, machine.home, user=SQUASHED, group=SQUASHED)
    machine.save.chmod(0o777)
    machine.home.chmod(0o777)


@setup("a folder for temporary files that all share", needs_root=True)
def _(machine: Machine) -> None:
    shared = machine.root / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    machine.give(machine.save, machine.home)
    machine.user, machine.variables = STRANGER, {"TMPDIR": str(shared)}


@setup("a folder for temporary files that is gone")
def _(machine: Machine) -> None:
    machine.variables = {"TMPDIR": str(machine.root / "job-123")}


@setup("a cache that others may write")
def _(machine: Machine) -> None:
    cache = machine.root / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    machine.variables = {"XDG_CACHE_HOME": str(cache)}


@setup("a cache of another user", needs_root=True)
def _(machine: Machine) -> None:
    cache = machine.root / "cache"
    machine.give(cache, machine.save, machine.home)
    machine.give(cache / "cogfast", user=SQUASHED, group=SQUASHED)
    machine.user, machine.variables = STRANGER, {"XDG_CACHE_HOME": str(cache)}


@setup("data that cannot be written")
def _(machine: Machine) -> None:
    for folder in (machine.data, *(p for p in machine.data.rglob("*") if p.is_dir())):
        folder.chmod(0o555)


@setup("data of links")
def _(machine: Machine) -> None:
    links = machine.root / "links"
    for file in [p for p in machine.data.rglob("*") if p.is_file()]:
        link = links / file.relative_to(machine.data)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    machine.data = links


@setup("data behind a link")
def _(machine: Machine) -> None:
    (machine.root / "data-link").symlink_to(machine.data)
    machine.data = machine.root / "data-link"


@setup("names with spaces and letters of other languages")
def _(machine: Machine) -> None:
    machine.save = machine.root / "Läufe von heute" / "数据"
    machine.save.mkdir(parents=True)


@pytest.fixture
def machine(data: Path) -> Iterator[Machine]:
    preload()
    # pytest's own folders are those of this user alone.
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "case")
        Path(folder).chmod(0o755)
        shutil.copytree(data, root / "data")
        for name in ("home", "scratch"):
            (root / name).mkdir()
        (root / "scratch").chmod(0o777)
        yield Machine(root, save=root / "runs", data=root / "data")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.soak) for n in SETUPS]
)
def test_a_run_trains_and_resumes(machine: Machine, name: str) -> None:
    if name in NEED_ROOT and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    SETUPS[name](machine)
    run = Run(machine.data, machine.root).with_args(train_iters=2, save_interval=2)
    words = run.command(f"args.save={machine.save}")
    outcome = run_case(lambda: machine.train(words), machine.root, become=machine.become)
    assert outcome.status == 0, outcome.output
    (folder,) = (p for p in machine.save.iterdir() if p.is_dir())
    words += [f"args.resume={folder}", "args.train_iters=3"]
    outcome = run_case(lambda: machine.train(words), machine.root, become=machine.become)
    assert outcome.status == 0, outcome.output
    assert "resumed" in outcome.output and "finished at step 3" in outcome.output, outcome.output
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
