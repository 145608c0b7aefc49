"""T5 from a folder against sentencepiece and transformers; the byte encoder; what is refused."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel, T5Tokenizer

from cogfast.model.text_encoder import ByteTextEncoder, T5TextEncoder
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.tiny_transformers import write_t5

CAPTIONS = ["a red circle moves right", "", "the sea, the sea, the sea " * 20]
MAX_LENGTH = 24
ATTENTION = "encoder.block.1.layer.0.SelfAttention"
CORPUS = [
    "a red circle moves right and a blue square moves left",
    "a video of the sea at night, with waves that break on the rocks",
    "the quick brown fox jumps over the lazy dog",
]


TABLE = Path(__file__).with_name("refusals.txt")


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t5(tmp_path_factory.mktemp("t5"), CORPUS, 45, vocab_size=192)


@pytest.fixture
def folder(t5_folder: Path, tmp_path: Path) -> Path:
    """A copy of the T5 that a test changes."""
    return Path(shutil.copytree(t5_folder, tmp_path / "t5"))


def read(folder: Path) -> T5TextEncoder:
    return T5TextEncoder(str(folder), max_length=MAX_LENGTH)


def expected_ids(folder: Path, captions: list[str]) -> torch.Tensor:
    """Token ids are sentencepiece's own pieces, truncated, then </s> = 1, padded with 0."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    rows = [pieces.encode(caption)[: MAX_LENGTH - 1] + [1] for caption in captions]
    return torch.tensor([row + [0] * (MAX_LENGTH - len(row)) for row in rows])


def test_embeddings_are_those_of_t5_without_a_mask(t5_folder: Path) -> None:
    encoder = read(t5_folder)
    direct = T5EncoderModel.from_pretrained(t5_folder, dtype=torch.float32).eval()
    ids = expected_ids(t5_folder, CAPTIONS)
    with torch.no_grad():
        unmasked = direct(input_ids=ids).last_hidden_state
        masked = direct(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
    embeddings = encoder(CAPTIONS)
    assert encoder.width == 32 and not any(p.requires_grad for p in encoder.parameters())
    assert torch.equal(embeddings, unmasked)
    assert (embeddings - masked).abs().max() > 1e-2  # the mask would matter


def test_fp16_leaves_the_linears_that_overflow_in_float32(t5_folder: Path) -> None:
    encoder = T5TextEncoder(str(t5_folder), max_length=MAX_LENGTH, dtype=torch.float16)
    last = encoder.transformer.encoder.block[0].layer[-1].DenseReluDense.wo
    encoder.to("cpu", torch.float16)
    assert last.weight.dtype == torch.float32
    assert encoder.transformer.shared.weight.dtype == torch.float16
    encoder.to(torch.bfloat16)
    assert last.weight.dtype == torch.bfloat16
    exact = read(t5_folder)(CAPTIONS)
    assert (encoder(CAPTIONS).float() - exact).abs().max() < 0.1  # of values up to about 3


def test_other_folder_layouts_give_the_same_numbers(t5_folder: Path, tmp_path: Path) -> None:
    expected = read(t5_folder)
    # transformers writes this today: tokenizer.json in place of spiece.model.
    rewritten = tmp_path / "rewritten"
    expected.transformer.save_pretrained(rewritten)
    expected.tokenizer.save_pretrained(rewritten)
    assert (rewritten / "tokenizer.json").is_file()
    (rewritten / "spiece.model").unlink(missing_ok=True)
    # A diffusers model's folder.
    pipeline = tmp_path / "pipeline"
    expected.transformer.save_pretrained(pipeline / "text_encoder")
    (pipeline / "tokenizer").mkdir()
    shutil.copy(t5_folder / "spiece.model", pipeline / "tokenizer")
    shutil.copy(t5_folder / "config.json", pipeline / "tokenizer")
    for folder in (rewritten, pipeline):
        assert torch.equal(read(folder)(CAPTIONS), expected(CAPTIONS))


def test_a_vocabulary_beyond_the_encoder_or_without_words_is_refused(folder: Path) -> None:
    """An embedding of a row that is not there would end in a traceback or, on a GPU, in the process."""
    encoder = T5EncoderModel(T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1))
    encoder.save_pretrained(folder)
    line = "its vocabulary has the token 33, the encoder has 20;"
    assert_refused(lambda: T5TextEncoder(str(folder)), line)
    (folder / "spiece.model").unlink()
    # transformers makes this of a T5 folder whose vocabulary it does not find.
    T5Tokenizer().save_pretrained(folder)
    assert_refused(lambda: read(folder), "lacks plain English words")


def test_a_hub_name_is_looked_up_in_the_cache_alone(t5_folder: Path, tmp_path: Path) -> None:
    """cache_dir may come from a downloaded run, which must not start a download."""
    find = lambda name: T5TextEncoder(name, max_length=MAX_LENGTH, cache_dir=str(tmp_path / "hub"))
    for name in ("owner/t5", "../../no-such-folder", "a b"):
        line = f"{name} is neither a folder nor a model in cache_dir="
        assert_refused(lambda name=name: find(name), line)
    assert not (tmp_path / "hub").exists()
    model = tmp_path / "hub" / "models--owner--t5"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0123abc")
    shutil.copytree(t5_folder, model / "snapshots" / "0123abc")
    assert torch.equal(find("owner/t5")(CAPTIONS), read(t5_folder)(CAPTIONS))
    # The files are checked as those of any folder are.
    (model / "snapshots" / "0123abc" / "config.json").write_text('{"num_layers": 1000}')
    assert_refused(lambda: find("owner/t5"), "num_layers")


def test_folders_without_a_t5_are_refused(t5_folder: Path, tmp_path: Path) -> None:
    line = "model_dir=<...>/nowhere is not a folder; give the folder"
    assert_refused(lambda: read(tmp_path / "nowhere"), line)
    shutil.copy(t5_folder / "spiece.model", tmp_path)
    assert_refused(lambda: read(tmp_path), "model_dir=<...> has no config.json")
    shutil.copy(t5_folder / "config.json", tmp_path)
    (tmp_path / "spiece.model").unlink()
    line = "model_dir=<...>no vocabulary (spiece.model or tokenizer"
    assert_refused(lambda: read(tmp_path), line)


Change = Callable[[dict[str, torch.Tensor]], object]
CHANGES: dict[str, Change] = {
    "a tensor is missing": lambda w: w.pop(f"{ATTENTION}.q.weight"),
    "more layers": lambda w: w.update(
        {"encoder.block.2.layer.0.layer_norm.weight": torch.ones(32)}
    ),
    "integers": lambda w: w.update({f"{ATTENTION}.k.weight": torch.ones(32, 32).to(torch.int8)}),
    "NaN": lambda w: w["shared.weight"][3].fill_(math.nan),
    "escapes": lambda w: w.update({"\x1b]0;pwned\x07\x1b[31m evil": torch.ones(2)}),
    "nothing": dict.clear,
}


@refusals(TABLE, "weights of a T5")
def test_weights_that_are_not_those_of_the_config_are_refused(
    refusal: Refusal, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers gives random values to what is missing and casts what is no float."""
    what, ending = refusal.words
    weights = load_file(folder / "model.safetensors")
    if ending == "bin":
        (folder / "model.safetensors").unlink()
    CHANGES[what](weights)
    if ending == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        if what == "nothing":
            (folder / "model.safetensors").write_bytes(bytes(200_000))
    assert str(folder) in assert_refused(lambda: read(folder), refusal.line)
    printed = "".join(capfd.readouterr())
    assert "LOAD REPORT" not in printed and "pwned" not in printed


def test_a_whole_t5_in_both_formats_is_read_from_safetensors(folder: Path) -> None:
    """A download of the whole T5 has its decoder and last layer, too. A pickle beside it is not read."""
    expected = read(folder)(CAPTIONS)
    weights = load_file(folder / "model.safetensors")
    more = {"lm_head.weight": torch.ones(2), "decoder.final_layer_norm.weight": torch.ones(2)}
    save_file(weights | more, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    # Its key would make the encoder return a tuple.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"return_dict": False}))
    assert torch.equal(read(folder)(CAPTIONS), expected)
    (folder / "model.safetensors").unlink()
    # The second format is that before torch 1.6.
    for is_zip in (True, False):
        file = folder / "pytorch_model.bin"
        torch.save(weights | more, file, _use_new_zipfile_serialization=is_zip)
        assert torch.equal(read(folder)(CAPTIONS), expected)


@refusals(TABLE, "settings of a tokenizer")
def test_a_tokenizer_with_other_settings_than_t5s_is_refused(
    refusal: Refusal, folder: Path
) -> None:
    settings = {"tokenizer_class": "T5Tokenizer"} | json.loads(refusal.words[0])
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert_refused(lambda: read(folder), refusal.line)


@pytest.mark.parametrize("max_length", [1, 8, 32])
def test_byte_encoder_has_the_tokens_of_byt5(max_length: int) -> None:
    captions = ["", "a", " two words ", "é友" * 9, "x" * 40]
    expected = ByT5Tokenizer()(
        captions, truncation=True, max_length=max_length, padding="max_length", return_tensors="pt"
    )
    ids = ByteTextEncoder(max_length=max_length, d_model=4, d_ff=4).tokenize(captions)
    assert torch.equal(ids, expected["input_ids"])


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({}, torch.float32),
        ({"d_model": 16, "d_ff": 32, "num_layers": 1, "seed": 5}, torch.bfloat16),
        ({"d_model": 5, "d_kv": 3, "d_ff": 7, "num_heads": 1, "num_layers": 3}, torch.float16),
    ],
    ids=["default", "one layer", "odd sizes"],
)
def test_byte_encoder_is_the_t5_of_transformers(sizes: dict, dtype: torch.dtype) -> None:
    """Bit for bit: latent caches hold embeddings that transformers' module computed."""
    encoder = ByteTextEncoder(max_length=80, **sizes).to("cpu", dtype)  # far and near tokens
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4, **sizes}
    torch.manual_seed(sizes.pop("seed", 0))
    config = T5Config(vocab_size=384, feed_forward_proj="gated-gelu", **sizes)
    expected = T5EncoderModel(config).eval().to(dtype)
    with torch.no_grad():
        embeddings = expected(input_ids=encoder.tokenize(CAPTIONS)).last_hidden_state
    assert torch.equal(encoder(CAPTIONS), embeddings)


def test_byte_encoder_does_not_disturb_the_global_draws() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    ByteTextEncoder()
    assert torch.equal(torch.randn(4), expected)


def test_a_truncated_caption_is_logged_once(caplog):
    encoder = ByteTextEncoder(max_length=8)  # a token for each byte, and an end
    encoder.tokenize(["short", "7 bytes"])
    assert not caplog.text
    for _ in range(2):
        encoder.tokenize(["short", "8 bytes!", "nine more"])
    (record,) = caplog.records
    expected = "captions of more than max_length=8 tokens are truncated, such as this one of 9: 8 bytes!..."
    assert record.message == expected
