"""The `cogfast` command: `cogfast train ...`, `cogfast sample ...`, `cogfast convert ...`."""

from __future__ import annotations

import os
import sys


def _is_current(folder: str) -> bool:
    try:
        return os.path.samefile(folder or os.curdir, os.curdir)
    except OSError:  # one of them was removed
        return False


# A checkout that is not installed imports cogfast from the current folder.
_IS_PROJECT = _is_current(os.path.dirname(os.path.dirname(__file__)))
# `python -m cogfast` looks for every module in the current folder first, which may be downloaded data.
if __name__ == "__main__" and not _IS_PROJECT and _is_current(sys.path[0]):
    del sys.path[0]

import contextlib
import gc
import re
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cogfast.cli.launchers import adopt_ranks, check_ranks
from cogfast.cli.streams import is_first_rank, keep_streams, start_logging
from cogfast.core.addresses import with_urls
from cogfast.core.machine_limits import check_open_files, describe_lack
from cogfast.core.values import Problems, nearest, one_line, printable
from cogfast.distributed.lost_ranks import (
    OTHER_RANK,
    UnsharedError,
    end_with_torchrun,
    is_lost_connection,
    is_of_another_rank,
    tell_ranks,
    tell_torchrun,
)
from cogfast.distributed.stop_signals import (
    Interrupted,
    StopSignals,
    end_by,
    settle_signals,
    signal_name,
    write_last_line,
)
from cogfast.extensions.stores.mirror import named_by_urls
from cogfast.extensions.stores.store import StoreError

if TYPE_CHECKING:
    from cogfast.cli.options import Request
    from cogfast.door.merged_config import Config
    from cogfast.train.run.opened import Run
    from cogfast.train.trainer import Trainer

_USAGE = """\
usage: cogfast {train,cache,sample,convert,finetune,doctor,plan,report,publish} ...

  train   train a CogVideoX transformer: cogfast train FOLDER --data PATH [--lora RANK] [key=value ...]
          or cogfast train --base model.yaml sft.yaml [key=value ...]
  cache   encode the videos once: cogfast cache FOLDER --data PATH args.latent_cache=PATH
  sample  generate videos: cogfast sample FOLDER --prompt TEXT --out DIR
  convert convert weights to another format: cogfast convert SRC DST --to sat|diffusers|peft|fun
  finetune train with the arguments of CogVideo's diffusers trainer: cogfast finetune --model_path ...
  doctor  list what this machine lacks for training: cogfast doctor
  plan    predict a run's memory on a GPU: cogfast plan FOLDER [--lora RANK] --gpu h100-80 --gpus 8
  report  write the page of a run again, or one that compares runs: cogfast report RUN [RUN ...]
  publish upload a run to the Hugging Face hub: cogfast publish RUN me/my-lora [--dry-run]

`cogfast train --help` and so on list the options, `cogfast train --help-all` every key of a configuration.
"""
# Text about the work that a command keeps when a signal ends it. The text follows the name of the signal.
_NOT_BEGUN = (
    " before training began, so there is nothing to save; run the same command to start again"
)
_KEPT = {
    "train": _NOT_BEGUN,
    "finetune": _NOT_BEGUN,
    "cache": "; the shards that are complete are kept, and the same command continues from there",
    "sample": "; the videos that are finished are kept in the output folder",
    "convert": "; the target was not written, and partly written files were removed",
}
_ON_RANKS = ("train", "finetune", "cache", "sample")
_LONGEST_CAUSE = 200  # characters of a library's message
_OF_GLOO = re.compile(r"\[\S*gloo/\S+\] |\. This is typically caused.*")  # around what happened
_UNWIND_SECONDS = 5.0  # time for a command to remove partly written files
# If rank 0 failed the same way, torchrun stops this rank within this time, and one report suffices.
_GRACE_SECONDS = 3


def _load(request: Request, is_of_run: bool = False) -> Config:
    """Start logging, and read the configuration of a command."""
    start_logging()
    # Imports stay inside the commands: torch takes seconds, and `cogfast --help` does not need it.
    from cogfast.cli.options import check_packages
    from cogfast.door.load import load_config

    check_packages(request.allow_import)
    # load_config imports torch, whose many objects all stay: looking through them for garbage
    # takes a tenth of a start.
    gc.disable()
    try:
        given = request.overrides, request.allow_import, is_of_run, request.settings
        return load_config(request.base, *given)
    finally:
        gc.enable()


def _filled(config: Config, request: Request, is_of_run: bool, has_data: bool = True) -> Config:
    """Check the ranks, and fill in what the folders of the data and the model say; a dry run reaches no network."""
    from cogfast.door.merged_config import to_dicts
    from cogfast.extensions.stores.weight_addresses import weight_addresses
    from cogfast.extensions.table import hook

    if runs := not request.dry_run:
        check_ranks()
    if has_data:
        from cogfast.train.preflight.data_layout import infer_layout

        config = config.filled(partial(infer_layout, reads_stores=runs))
    if config.args.load is None and not weight_addresses(to_dicts(config)):
        return config
    return config.filled(partial(hook("fill"), may_download=runs, is_of_run=is_of_run))


def _print(text: str) -> None:
    if is_first_rank():
        sys.stdout.write(printable(text, keep="\n"))


def _show(config: Config, check: Callable[[Run], None]) -> None:
    """Print a configuration (--dry-run), and the line with which a run of it would end on this machine."""
    from cogfast.config.components import with_defaults
    from cogfast.distributed.parallelize import run_without_dynamo
    from cogfast.door.merged_config import to_dicts

    if not is_first_rank():
        return
    sys.stdout.write(config.describe(with_defaults))
    # The check would ask a store, and write there to see whether it may.
    if address := re.search(r"\w+://[^\s'\"]+", str(with_urls(to_dicts(config)))):
        sys.stderr.write(f"cogfast: the run is not checked, since it has {printable(address[0])}\n")
        return
    run_without_dynamo()  # the check builds an optimizer
    try:
        check(config.run)
    except Exception as error:
        if not _is_known(error):
            raise
        _report(error, "a run would end with: ")


def train(argv: Sequence[str], kind: Callable[[Config], Trainer] | None = None) -> None:
    from cogfast.cli.options import parse_train, refuse_sampling_keys

    request = parse_train(argv)
    config = _load(request)
    refuse_sampling_keys(config.origins, config.args)
    config = _filled(config, request, is_of_run=not request.base)
    if request.dry_run:
        from cogfast.train.preflight.check import check_train

        _show(config, check_train)
        return
    from cogfast.train.trainer import Trainer

    (kind or Trainer)(config).train()


def cache(argv: Sequence[str]) -> None:
    from cogfast.cli.options import parse_cache

    request, price = parse_cache(argv)
    from cogfast.extensions.cache.command import cache_latents
    from cogfast.train.preflight.check import check_cache

    run = _filled(_load(request), request, is_of_run=not request.base).run
    check_cache(run)
    cache_latents(run, price)


def sample(argv: Sequence[str]) -> None:
    from cogfast.cli.options import parse_sample, read_prompts, refuse_training_keys

    request = parse_sample(argv)
    is_of_run = request.weights is not None
    config = _load(request, is_of_run)
    refuse_training_keys(config.origins)
    config = _filled(config, request, is_of_run, has_data=False)
    config = config.filled(request.sampling.settings)
    if request.dry_run:
        from cogfast.train.preflight.check import check_sample

        _show(config, lambda run: check_sample(run, request.weights))
        return
    # Prompts are read before any check: a missing file should not cost the user a long start.
    prompts, files = read_prompts(request, config.args)
    from cogfast.extensions.sample.command import sample as sample_videos
    from cogfast.extensions.sample.lora_overlay import LoraOverlay

    sample_videos(
        config.run,
        prompts,
        files,
        Path(request.out or config.args.output_dir),
        request.weights,
        request.ema,
        loras=[LoraOverlay.parse(argument) for argument in request.lora],
        tensors=request.tensors,
    )


def convert(argv: Sequence[str]) -> None:
    from cogfast.cli.folder_options import parse_convert

    arguments = parse_convert(argv)
    start_logging()
    from cogfast.extensions.formats.convert import convert as convert_weights

    convert_weights(**arguments)


def finetune(argv: Sequence[str]) -> None:
    from cogfast.finetune.schemas import Args

    args = Args.parse_args(argv)
    start_logging()
    from cogfast.finetune import get_model_cls

    # Building a trainer translates and checks its arguments; it loads no weights.
    trainer = get_model_cls(args.model_name, args.training_type)(args)
    if args.plan is not None:
        from cogfast.extensions.table import hook

        _print(hook("describe_plan")(trainer.config.run, args.plan))
    elif args.dry_run:
        from cogfast.train.preflight.check import check_train

        _show(trainer.config, check_train)
    else:
        trainer.fit()


def doctor(argv: Sequence[str]) -> None:
    from cogfast.cli.folder_options import parse_doctor

    folder, builds_kernels, writes_json = parse_doctor(argv)
    from cogfast.extensions.doctor.doctor import examine, to_json, to_text

    if builds_kernels:
        from cogfast.kernels.cpu.library import compile_library

        start_logging()
        sys.stdout.write(f"C++ kernels: {printable(str(compile_library()))}\n")
        return
    findings = examine(folder)
    errors = [finding.what for finding in findings if finding.status == "error"]
    sys.stdout.write(printable((to_json if writes_json else to_text)(findings), keep="\n"))
    if errors:
        raise RuntimeError(f"training cannot work on this machine: see {', '.join(errors)}")


def plan(argv: Sequence[str]) -> None:
    from cogfast.cli.options import parse_plan
    from cogfast.extensions.table import hook

    request, found = parse_plan(argv)
    config = _load(request)
    if found.table:
        layouts = hook("find_layouts")(config.run, found.gpu, found.gpus)
        text = hook("describe_table")(layouts, found.gpu)
    else:
        world_size = found.gpus[0] if found.gpus else None
        text = hook("describe_plan")(config.run, found.gpu, world_size)
    _print(text)


def report(argv: Sequence[str]) -> None:
    from cogfast.cli.folder_options import parse_report

    runs, out = parse_report(argv)
    from cogfast.extensions.page.page import report as write_report

    sys.stdout.write(f"{printable(str(write_report(runs, out)))}\n")


def publish(argv: Sequence[str]) -> None:
    from cogfast.cli.folder_options import parse_publish

    arguments = parse_publish(argv)
    start_logging()
    from cogfast.extensions.publish.publish import publish as publish_run

    sys.stdout.write(f"{printable(publish_run(*arguments))}\n")


_ALL = (train, cache, sample, convert, finetune, doctor, plan, report, publish)
_COMMANDS = {command.__name__: command for command in _ALL}


def main(
    argv: Sequence[str] | None = None, trainer: Callable[[Config], Trainer] | None = None
) -> int:
    """Run one command and return the exit status.

    An error that the user can fix prints one line and returns 2; a run that cannot continue prints
    one line and returns 1. argv: the arguments after `cogfast`; None reads sys.argv and also
    handles signals and closed standard streams. trainer: trains in place of Trainer, such as a subclass;
    sys.argv then has the words of `cogfast train` (docs/extending.md).
    """
    end_with_torchrun()
    if trainer is not None:
        _COMMANDS["train"] = partial(train, kind=trainer)
        sys.argv.insert(1, "train")
    if argv is not None:
        return _run(list(argv))
    if not _IS_PROJECT:  # Python's children look for modules in the current folder, too
        os.environ["PYTHONSAFEPATH"] = "1"
    keep_streams()
    kept = _KEPT.get(sys.argv[1] if len(sys.argv) > 1 else "", "")
    last_line = lambda reason: f"cogfast: {reason}" if is_first_rank() else ""
    signals = StopSignals(last_line, on_first=_interrupt, patience=_UNWIND_SECONDS, kept=kept)
    status = 0
    with signals:
        with contextlib.suppress(Interrupted):
            status = _run(sys.argv[1:])
            signals.on_first = None  # a signal from here on only decides the exit status
        # Before the handlers are restored: Slurm repeats a signal, which would end the process
        # without its last line.
        if status == 0 and signals.received and not signals.is_done:
            number = signals.received[0]
            reason = f"ended by {signal_name(number)}"
            tell_torchrun(reason)
            write_last_line(last_line(reason + signals.kept))
            _tell_ranks(sys.argv[1:], reason)
            end_by(number)
    settle_signals()
    return status


def _interrupt(number: int) -> None:
    raise Interrupted(f"ended by {signal_name(number)}")


def _run(argv: list[str]) -> int:
    adopt_ranks()  # what is wrong with them is an error of the commands that need them
    if not argv or argv[0] in ("-h", "--help", "-help", "help"):
        sys.stdout.write(_USAGE)
        return 0 if argv else 2
    if argv[0] in ("--version", "version"):
        from importlib.metadata import version

        sys.stdout.write(f"cogfast {version('cogfast')}\n")
        return 0
    try:
        if argv[0] not in _COMMANDS:
            hint = nearest(argv[0], _COMMANDS) or f"; use one of {', '.join(_COMMANDS)}"
            raise ValueError(f"unknown command {argv[0]!r}{hint}")
        check_open_files()
        _call(_COMMANDS[argv[0]], [argument for argument in argv[1:] if argument != "--traceback"])
    except Exception as error:
        is_lost = is_of_another_rank(error)
        is_line = (_is_known(error) or is_lost) and "--traceback" not in argv
        restarts = (os.environ.get(f"TORCHELASTIC_{n}") for n in ("RESTART_COUNT", "MAX_RESTARTS"))
        is_restarted = is_lost and len(set(restarts)) == 2
        if is_lost and not is_restarted:  # let the rank that failed report first
            time.sleep(_GRACE_SECONDS)
        trace = "".join(traceback.format_exception(error))
        tell_torchrun(_line(error) if is_line else printable(trace, keep="\n"))
        if is_restarted:
            # At once, without waiting for the heartbeat's thread: other ranks still wait for this one.
            write_last_line(f"cogfast: rank {os.environ.get('RANK')}: {_line(error)}")
            os._exit(1)
        if not is_line:
            _tell_ranks(argv, one_line(f"{type(error).__name__}: {error}"))
            raise
        _report(error)
        _tell_ranks(argv, _line(error))
        return 2 if isinstance(error, ValueError) else 1
    return 0


def _tell_ranks(argv: list[str], text: str) -> None:
    """Let the other ranks of a launch end, which would wait for this one to start with them."""
    if argv[0] in _ON_RANKS and "--dry-run" not in argv and not adopt_ranks():
        tell_ranks(text)


def _call(command: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
    """Run a command; an error that the machine causes becomes one line that says so."""
    try:
        command(argv)
    except Exception as error:
        lack = None if _is_known(error) else describe_lack(error)
        if lack is None:
            raise
        # A path is the user's to correct.
        raise (ValueError if getattr(error, "filename", None) else RuntimeError)(lack) from error


def _is_known(error: BaseException) -> bool:
    has_line = isinstance(error, (ValueError, RuntimeError, UnsharedError, StoreError))
    return has_line and _is_raised_by_cogfast(error)


def _is_raised_by_cogfast(error: BaseException) -> bool:
    """Whether cogfast raised the error itself, so that its message is written for the user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = frames[-1].f_globals if frames else {}
    name = names.get("__name__", "")
    # `python -m cogfast`; a user's script is __main__, too.
    is_ours = name == "__main__" and names.get("__file__") == __file__
    return is_ours or name.partition(".")[0] == "cogfast"


def _line(error: Exception) -> str:
    line = printable(one_line(str(error)))
    notes = "".join(f"; {printable(one_line(note))}" for note in getattr(error, "__notes__", ()))
    # gloo raises its errors in C++, so that the last frame may be one of cogfast's.
    if _is_raised_by_cogfast(error) and not is_lost_connection(error):
        return line + notes
    return f"{OTHER_RANK} ({_OF_GLOO.sub('', line)[:_LONGEST_CAUSE]}){notes}"


def _report(error: Exception, head: str = "") -> None:
    """Print the error once, behind `head`: from rank 0, or from the only rank that failed."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(_GRACE_SECONDS)
    prefix = "cogfast: " if rank == "0" else f"cogfast: rank {rank}: "
    lines = str(error).splitlines() if isinstance(error, Problems) else [_line(error)]
    lines = [named_by_urls(printable(one_line(line))) for line in lines]
    sys.stderr.write("".join(f"{prefix}{head}{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
