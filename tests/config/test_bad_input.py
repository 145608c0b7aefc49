"""A user's mistake in a configuration ends in one line that names the key and the fix."""

from __future__ import annotations

import pytest

from cogfast.config import load_config

MODEL = "model.network_config.params"
VAE = "model.first_stage_config.params"
EMBEDDER = "model.conditioner_config.params.emb_models[0]"
SAMPLING = "sgm.modules.diffusionmodules.sampling"

# Override -> the whole start of the message: origin, key, and what to do.
UNKNOWN = {
    "args.sav_interval=5": "unknown key args.sav_interval; did you mean save_interval?",
    "modl.scale_factor=1": "unknown key modl; did you mean model?",
    "train_iters=5": "unknown key train_iters; did you mean args.train_iters?",
    "scale_factor=5": "unknown key scale_factor; did you mean model.scale_factor?",
    "model.scale_facto=1": "unknown key model.scale_facto; did you mean scale_factor?",
    "model.loss_config.target=x": "unknown key model.loss_config; did you mean loss_fn_config?",
    f"{MODEL}.num_layer=3": f"unknown key {MODEL}.num_layer; did you mean num_layers?",
    f"{MODEL}.modules.lora_cfg.target=x": (
        f"unknown key {MODEL}.modules.lora_cfg; did you mean lora_config?"
    ),
    f"{MODEL}.transformer_args.is_decodr=true": (
        f"unknown key {MODEL}.transformer_args.is_decodr; did you mean is_decoder?"
    ),
    "model.loss_fn_config.params.offset_noise=1": (
        "unknown key model.loss_fn_config.params.offset_noise; did you mean offset_noise_level?"
    ),
    "model.denoiser_config.params.scalng_config.target=x": (
        "unknown key model.denoiser_config.params.scalng_config; did you mean scaling_config?"
    ),
    "model.sampler_config.params.discretization_config.params.shift_scal=1": (
        "unknown key model.sampler_config.params.discretization_config.params.shift_scal; "
        "did you mean shift_scale?"
    ),
    "model.sampler_config.parms.num_steps=1": (
        "unknown key model.sampler_config.parms; did you mean params?"
    ),
    "model.first_stage_config.params.ckpt=x": (
        "unknown key model.first_stage_config.params.ckpt; did you mean ckpt_path?"
    ),
    "model.first_stage_config.params.encoder_config.params.z_chanels=1": (
        "unknown key model.first_stage_config.params.encoder_config.params.z_chanels; "
        "did you mean z_channels?"
    ),
    f"{EMBEDDER}.ucg_rat=0.1": (
        "unknown key model.conditioner_config.params.emb_models[0].ucg_rat; did you mean ucg_rate?"
    ),
    f"{EMBEDDER}.params.max_len=1": (
        "unknown key model.conditioner_config.params.emb_models[0].params.max_len; "
        "did you mean max_length?"
    ),
    "data.parms.fps=1": "unknown key data.parms; did you mean params?",
    "data.params.max_frames=1": "unknown key data.params.max_frames; did you mean max_num_frames?",
    "deepspeed.gradient_cliping=1": (
        "unknown key deepspeed.gradient_cliping; did you mean gradient_clipping?"
    ),
    "deepspeed.zero_optimization.stge=1": (
        "unknown key deepspeed.zero_optimization.stge; did you mean stage?"
    ),
    "deepspeed.optimizer.params.wieght_decay=1": (
        "unknown key deepspeed.optimizer.params.wieght_decay; did you mean weight_decay?"
    ),
    "deepspeed.fp16.enable=true": "unknown key deepspeed.fp16.enable; did you mean enabled?",
    "deepspeed.zero_optimization.offload_optimizer.devce=cpu": (
        "unknown key deepspeed.zero_optimization.offload_optimizer.devce; did you mean device?"
    ),
}

WRONG = {
    "args.save_interval=often": "args.save_interval='often' must be a whole number from 1 to 1e+09 or null",
    "args.train_iters=1.5": "args.train_iters=1.5 must be a whole number from 1 to 1e+09 or null",
    "args.wandb=1": "args.wandb=1 must be true or false",
    "args.mode=sft": "args.mode='sft' must be one of pretrain, finetune, inference",
    "args.valid_data=[1]": r"args.valid_data=[1] must be a list (each item: text)",
    "args=5": "args=5 must be a mapping",
    "model.latent_input=yes please": "model.latent_input='yes please' must be true or false",
    "model.scale_factor=[1]": "model.scale_factor=[1] must be a number",
    "model.use_pd=true": "model.use_pd=true: progressive distillation is not in this version",
    "model.compile_model=true": "model.compile_model=true: use args.compile=true, which compiles",
    f"{MODEL}.hidden_size=wide": f"{MODEL}.hidden_size='wide' must be a whole number",
    f"{MODEL}.num_attention_heads=7": "num_attention_heads=7 must divide hidden_size=1920",
    "model.loss_fn_config.params.type=l3": "params.type='l3' must be one of l2, l1",
    "model.denoiser_config.params.num_idx=true": "num_idx=true must be a whole number",
    "model.denoiser_config.params.flip=false": "flip=false: only true is supported; use it",
    "model.denoiser_config.params=7": "model.denoiser_config.params=7 must be a mapping",
    "model.denoiser_config=7": "model.denoiser_config must be a mapping with target and params",
    f"{EMBEDDER}.is_trainable=true": "is_trainable=true: text encoders are frozen; use false",
    f"{EMBEDDER}.ucg_rate=2": "ucg_rate=2 must be from 0 to 1",
    f"{EMBEDDER}.input_key=txt2": "input_key=txt2 must be txt, the key of captions",
    "data.params.fps=fast": "data.params.fps='fast' must be a number from 0.01",
    "data.params.video_size=480": "data.params.video_size=480 must be a list (each item: a whole number from 1",
    "data.params.data_dir=x": "data.params.data_dir is set by the trainer itself; remove it",
    "model.conditioner_config.params=7": "conditioner_config.params=7 must be a mapping",
    "model.conditioner_config={target: torch.nn.Identity}": "use sgm.modules.GeneralConditioner",
    "model.network_wrapper=my.Wrapper": "the network is called directly; remove it",
    f"{MODEL}.modules=7": f"{MODEL}.modules=7 must be a mapping",
    f"{MODEL}.modules.pos_embed_config.target=x": "Basic3DPositionEmbeddingMixin or dit_video",
    f"{MODEL}.transformer_args.max_sequence_length=0": "max_sequence_length=0 must be a whole number from 1",
    f"{MODEL}.num_layers=0": f"{MODEL}.num_layers=0 must be a whole number from 1 to 1000",
    f"{MODEL}.modules.pos_embed_config.params.height_interpolation=0": "must be a number from 0.001",
    f"{VAE}.encoder_config.params=7": "encoder_config.params=7 must be a mapping",
    f"{VAE}.encoder_config.params.ch=96": "ch=96 and decoder_config.params.ch=128 must be equal",
    f"{VAE}.encoder_config.params.ch_mult=[1,-2,2,4]": "params.ch_mult=[1, -2, 2, 4] must be a list (each item: a whole number from 1 to 16",
    "model.denoiser_config.params.scaling_config=7": "given as target and params",
    "model.denoiser_config.params.scaling_config={target: null}": "must be a mapping with target",
    "model.sampler_config.params.num_steps={target: torch.nn.Identity}": "a whole number",
    "model.sampler_config.params.guider_config.params.scale=.nan": "scale=nan must be a number",
    "deepspeed.optimizer.params.lr=.inf": "lr=inf must be a number",
    "deepspeed.optimizer.params.lr='1e-5'": "lr='1e-5' must be a number",
    "deepspeed.optimizer={type: AdamW, params: {lr: '1e-5'}}": "lr='1e-5' must be a number",
    "deepspeed.optimizer.typ=Adam": "unknown key deepspeed.optimizer.typ; did you mean type?",
    "deepspeed.optimizer.params=7": "deepspeed.optimizer.params=7 must be a mapping",
    "deepspeed.optimizer.params.betas=[{7: 1}]": "betas.0.7: keys must be text, but YAML reads 7; quote it",
    "args.load={on: 1}": "unknown key args.load.True: keys must be text, but YAML reads true",
    "deepspeed.zero_optimization.stage=4": "stage=4 must be a whole number from 0 to 3",
    "deepspeed.zero_optimization.offload_optimizer.device=gpu": (
        "offload_optimizer.device='gpu': input should be 'none', 'cpu' or 'nvme'"
    ),
    "deepspeed.zero_optimization.offload_optimizer.ratio=2": "ratio=2: input should be less than or equal to 1",
    "deepspeed.aio.block_size=0": "deepspeed.aio: DeepSpeed's own values are used; remove it",
    "deepspeed.bf16.enabled=1": "deepspeed.bf16.enabled=1 must be true or false",
    "deepspeed.scheduler=WarmupLR": "deepspeed.scheduler='WarmupLR' must be a mapping",
    "deepspeed.optimizer.type=Lion": "type=Lion: use sat.ops.FusedEmaAdam, Adam, AdamW or a class",
    "deepspeed.optimizer.type=adamw8bit": (
        "type=adamw8bit: use sat.ops.FusedEmaAdam with args.optimizer_moments=8bit, Adam, AdamW"
    ),
    "data.params.video_size=64x96": "); write data.params.video_size=[64,96]",
    f"{MODEL}.modules.lora_config.params.lora_alpha=128": (
        f"{MODEL}.modules.lora_config.target is missing; add configs/lora.yaml to --base"
    ),
    "args.lora_rank=8": (
        f"unknown key args.lora_rank; set {MODEL}.modules.lora_config.params.r, and add "
        "configs/lora.yaml to --base"
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
    f"model.sampler_config.target={SAMPLING}.EulerEDMSampler": (
        "upstream's does not run with a CogVideoX schedule; use "
    ),
    "model.loss_fn_config.target=sgm.modules.diffusionmodules.loss.StandardDiffusionLoss": (
        "use sgm.modules.diffusionmodules.loss.VideoDiffusionLoss"
    ),
    "model.network_config.target=torch.nn.Identity": (
        "only dit_video_concat.DiffusionTransformer is supported; use it"
    ),
    "data.target=cogfast.data.datasets.VideoFoldr": (
        "VideoFoldr: unknown data set; did you mean cogfast.data.datasets.VideoFolder?"
    ),
    "data.target=cogfast.dataset.VideoFolder": "; did you mean cogfast.data.datasets.VideoFolder",
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
        "emb_models=null must be a list of text encoders"
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
