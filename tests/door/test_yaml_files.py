"""YAML files of a kilobyte that expand to terabytes, and run files that read the environment."""

import os
import shutil
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.config.yaml_files import check_interpolations, read_yaml
from cogfast.core.values import KeyProblem
from tests.support.refusals import assert_refused

LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
CHAIN = range(60)  # each twice the next: 2^60 values


def chain(text: str, last: object = "x") -> dict:
    """{x0: text that names x1, ...}, where {} in `text` is the next name."""
    return {f"x{i}": text.replace("{}", f"x{i + 1}") for i in CHAIN} | {f"x{len(CHAIN)}": last}


GROWING = {
    "text": chain("${args.{}}${args.{}}"),
    "relative names": chain("${.{}}${.{}}"),
    "a resolver": chain("${oc.select:args.{}}${oc.select:'args.{}'}"),
    "mappings": {f"x{i}": dict.fromkeys("ab", f"${{args.x{i + 1}}}") for i in CHAIN}
    | {f"x{len(CHAIN)}": {"a": 1}},
    "one long text": {"x0": "${args.x1}" * 2000, "x1": "x" * 20_000},
    "escapes": chain(r"\${args.{}}\${args.{}}"),
}


@pytest.mark.parametrize("kind", GROWING)
def test_yaml_that_expands_hugely_is_refused_before_it_expands(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"args": GROWING[kind]}))
    with pytest.raises(ValueError, match=r"^a.yaml: .* values once ") as refused:
        load_config([file])
    assert len(str(refused.value)) < 400
    arguments = [
        f"args.{name}={yaml.safe_dump(value, default_flow_style=True, width=10**6)}".removesuffix(
            "\n"
        ).removesuffix("\n...")
        for name, value in GROWING[kind].items()
    ]
    assert_refused(lambda: load_config([], arguments), "^command line: <...> values once ")


@pytest.mark.parametrize(
    ("values", "resolved"),
    [
        ({"a": 1, "b": "${a}"}, {"a": 1, "b": 1}),
        ({"a": {"c": [1, {"d": 2}]}, "b": "${a.c[1].d}-${a.c.0}"}, {"b": "2-1"}),
        ({"a": {"c": "${.d}", "d": "${..b}"}, "b": 7}, {"a": {"c": 7, "d": 7}}),
        ({"a": "${oc.env:COGFAST_TEST_WORD}"}, {"a": "word"}),
        ({"a": [1] * 200, **{f"b{i}": "${a}" for i in range(5)}}, {"b4": [1] * 200}),
    ],
)
def test_ordinary_interpolations_are_resolved(
    monkeypatch: pytest.MonkeyPatch, values: dict, resolved: dict
) -> None:
    monkeypatch.setenv("COGFAST_TEST_WORD", "word")
    config = OmegaConf.create(values)
    check_interpolations(config)
    found = OmegaConf.to_container(config, resolve=True)
    assert {key: found[key] for key in resolved} == resolved


@pytest.mark.parametrize("text", ["${a.${b}}", "${oc.decode:'${b}'}", "${oc.create:{a: 1}}"])
def test_one_interpolation_inside_another_is_refused(text: str) -> None:
    with pytest.raises(KeyProblem, match="c=.* nested or not closed; write the value"):
        check_interpolations(OmegaConf.create({"b": "x", "c": text}))


@pytest.mark.parametrize("name", ["${m}", "${oc.select:m}"])
def test_a_part_of_an_interpolation_is_refused(name: str) -> None:
    """Its size would be counted as a circle's, though OmegaConf sees none."""
    config = OmegaConf.create({"z": name, "m": chain("${z.{}}${z.{}}")})
    with pytest.raises(KeyProblem, match="m.x0=.* names a part of z, which is an interpolation"):
        check_interpolations(config)


def test_a_resolved_text_is_not_resolved_again(tmp_path: Path) -> None:
    """`$` and `{...}` put together would be an interpolation that nothing has counted."""
    file = tmp_path / "a.yaml"
    for value in ("${args.load}{args.seed}", r"\${args.seed}"):
        file.write_text(yaml.safe_dump({"args": {"load": "$", "wandb_project": value}}))
        line = "^a.yaml: args.<...>=<...> contains ${ once it is resolved"
        assert_refused(lambda: load_config([file]), line)


HOSTILE = {
    "the environment": ("args: {load: '${oc.env:HOME}'}\n", "args.load=.* resolved values only"),
    "an interpolation": ("args: {load: '${args.save}'}\n", "args.load=.* resolved values only"),
    "aliases": (LAUGHS, r"more than 100000 values once aliases \(\*name\)"),
    "itself": ("a: &a [*a]\n", "nested more than 50 levels deep"),
    "a command": ("model: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
    "a list": ("[1]\n", "not a list"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_of_a_run_is_plain_wherever_it_is_read(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text, match = HOSTILE[kind]
    run = tmp_path / "run"
    run.mkdir()
    file = run / "training_config.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=match):
        read_yaml(file, str(file), is_plain=True)
    assert main(["sample", str(run), "--prompt", "a", "--out", str(tmp_path / "out")]) == 2
    shown = capfd.readouterr().err
    assert "cogfast: " in shown and os.environ["HOME"] not in shown.replace(str(tmp_path), "")
    shutil.rmtree(run)
