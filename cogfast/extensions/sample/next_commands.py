"""The commands that users need after a run: to sample from it, to convert it and to train on."""

from __future__ import annotations

import shlex

from cogfast.config.sat_unused import NETWORKS
from cogfast.core.addresses import name_of
from cogfast.extensions.sample.flags import input_words, sampled_tensors
from cogfast.extensions.stores.weight_addresses import as_words, weight_addresses
from cogfast.train.run.folder import plain_sections
from cogfast.train.run.opened import Run
from cogfast.train.run.terminal import log_facts, resume_words


def log_commands(run: Run, folder: str, num_steps: int, is_lora: bool, shows_ema: bool) -> None:
    """Log the commands that users need after a run, a line for each.

    num_steps: of the run; the command that resumes names twice as many. shows_ema: the run's samples are
    made with the averaged weights.
    """
    args, model, network = run.args, run.model, run.network_target
    epochs, shown_folder = args.epochs, shlex.quote(folder)
    key, value = ("train_iters", num_steps) if epochs is None else ("epochs", epochs)
    origin = run.origins.get(args.key(key), "")
    # cogfast finetune sets both by its own options, too.
    more = f"{origin} {2 * value}" if origin.startswith("--train_") else f"args.{key}={2 * value}"
    files = input_words(model.inputs, model.given_frames)
    for name in sampled_tensors(network, run.data_arguments):
        files += f" --tensor {shlex.quote(f'{name}=FILE.npy')}"
    to = "peft" if is_lora else "diffusers"
    own = "".join(f" --allow-import {shlex.quote(name)}" for name in run.allow_import)
    is_own = network not in NETWORKS
    # No other format has added modules.
    more_words = " --ema" * shows_ema + " --allow-unexpected" * is_own
    theirs = weight_addresses(plain_sections(run.sections), is_of_run=True)
    words, hint = as_words(theirs)
    commands = {
        "to sample": f"cogfast sample {shown_folder}{own}{words} --prompt TEXT{files} --out DIR{hint}",
        "to convert": f"cogfast convert {shown_folder} DIR --to {to}{more_words}",
        "to train on": f"the same command with {resume_words(args, run.origins, folder)} {more}",
    }
    is_given = name_of(args.load or "") in theirs.values()
    is_merged = model.trainable_modules is not None if is_lora else is_given
    if is_merged and not is_own:
        base = shlex.quote(args.load or "BASE")
        more_words = f" --merge-lora {shown_folder}" + " --ema" * shows_ema
        commands["to convert"] = f"cogfast convert {base} DIR --to diffusers{more_words}"
    if is_own and model.trainable_modules is not None and not is_lora:
        del commands["to convert"]
    log_facts(commands)
