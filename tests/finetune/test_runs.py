"""Runs of `cogfast finetune` against diffusers: the loss, 20 steps of AdamW on PEFT's adapters."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import CogVideoXDPMScheduler, CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.optimization import get_scheduler
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from cogfast.__main__ import main
from cogfast.core.slot_random import SlotRandom
from cogfast.finetune import Args, CogVideoXT2VLoraTrainer, get_model_cls
from cogfast.finetune.schemas import PLACEHOLDER
from tests.finetune.conftest import KINDS, SIZE, SMALL
from tests.finetune.test_deepspeed_file import UPSTREAM_ZERO2
from tests.support.pipelines import WIDTH
from tests.support.tiny_run import ROOT, free_port, launch_ranks, read_run_weights


class Reference:
    """CogVideo's loss from diffusers' functions alone. The formula is that of its trainer."""

    def __init__(self, folder: Path) -> None:
        kind = CogVideoXTransformer3DModel
        self.transformer = kind.from_pretrained(folder / "transformer")
        self.transformer.norm_out.norm.eps = 1e-6  # SAT's; the class has 1e-5
        self.scheduler = CogVideoXDPMScheduler.from_pretrained(folder / "scheduler")

    def loss(
        self, latents: Tensor, text: Tensor, image: Tensor | None, t: Tensor, noise: Tensor
    ) -> Tensor:
        """latents, noise: [B, C, T, h, w], padded to whole patches. image: of the first frame."""
        config = self.transformer.config
        clean, noise = latents.transpose(1, 2), noise.transpose(1, 2)
        noised = self.scheduler.add_noise(clean, noise, t)
        given = noised
        if image is not None:
            behind = torch.zeros_like(clean)
            behind[:, :1] = image.transpose(1, 2)[:, :1]
            given = torch.cat([noised, behind], dim=2)
        positions = None
        if config.use_rotary_positional_embeddings:
            grid = tuple(side // config.patch_size for side in clean.shape[-2:])
            frames = clean.shape[1] // (config.patch_size_t or 1)
            sizes = {"grid_type": "slice", "max_size": grid}
            width = config.attention_head_dim
            positions = get_3d_rotary_pos_embed(width, None, grid, frames, **sizes)
        ofs = None if config.ofs_embed_dim is None else torch.full((1,), 2.0)
        v = self.transformer(
            given, text, t, ofs=ofs, image_rotary_emb=positions, return_dict=False
        )[0]
        found = self.scheduler.get_velocity(v, noised, t)
        weight = 1 / (1 - self.scheduler.alphas_cumprod[t]).view(-1, 1, 1, 1, 1)
        return (weight * (found - clean) ** 2).mean()


@pytest.mark.parametrize(
    "family",
    [pytest.param(k, marks=[pytest.mark.soak] * (k in ("2b", "5b_i2v", "1.5_5b"))) for k in KINDS],
)
def test_the_loss_of_an_encoded_batch_is_diffusers(family, run_options, monkeypatch, pipelines):
    """Upstream's keys of a batch, at the first, the last and other timesteps."""
    changes = {"training_type": "sft", "batch_size": 2}
    args = Args(**run_options(family, **changes))
    trainer = get_model_cls(args.model_name, args.training_type)(args)
    run = trainer._prepare()
    reference = Reference(pipelines.path(family))
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    frames = 5 if family.startswith("1.5") else 3
    length = reference.transformer.config.max_text_seq_length
    batch = {
        "encoded_videos": draw(2, 16, frames, 4, 6),
        "prompt_embedding": draw(2, length, WIDTH),
        "slots": [0, 1],
    }
    if family.endswith("i2v"):
        batch["images"] = draw(2, 3, *SIZE).clamp(-1, 1)
    for times in ([0, 10], [50, 999]):
        t = torch.tensor(times)
        monkeypatch.setattr(run.diffusion.loss.sigma_sampler, "sample", lambda rng, t=t: t)
        rng = SlotRandom(args.seed, 0, [0, 1], 2)
        # 5 latent frames of 1.5 become 6, by its own rule: the first one twice.
        latents, given = run.encoder(dict(batch), rng)
        before = [batch["encoded_videos"][:, :, :1]] * (frames % 2 and family.startswith("1.5"))
        assert torch.equal(latents, torch.cat([*before, batch["encoded_videos"]], dim=2))
        noise = rng.normal("noise", latents.shape)
        with torch.no_grad():
            found = trainer.compute_loss(dict(batch))
            expected = reference.loss(
                latents, batch["prompt_embedding"], given.condition_latents, t, noise
            )
        tolerance = 1e-6 if min(times) >= 50 else 5e-5
        assert found.item() == pytest.approx(expected.item(), rel=tolerance), times


def test_20_steps_are_those_of_adamw_on_diffusers_with_peft(run_options, pipelines):
    """alpha 64, r 128, with warm-up and clipping: every loss, and the adapters at the end."""
    steps, warmup = 20, 5
    reference = Reference(pipelines.path("5b"))
    model, seen = reference.transformer, []
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=128, lora_alpha=64, target_modules=targets))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=1e-4
    )
    schedule = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=warmup)

    class Both(CogVideoXT2VLoraTrainer):
        """Takes the same step with diffusers' model, PEFT's adapters and torch's AdamW."""

        def compute_loss(self, batch: dict) -> Tensor:
            run = self._prepare()
            assert self.data_loader is run.batches
            if not seen:
                copy_adapters(run.engine.transformer, trained)
            assert self.lr_scheduler.get_last_lr() == schedule.get_last_lr()
            rng = SlotRandom(self.args.seed, run.step, batch["slots"], run.parts.data.global_batch)
            latents, given = run.encoder(dict(batch), rng)
            idx = run.diffusion.loss.sigma_sampler.sample(rng)
            noise = rng.normal("noise", latents.shape)
            expected = reference.loss(latents, given.text, None, idx, noise)
            expected.backward()
            torch.nn.utils.clip_grad_norm_(list(trained.values()), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            loss = super().compute_loss(batch)
            seen.append((loss.item(), expected.item()))
            return loss

    args = run_options(
        "5b", train_steps=steps, lr_warmup_steps=warmup, learning_rate=1e-3, max_grad_norm=0.5
    )
    trainer = Both(Args(**args))
    trainer.fit()
    assert trainer.state.num_trainable_parameters == sum(p.numel() for p in trained.values())
    assert trainer.state.total_batch_size_count == 1
    assert len(trainer.dataset) == 4
    assert len(seen) == steps
    for found, expected in seen:
        assert found == pytest.approx(expected, rel=1e-5)
    # The file that diffusers reads from the checkpoint has the strength that was trained.
    stock = CogVideoXTransformer3DModel.from_pretrained(pipelines.path("5b") / "transformer")
    stock.norm_out.norm.eps = 1e-6
    file = args["output_dir"] / "checkpoint-20" / "pytorch_lora_weights.safetensors"
    stock.load_lora_adapter(load_file(file), prefix="transformer")
    given = inputs(model)
    with torch.no_grad():
        found, expected = stock(**given).sample, model(**given).sample
        assert (found - expected).norm() < 1e-5 * expected.norm()
        stock.disable_lora()
        assert (stock(**given).sample - expected).norm() > 1e-3 * expected.norm()
    ours = ours_of(trainer._prepare().engine.transformer)
    theirs = named_as_ours(get_peft_model_state_dict(model))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() < 1e-5, name


def inputs(model: CogVideoXTransformer3DModel) -> dict:
    generator = torch.Generator().manual_seed(3)
    grid = (2, 3)
    positions = get_3d_rotary_pos_embed(64, None, grid, 3, grid_type="slice", max_size=grid)
    return {
        "hidden_states": torch.randn(1, 3, 16, 4, 6, generator=generator),
        "encoder_hidden_states": torch.randn(1, 226, WIDTH, generator=generator),
        "timestep": torch.tensor([500]),
        "image_rotary_emb": positions,
    }


def ours_of(transformer: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in transformer.named_parameters() if ".matrix_" in n}


PARTS = {"to_q": ("qkv", 0), "to_k": ("qkv", 1), "to_v": ("qkv", 2), "to_out.0": ("out", 0)}


def named_as_ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Translate PEFT's names to cogfast's."""
    found = {}
    for name, tensor in tensors.items():
        name = name.replace(".default.weight", ".weight")
        _, block, _, rest = name.split(".", 3)
        target, _, matrix = rest.removesuffix(".weight").rpartition(".lora_")
        part, index = PARTS[target]
        found[f"blocks.{block}.attention.{part}.matrix_{matrix}.{index}"] = tensor
    return found


def copy_adapters(transformer: torch.nn.Module, trained: dict[str, Tensor]) -> None:
    """Give PEFT's adapters cogfast's initial values."""
    ours = ours_of(transformer)
    with torch.no_grad():
        for name, tensor in named_as_ours(trained).items():
            tensor.copy_(ours[name])


# --- upstream's four scripts: their options and values, with other paths and sizes ---

SCRIPT = """
MODEL_ARGS=(
    --model_path "{model}"
    --model_name "{name}"  # one of four
    --model_type "{kind}"
    --training_type "{training}"
)
OUTPUT_ARGS=(
    --output_dir "{out}"
    --report_to "tensorboard"
)
DATA_ARGS=(
    --data_root "{data}"
    --caption_column "prompt.txt"
    --video_column "videos.txt"
    # --image_column "images.txt"
    --train_resolution "{size}"  # (frames x height x width)
)
TRAIN_ARGS=(
    --train_epochs 10 # epochs
    --seed 42
    --batch_size 1
    --gradient_accumulation_steps 1
    --mixed_precision "bf16"
)
SYSTEM_ARGS=(
    --num_workers 8
    --pin_memory True
    --nccl_timeout 1800
)
CHECKPOINT_ARGS=(
    --checkpointing_steps 10
    --checkpointing_limit 2
    {resume}
)
VALIDATION_ARGS=(
    --do_validation false
    --validation_dir "/absolute/path/to/your/validation_set"
    --validation_steps 20
    --validation_prompts "prompts.txt"
    {images}
    --gen_fps 16
)
printf '%s\\n' "${{MODEL_ARGS[@]}}" "${{OUTPUT_ARGS[@]}}" "${{DATA_ARGS[@]}}" "${{TRAIN_ARGS[@]}}" \\
    "${{SYSTEM_ARGS[@]}}" "${{CHECKPOINT_ARGS[@]}}" "${{VALIDATION_ARGS[@]}}"
"""
# These make a test of seconds. An option that is given twice has its last value.
ADDED = ["--train_steps", "4", "--num_workers", "0", SMALL, "args.log_interval=1"]


def test_a_loss_without_a_gradient_names_the_fix(run_options) -> None:
    class Detached(CogVideoXT2VLoraTrainer):
        def compute_loss(self, batch: dict) -> Tensor:
            return super().compute_loss(batch).detach()

    with pytest.raises(ValueError, match=r"a loss without a gradient; .* without \.item\(\)"):
        Detached(Args(**run_options("5b", train_steps=1))).fit()


def script_words(folder: Path, family: str, training: str, data: Path, out: Path) -> list[str]:
    """The arguments that bash passes in the script: train_ddp_*.sh for LoRA, train_zero_*.sh for sft."""
    name, kind = KINDS[family]
    resume = f'--resume_from_checkpoint "{PLACEHOLDER}"' if training == "lora" else ""
    images = '--validation_images "images.txt"' if kind == "i2v" else ""
    given = {"model": folder, "name": name, "kind": kind, "out": out, "data": data}
    given |= {"training": training, "resume": resume, "images": images}
    text = SCRIPT.format(size=f"{17 if family.startswith('1.5') else 9}x32x48", **given)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def check_folder(out: Path, training: str) -> None:
    checkpoint = out / "checkpoint-4"
    assert (out / "latest").exists()
    assert (out / "logs").is_dir()
    assert Args(**json.loads((out / "args.json").read_text())).output_dir == out
    if training == "lora":
        tensors = load_file(checkpoint / "pytorch_lora_weights.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
        assert any("lora_B" in name and tensor.any() for name, tensor in tensors.items())
    else:
        stock = CogVideoXTransformer3DModel.from_pretrained(checkpoint / "transformer")
        ours = read_run_weights(checkpoint)["blocks.1.attention.out.weight"].bfloat16()
        assert torch.equal(stock.transformer_blocks[1].attn1.to_out[0].weight.bfloat16(), ours)


@pytest.mark.parametrize(
    ("family", "training"),
    [("2b", "lora"), pytest.param("1.5_5b_i2v", "sft", marks=pytest.mark.soak)],
)
def test_a_script_of_upstream_trains(
    family, training, pipelines, data, tmp_path, capsys, monkeypatch
):
    words = script_words(pipelines.path(family), family, training, data, tmp_path / "out")
    assert main(["finetune", *words, *ADDED]) == 0
    log = capsys.readouterr().err
    assert ("has no effect: the placeholder of CogVideo's" in log) is (training == "lora")
    check_folder(tmp_path / "out", training)
    # A second run in the folder would mix both.
    assert main(["finetune", *words, *ADDED]) == 2
    assert "--output_dir: args.run_folder=" in capsys.readouterr().err
    more = ["--resume_from_checkpoint", "latest", "--train_steps", "5"]
    assert main(["finetune", *words, *ADDED, *more]) == 0
    assert (tmp_path / "out" / "checkpoint-5").is_dir()
    # Another model or size is refused before anything is encoded or loaded.
    monkeypatch.setattr("cogfast.train.phases.start_processes", None)
    capsys.readouterr()
    other = script_words(pipelines.path("5b"), "5b", training, data, tmp_path / "out")
    refused = {r"_config\.params": [*other, *ADDED, *more]}
    if family != "2b":  # of which the table has one size
        resized = [*words, *ADDED, *more, "--train_resolution", "17x48x32"]
        refused[r"data.params.video_size: \[32, 48\] -> \[48, 32\]"] = resized
    for message, given in refused.items():
        assert main(["finetune", *given]) == 2
        (line,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("cogfast:"))
        assert "--resume_from_checkpoint: args.resume=" in line
        assert "the configuration differs from the checkpoint's: " in line
        assert re.search(message, line) and len(line) < 1000, line
        # `cogfast train` has an option for this key, `cogfast finetune` has not.
        assert line.endswith("resume anyway with args.accept_changes=true")


@pytest.mark.soak
@pytest.mark.parametrize(("family", "training"), [("5b_i2v", "lora"), ("1.5_5b", "sft")])
def test_every_script_of_upstream_trains_on_two_processes(
    family, training, pipelines, data, tmp_path
):
    words = script_words(pipelines.path(family), family, training, data, tmp_path / "out")
    launch_ranks(2, "-m", "cogfast", "finetune", *words, *ADDED)
    check_folder(tmp_path / "out", training)


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "is_offloaded"), [(2, False), (3, True)])
def test_accelerate_launches_with_a_deepspeed_file(stage, is_offloaded, pipelines, data, tmp_path):
    """The files of finetune/configs: zero2, zero2_offload, zero3 and zero3_offload."""
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    zero |= {"reduce_bucket_size": 1e5}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "sub_group_size": 1e9}
        zero["stage3_gather_16bit_weights_on_model_save"] = "auto"
    offload = {"device": "cpu", "pin_memory": False}
    if is_offloaded:
        zero["offload_optimizer"] = offload
        zero |= {"offload_param": offload} if stage == 3 else {}
    file = tmp_path / "zero.yaml"
    file.write_text(json.dumps(UPSTREAM_ZERO2 | {"zero_optimization": zero}))
    launch = {
        "compute_environment": "LOCAL_MACHINE",
        "num_processes": 2,
        "deepspeed_config": {"deepspeed_config_file": str(file), "zero3_init_flag": False},
        "distributed_type": "DEEPSPEED",
        "num_machines": 1,
        "use_cpu": True,
        "main_process_port": free_port(),
    }
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(launch))
    words = script_words(pipelines.path("5b"), "5b", "sft", data, tmp_path / "out")
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--config_file"]
    command += [tmp_path / "launch.yaml", "-m", "cogfast", "finetune", *words, *ADDED[:4]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    check_folder(tmp_path / "out", "sft")
