"""A user's mistake in a configuration ends in one line that names the key and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from cogfast.config import load_config

MODEL = "model.network_config.params"
VAE = "model.first_stage_config.params"
EMBEDDER = "model.conditioner_config.params.emb_models[0]"
SAMPLING = "sgm.modules.diffusionmodules.sampling"

# Override -> the whole start of the message: origin, key, and what to do.
UNKNOWN = {
    "args.sav_interval=5": "unknown key args.sav_interval; did you mean save_interval?",
    "args.trust_index=true": "unknown key args.trust_index; did you mean data.params.trust_index?",
    "train_iters=5": "unknown key train_iters; did you mean args.train_iters?",
    "model.loss_fn_config.params.offset_noise=1": (
        "unknown key model.loss_fn_config.params.offset_noise; did you mean offset_noise_level?"
    ),
    "model.sampler_config.parms.num_steps=1": (
        "unknown key model.sampler_config.parms; did you mean params?"
    ),
    "model.first_stage_config.params.encoder_config.params.z_chanels=1": (
        "unknown key model.first_stage_config.params.encoder_config.params.z_chanels; "
        "did you mean z_channels?"
    ),
    f"{EMBEDDER}.ucg_rat=0.1": (
        "unknown key model.conditioner_config.params.emb_models[0].ucg_rat; did you mean ucg_rate?"
    ),
    "data.parms.fps=1": "unknown key data.parms; did you mean params?",
    "deepspeed.gradient_cliping=1": (
        "unknown key deepspeed.gradient_cliping; did you mean gradient_clipping?"
    ),
    "deepspeed.optimizer.params.wieght_decay=1": (
        "unknown key deepspeed.optimizer.params.wieght_decay; did you mean weight_decay?"
    ),
    "deepspeed.zero_optimization.offload_optimizer.devce=cpu": (
        "unknown key deepspeed.zero_optimization.offload_optimizer.devce; did you mean device?"
    ),
}

WRONG = {
    "args.save_interval=often": "args.save_interval='often' must be a whole number from 1 to 1e+09 or null",
    "args.save=s3:/b/runs": "args.save=s3:/b/runs: an address has a scheme in small letters and two slashes; write s3://b/runs",
    "args.train_data=[s3://]": "args.train_data=s3://: an address names a bucket or file; write s3://NAME",
    "args.train_data=[' s3://b/c']": "no blanks around it; write s3://b/c",
    "args.train_data=['s3://b/c?versionId=3']": "versions of objects are not read; write s3://b/c",
    "args.save=s3://b/a/../c": "args.save=s3://b/a/../c: an address has no . or .. between slashes; write s3://b/c",
    "args.train_data=['simplecache::s3://b/c']": "has :: in it; use addresses of one scheme",
    "args.train_data=[x,S3://b/c]": "two slashes; write s3://b/c",
    "args.train_data=[s3:///b/c]": "two slashes; write s3://b/c",
    f"{VAE}.ckpt_path=gs:/b/vae": "two slashes; write gs://b/vae",
    "args.local_cache=s3://b/c:1GB": "args.local_cache=s3://b/c:1GB: must be a path of this machine",
    "args.local_cache=500GB": "args.local_cache=500GB: must be FOLDER or FOLDER:SIZE, as /nvme:500GB, with a SIZE",
    "args.eval_prompt_file=s3://b/p.txt": "args.eval_prompt_file=s3://b/p.txt: must be a path of this machine",
    "args.wandb=1": "args.wandb=1 must be true or false",
    "args.lr_schedule=cosin": "cosine_with_restarts, polynomial; did you mean cosine?",
    "args.activation_checkpointing=ful": "; did you mean full?",
    "args.mode=sft": "args.mode='sft' must be one of pretrain, finetune, inference",
    "model.use_pd=true": "model.use_pd=true: progressive distillation is not in this version",
    f"{MODEL}.num_attention_heads=7": "num_attention_heads=7 must divide hidden_size=1920",
    "model.loss_fn_config.params.type=l3": "params.type='l3' must be one of l2, l1",
    "model.denoiser_config.params.flip=false": "flip=false: only true is supported; use it",
    "model.denoiser_config.params=7": "model.denoiser_config.params=7 must be a mapping",
    f"{EMBEDDER}.is_trainable=true": "is_trainable=true: only false is supported; use it",
    f"{EMBEDDER}.ucg_rate=2": "ucg_rate=2 must be a number from 0 to 1",
    f"{EMBEDDER}.input_key=txt2": "input_key='txt2': only 'txt' is supported; use it",
    "data.params.fps=fast": "data.params.fps='fast' must be a number from 0.01",
    "data.params.video_size=64x96": "(each item: a whole number from 1 to 65536); write [64, 96]",
    "data.params.video_size=480": "data.params.video_size=480 must be a list (each item: a whole number from 1",
    "data.params.data_dir=x": "data.params.data_dir is set by the trainer itself; remove it",
    "model.conditioner_config={target: torch.nn.Identity}": "use sgm.modules.GeneralConditioner",
    f"{VAE}.encoder_config.params.ch=96": "ch=96 and decoder_config.params.ch=128 must be equal",
    f"{VAE}.encoder_config.params.ch_mult=[1,-2,2,4]": "params.ch_mult=[1, -2, 2, 4] must be a list (each item: a whole number from 1 to 16",
    "model.denoiser_config.params.scaling_config=7": "given as target and params",
    "model.sampler_config.params.guider_config.params.scale=.nan": "scale=nan must be a number",
    "deepspeed.optimizer.params.lr=.inf": "lr=inf must be a number",
    "deepspeed.optimizer.params.betas=[{7: 1}]": "betas.0.7: keys must be text, but YAML reads 7; quote it",
    "args.load={on: 1}": "unknown key args.load.True: keys must be text, but YAML reads true",
    "deepspeed.zero_optimization.stage=4": "stage=4 must be a whole number from 0 to 3",
    "deepspeed.zero_optimization.offload_optimizer.device=gpu": (
        "offload_optimizer.device='gpu': input should be 'none', 'cpu' or 'nvme'"
    ),
    "deepspeed.amp.enabled=true": "deepspeed.amp: apex mixed precision is not used; enable bf16 or",
    "deepspeed.bf16.enabled=1": "deepspeed.bf16.enabled=1 must be true or false",
    "deepspeed.optimizer.type=Lion": "type=Lion: use sat.ops.FusedEmaAdam, Prodigy, Muon, Adam",
    "deepspeed.optimizer.type=Adamm": "AdamW or a class of torch.optim; did you mean Adam?",
    "deepspeed.optimizer.type=prodgy": "AdamW or a class of torch.optim; did you mean Prodigy?",
    "deepspeed.optimizer.type=adamw8bit": (
        "type=adamw8bit: use sat.ops.FusedEmaAdam with args.optimizer_moments=8bit, Prodigy, Muon"
    ),
    f"{MODEL}.modules.lora_config.params.lora_alpha=128": (
        f"{MODEL}.modules.lora_config.target is missing; set args.lora_rank=64"
    ),
    "deepspeed.optimizer.params.betas=[0.9]": "betas=[0.9] must be a list of 2 (a number, a number)",
}

TARGETS = {
    "model.sampler_config.target=os.system": (
        "model.sampler_config.target=os.system: unknown sampler; use VPSDEDPMPP2MSampler, "
        "VPODEDPMPP2MSampler, VideoDDIMSampler of cogfast.diffusion.sampler or torch.nn.Identity; "
        "classes of your own package need --allow-import os"
    ),
    f"model.sampler_config.target={SAMPLING}.VPSDEDPMPP2Sampler": (
        f"VPSDEDPMPP2Sampler: unknown sampler; did you mean {SAMPLING}.VPSDEDPMPP2MSampler?"
    ),
    "model.network_config.target=torch.nn.Identity": (
        "only dit_video_concat.DiffusionTransformer is supported; use it"
    ),
    "data.target=cogfast.data.datasets.VideoFoldr": (
        "VideoFoldr: unknown data set; did you mean cogfast.data.datasets.VideoFolder?"
    ),
    "data.target=[1]": "data must be a mapping with target and params",
}


@pytest.mark.parametrize("argument", [*UNKNOWN, *WRONG, *TARGETS])
def test_one_line_names_origin_key_and_fix(sat_configs, argument):
    message = (UNKNOWN | WRONG | TARGETS)[argument]
    with pytest.raises(ValueError) as raised:
        load_config([sat_configs / "cogvideox_2b.yaml", sat_configs / "sft.yaml"], [argument])
    text = str(raised.value)
    assert message in text
    assert "\n" not in text
    if argument in UNKNOWN:
        assert text == f"command line: {message}"


def test_the_file_is_named(tmp_path, sat_configs):
    text = (sat_configs / "sft.yaml").read_text().replace("save_interval", "sav_interval")
    (tmp_path / "sft.yaml").write_text(text)
    expected = r"^sft.yaml: unknown key args.sav_interval; did you mean save_interval\?$"
    with pytest.raises(ValueError, match=expected):
        load_config([sat_configs / "cogvideox_2b.yaml", tmp_path / "sft.yaml"])


FILES = {
    "args: [1": "bad.yaml line 1: not valid YAML",
    "5": "bad.yaml: cannot be read",
    "- args": "must be a mapping with sections model, data, args or deepspeed",
    "args: {seed: 1, seed: 2}": "duplicate key",
    "args: {save_interval: '${args.seeed}'}": "bad.yaml: args.save_interval: .*args.seeed",
    "args: {seed: '???'}": r"args.seed has no value \(\?\?\?\)",
    "args: {load: ${}": "not valid YAML|args",
    "data: {target: data_video.SFTDataset, params: {fps: 8}}": (
        "data.params.video_size is missing; VideoFolder needs it"
    ),
    "model: {conditioner_config: {target: sgm.modules.GeneralConditioner}}": (
        "emb_models is missing"
    ),
}


@pytest.mark.parametrize("text", FILES)
def test_files_that_cannot_be_read(tmp_path, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=FILES[text]) as raised:
        load_config([file])
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"--base .*none.yaml: no such file"):
        load_config([tmp_path / "none.yaml"])


def test_an_override_that_is_none(sat_configs):
    with pytest.raises(ValueError, match="command line: 'fast' is not key=value"):
        load_config([sat_configs / "sft.yaml"], ["fast"])
    with pytest.raises(ValueError, match=r"command line: args.train_data\[9\].x cannot be set"):
        load_config([sat_configs / "sft.yaml"], ["args.train_data[9].x=1"])
    for key in ("args[", "args[0", "[", "args]", "args.lr[", "args[[0]"):
        with pytest.raises(ValueError, match="is not a key: a bracket has no partner"):
            load_config([sat_configs / "sft.yaml"], [f"{key}=1"])


@pytest.mark.parametrize("value", ["{a: 1}", "[a]", '"${args.nothing}"'])
def test_a_command_of_a_file_is_ignored_whatever_it_is(tmp_path: Path, value: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"args: {{eval_command: {value}}}\n")
    config = load_config(["cogvideox_2b.yaml", file])
    assert config.args.eval_command is None
    assert config.unused["args.eval_command"].startswith("a.yaml sets it")


def test_a_list_with_braces_is_a_list(sat_configs, caplog):
    """YAML takes the braces of tar shards for a mapping. Without quotes a shell makes two words of them."""
    caplog.set_level("INFO", logger="cogfast")
    files = [sat_configs / "cogvideox_2b.yaml", sat_configs / "sft.yaml"]
    config = load_config(files, ["args.train_data=[s3://b/s-{000..001}.tar, t-{0..1}.tar]"])
    assert list(config.args.train_data) == ["s3://b/s-{000..001}.tar", "t-{0..1}.tar"]
    assert "given twice" not in caplog.text
    load_config(files, ["args.train_data=[a-0.tar]", "args.train_data=[a-1.tar]"])
    assert (
        "args.train_data is given twice, and only the last one counts: ['a-1.tar']" in caplog.text
    )


def test_a_base_in_a_store(sat_configs):
    with pytest.raises(ValueError, match="^--base s3://b/q.yaml: must be a path of this machine"):
        load_config(["s3://b/q.yaml"])
