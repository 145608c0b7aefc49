"""LoRA as SAT's lora2: names, scaling, loading a plain checkpoint, what trains."""

from dataclasses import replace

import pytest
import torch

from cogfast.extensions.formats.sat import to_sat_state_dict
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.initialization import initialize
from cogfast.model.lora import DEFAULT_TARGETS, TARGETS, LoraLinear, is_lora_parameter
from cogfast.model.transformer import assemble_transformer, build_transformer, freeze
from cogfast.model.weights.load import load_transformer
from tests.support.refusals import assert_refused
from tests.support.tiny_run import model_section
from tests.support.tiny_transformers import FAMILY, inputs, tiny


def save_as_sat(transformer: torch.nn.Module, folder) -> None:
    (folder / "7").mkdir(parents=True)
    (folder / "latest").write_text("7")
    state = {k: v.clone() for k, v in to_sat_state_dict(transformer).items()}
    torch.save({"module": state}, folder / "7" / "mp_rank_00_model_states.pt")


def test_each_part_of_qkv_has_its_own_pair() -> None:
    """y = W x + b + (alpha / r) B A x, each third of the output with its own A and B, in float64."""
    torch.manual_seed(0)
    lora = LoraLinear(torch.nn.Linear(8, 12), 3, 2, 3.0, 0.0, range(3), kernels=choose_kernels())
    for parameter in lora.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 5, 8)
    w, b = lora.original.weight.double(), lora.original.bias.double()
    expected = x.double() @ w.T + b
    for i in range(3):
        low = x.double() @ lora.matrix_A[str(i)].double().T
        expected[..., 4 * i : 4 * i + 4] += 3.0 / 2 * (low @ lora.matrix_B[str(i)].double().T)
    torch.testing.assert_close(lora(x).double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("targets", [("to_q", "to_v"), ("to_out.0",)])
def test_targets_without_a_pair_stay(targets: tuple[str, ...]) -> None:
    """Omitting a target equals adapting all four with B = 0 for it: outputs and gradients."""
    asked = {"lora_rank": 4, "lora_alpha": 3.0}
    some, full = tiny("5b", **asked, lora_targets=targets), tiny("5b", **asked)
    held = dict(some.named_parameters())
    names = {n for n in held if is_lora_parameter(n)}
    places = [TARGETS[target] for target in targets]
    assert names == {
        f"blocks.{i}.{linear}.matrix_{side}.{part}"
        for i in range(2)
        for linear, part in places
        for side in "AB"
    }
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            plain = name if name in held else name.replace(".original.", ".")
            if plain in held:
                parameter.copy_(held[plain])
            else:
                parameter.zero_()
    outputs = [model(**inputs("5b")) for model in (some, full)]
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)
    for output in outputs:
        output.square().mean().backward()
    for name in names:
        mine, expected = held[name].grad, full.get_parameter(name).grad
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_targets_go_by_sats_names_or_diffusers(tmp_path) -> None:
    """lora_config.params.target_modules, with the names of either trainer."""
    section = model_section("5b", tmp_path, lora_rank=2)
    params = section["network_config"]["params"]["modules"]["lora_config"]["params"]
    cases = {
        ("query_key_value",): ("to_q", "to_k", "to_v"),
        ("dense", "to_v"): ("to_v", "to_out.0"),
        ("to_q", "to_k", "to_v", "to_out.0"): DEFAULT_TARGETS,
        ("query_key_value", "dense", "ff.net.0.proj", "ff.net.2"): tuple(TARGETS),
    }
    assert build_transformer(section).config.lora_targets == DEFAULT_TARGETS
    for given, expected in cases.items():
        params["target_modules"] = list(given)
        assert build_transformer(section).config.lora_targets == expected
    for wrong in (["to_q", "norm1.linear"], ["proj_out"], ["patch_embed.proj"], ["net.2"], []):
        params["target_modules"] = wrong
        possible = "q, k, v, out, fc1, fc2, to_q, <...>, ff.net.2, query_key_value, dense"
        line = f"target_modules=[<...>: use one or more of {possible}$"
        assert_refused(lambda: build_transformer(section), line)


def test_plain_checkpoint_loads_and_changes_nothing(tmp_path) -> None:
    plain = tiny("5b", seed=5)
    save_as_sat(plain, tmp_path)
    adapted = assemble_transformer(replace(FAMILY["5b"], lora_rank=4), seed=1)
    report = load_transformer(adapted, tmp_path)
    # 2 layers x (3 pairs for QKV, 1 for the output)
    assert len(report.missing) == 16 and all(map(is_lora_parameter, report.missing))
    given = inputs("5b")
    with torch.no_grad():
        assert torch.equal(adapted(**given), plain(**given))  # B is zero
    a = adapted.blocks[0].attention.qkv.matrix_A
    assert a["0"].abs().max() <= 128**-0.5 and a["0"].std() > 0.5 * 128**-0.5
    assert not torch.equal(a["0"], a["1"])


def test_adapters_are_not_dropped_silently(tmp_path) -> None:
    save_as_sat(tiny("5b", lora_rank=4), tmp_path)
    line = "16 LoRA tensors <...> has no adapters; set args.lora_rank=4 args.lora_alpha=1 "
    assert_refused(lambda: load_transformer(tiny("5b"), tmp_path), line)
    with pytest.raises(ValueError, match=r"set .* args.lora_modules=\[q,k,v,out\]"):
        load_transformer(tiny("5b", lora_rank=4, lora_targets=("to_q",)), tmp_path)
    with pytest.raises(ValueError, match="which has LoRA rank 8, alpha 1, .* set args.lora_rank=4"):
        load_transformer(tiny("5b", lora_rank=8), tmp_path)


def trainable(transformer: torch.nn.Module) -> set[str]:
    return {n for n, p in transformer.named_parameters() if p.requires_grad}


def test_prefixes_freeze_by_sats_names() -> None:
    transformer = tiny("5b")
    everything = trainable(transformer)
    freeze(transformer, ["model.diffusion_model.mixins.adaln_layer", "conditioner"], False)
    frozen = everything - trainable(transformer)
    # SAT keeps the head norms in the same module as the modulation layers
    kinds = ("modulation.linear", "query_norm", "key_norm")
    assert frozen == {
        n for n in everything if n.startswith("blocks.") and any(k in n for k in kinds)
    }


@pytest.mark.parametrize(
    "arguments", [(["all"], False), (["conditioner"], True)], ids=["all", "lora_train"]
)
def test_all_leaves_the_adapters(arguments) -> None:
    transformer = tiny("5b", lora_rank=4)
    freeze(transformer, *arguments)
    left = trainable(transformer)
    assert left == {n for n, _ in transformer.named_parameters() if is_lora_parameter(n)}
    transformer(**inputs("5b")).square().mean().backward()
    with_gradient = {n for n, p in transformer.named_parameters() if p.grad is not None}
    assert with_gradient == left and len(left) == 16


def test_a_prefix_of_no_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no parameter's name starts with 'al'; use all, or"):
        freeze(tiny("5b", lora_rank=4), ["al"], is_lora_only=False)
    freeze(tiny("5b"), ["conditioner.embedders.0", "first_stage_model.encoder"], False)


def test_layer_range_gives_adapters_to_those_layers() -> None:
    config = replace(FAMILY["5b"], lora_rank=4, lora_layers=(1,))
    names = [n for n, _ in assemble_transformer(config).named_parameters() if is_lora_parameter(n)]
    assert len(names) == 8 and all(name.startswith("blocks.1.") for name in names)
    for layers in ((2,), (-1,), (0, 0)):
        with pytest.raises(ValueError, match=r"layer_range=.* layers from 0 to 1, each once"):
            replace(config, lora_layers=layers)


def test_fresh_weights_depend_on_seed_and_name_alone() -> None:
    one, two, deeper = (
        assemble_transformer(replace(FAMILY["5b"], num_layers=n), seed=3) for n in (2, 2, 3)
    )
    other = assemble_transformer(FAMILY["5b"], seed=4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert torch.equal(one.blocks[1].fc1.weight, deeper.blocks[1].fc1.weight)
    assert not torch.equal(one.blocks[1].fc1.weight, one.blocks[0].fc1.weight)
    assert not torch.equal(one.blocks[1].fc1.weight, other.blocks[1].fc1.weight)
    assert one.blocks[0].fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)
    # Xavier's uniform distribution over the flattened kernel, as SAT's convolution has.
    patch = one.patch_embedding.weight
    bound = (6 / sum(patch.shape)) ** 0.5
    assert 0.99 * bound < patch.abs().max() <= bound
    with torch.no_grad():
        assert not one(**inputs("5b")).any()  # modulation and output layer start at zero
    table = tiny("2b").position_table.weight.clone()
    model = tiny("2b")
    initialize(model, 9)
    assert torch.equal(model.position_table.weight, table)  # the fixed table stays
