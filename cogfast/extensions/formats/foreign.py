"""Names wrappings of weights that cogfast does not read, with the way in."""

from __future__ import annotations

from pathlib import Path

_BESIDE = "beside the config.json of the base model's transformer folder, in place of its weights, and give that folder"
# (files of another wrapping, its name, what to do with it); the first match counts.
_WRAPPINGS = (
    ("*.gguf", "quantized weights (GGUF)", "use the model's safetensors files"),
    ("*.distcp", "a checkpoint of torch.distributed.checkpoint (FSDP)", "make one file of it: python -m "
     "torch.distributed.checkpoint.format_utils dcp_to_torch DIR pytorch_model.bin; put that " + _BESIDE),
    ("*zero_pp_rank_*_optim_states.pt", "a ZeRO checkpoint of DeepSpeed", "join its parts with the zero_to_fp32.py "
     "that lies beside it: python zero_to_fp32.py DIR OUT; put OUT's files " + _BESIDE),
    ("*.bin", "weights without a config.json of diffusers", "put them, named pytorch_model*, " + _BESIDE),
    ("*.safetensors", "weights without a config.json of diffusers", "put them, named diffusion_pytorch_model*, " + _BESIDE),
)  # fmt: skip


def refuse_foreign(path: Path) -> None:
    """Raise ValueError if a folder, one of its folders or a file has weights in another wrapping."""
    folder = path.parent if path.is_file() else path
    names = ("latest", "mp_rank_00_model_states.pt")
    is_zero = any(folder.rglob("*zero_pp_rank_*_optim_states.pt"))
    if not is_zero and any((folder / name).exists() for name in names):
        return  # SAT's
    for pattern, what, fix in _WRAPPINGS:
        found = [path] if path.is_file() and path.match(pattern) else []
        if path.is_dir():
            found = [*path.glob(pattern), *path.glob(f"*/{pattern}")]
        if found:
            text = f"{path}: {found[0].name} is {what}, which cogfast does not read; {fix}"
            raise ValueError(text)
