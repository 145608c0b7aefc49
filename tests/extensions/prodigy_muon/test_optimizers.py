"""Prodigy and Muon against their papers in float64, and runs of several ranks against those of one process."""

import json
import math
from collections.abc import Iterable, Iterator

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cogfast.distributed.fused_step import Piece
from cogfast.extensions.memory.host_ema import HostEma
from cogfast.extensions.prodigy_muon.optimizers import Muon, Prodigy
from tests.support.layouts import assert_equal_training, launch, numbers
from tests.support.runs import Run

STEPS, SAVED_AT = 5, 3
BETAS, EPS = (0.9, 0.95), 1e-8


def gradient(x: Tensor, step: int) -> Tensor:
    """The gradient of a quadratic function around a target, with noise that is the same in any run."""
    noise = torch.randn(len(x), generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return (x - torch.linspace(-1, 2, len(x))) * torch.linspace(0.1, 1, len(x)) + 0.05 * noise


def prodigy_by_the_paper(
    x: Tensor,
    lrs: list[float],
    *,
    beta3: float,
    decay: float = 0.0,
    decouple: bool = True,
    use_bias_correction: bool = False,
    safeguard_warmup: bool = False,
    d0: float,
    d_coef: float = 1.0,
    growth_rate: float = math.inf,
) -> Iterator[tuple[Tensor, float]]:
    """Yield x and d after each step, float64, with the sums r and s of the paper without its d0."""
    (beta1, beta2), d, d_max = BETAS, d0, d0
    x0, m, v, s = x.clone(), torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    r, done = 0.0, 0
    for step, factor in enumerate(lrs):
        if factor == 0:
            yield x, d
            continue
        g = gradient(x, step)
        if not decouple:
            g = g + decay * x
        rate = factor
        if use_bias_correction:
            rate *= (1 - beta2 ** (done + 1)) ** 0.5 / (1 - beta1 ** (done + 1))
        r = beta3 * r + d * d * rate * torch.dot(g, x0 - x).item()
        s = beta3 * s + d * d * (1.0 if safeguard_warmup else rate) * g
        m = beta1 * m + (1 - beta1) * d * g
        v = beta2 * v + (1 - beta2) * (d * g) ** 2
        estimate = d_coef * r / s.abs().sum().item()
        new = max(d, estimate) if d == d0 else d
        d_max = max(d_max, estimate)
        new = min(d_max, new * growth_rate)
        if decouple:
            x = x - d * rate * decay * x
        x = x - d * rate * m / (v.sqrt() + new * EPS)
        d, done = new, done + 1
        yield x, d


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"decouple": False, "beta3": 0.98, "decay": 0.1}, id="CogVideo's trainer"),
        pytest.param(
            {"use_bias_correction": True, "safeguard_warmup": True, "decay": 0.1, "d_coef": 2.0},
            id="corrected",
        ),
        pytest.param({"growth_rate": 1.5, "d0": 1e-3}, id="slow growth"),
    ],
)
def test_prodigy_equals_its_paper(options: dict) -> None:
    """With a warm-up from 0, a skipped step, clipping, groups without decay and 16-bit copies."""
    lrs = [0.0, 0.25, 0.5, *[1.0] * 27]
    start = torch.linspace(0.1, -0.1, 30, dtype=torch.float64)
    decay = options.get("decay", 0.0)
    # Steps far above the rounding of float32 weights, which the estimate would amplify.
    given = {"d0": 1e-4} | {k: v for k, v in options.items() if k != "decay"}
    parts = [nn.Parameter(start[:11].float()), nn.Parameter(start[11:].float())]
    optimizer = Prodigy([{"params": [p]} for p in parts], 1.0, BETAS, weight_decay=decay, **given)
    optimizer.low_precision_copies = {p: torch.zeros(p.shape, dtype=torch.bfloat16) for p in parts}
    wanted = prodigy_by_the_paper(
        start, lrs, **{"beta3": math.sqrt(BETAS[1]), **given, "decay": decay}
    )
    for step, (lr, (x, d)) in enumerate(zip(lrs, wanted, strict=True)):
        for group in optimizer.param_groups:
            group["lr"] = lr
        got = torch.cat([p.detach() for p in parts])
        for is_skipped in (True, False) if step == 7 else (False,):
            values = torch.full((30,), math.nan) if is_skipped else 4 * gradient(got, step).float()
            parts[0].grad, parts[1].grad = values[:11], values[11:]
            optimizer.gradient_scale = torch.tensor(0.25)
            optimizer.found_inf = torch.tensor(float(is_skipped))
            optimizer.step()
        got = torch.cat([p.detach() for p in parts])
        torch.testing.assert_close(got, x.float(), rtol=1e-3, atol=1e-5)
        assert optimizer.state_of(parts[1])["d"].item() == pytest.approx(d, rel=1e-3)
    assert d > 1e-3  # far from where it began
    for p, copy in optimizer.low_precision_copies.items():
        assert torch.equal(copy, p.detach().bfloat16())


def test_a_rank_that_owns_no_element_of_the_first_parameter_keeps_the_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a resume it has the counters of what it owns alone."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: None)  # one rank
    absent, owned = (torch.ones(3, requires_grad=True) for _ in range(2))
    optimizer = Prodigy([{"params": [absent]}, {"params": [owned]}], lr=1.0)
    pieces = {absent: Piece(0, 0, 0, absent.shape, None, True)}
    pieces[owned] = Piece(0, 3, 0, owned.shape, None, True)
    optimizer.pieces = {p: [piece] for p, piece in pieces.items()}
    state = optimizer.state_of(owned)
    for key in ("d", "d_max"):
        state[key].fill_(0.5)
    state["s"].fill_(1.0)
    for p in (absent, owned):
        p.grad = torch.full((3,), 0.1)
    optimizer.step()
    assert [optimizer.state_of(p)["d"].item() for p in (absent, owned)] == [0.5, 0.5]


def muon_by_the_papers(
    x: Tensor, gradients: list[Tensor], lr: float, decay: float, momentum: float, nesterov: bool
) -> Tensor:
    """Return a matrix after as many steps, with the quintic applied to singular values."""
    m = torch.zeros_like(x)
    for g in gradients:
        m = momentum * m + g
        u, s, v = torch.linalg.svd(momentum * m + g if nesterov else m, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        assert 0.6 < s[0] < 1.3  # near 1
        x = (1 - lr * decay) * x - lr * 0.2 * max(x.shape) ** 0.5 * (u * s) @ v
    return x


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_its_papers(nesterov: bool) -> None:
    """Matrices that are wide, tall and packed; the other parameters have AdamW's update. Skipped steps."""
    lr, decay, momentum, random = 0.1, 0.3, 0.9, torch.Generator().manual_seed(0)
    shapes = {"wide": (6, 20), "tall": (20, 6), "packed": (3 * 8, 8), "bias": (9,)}
    draw = lambda shape: torch.randn(*shape, generator=random)
    weights = {name: nn.Parameter(draw(shape)) for name, shape in shapes.items()}
    start = {name: p.detach().clone() for name, p in weights.items()}
    groups = [
        {"params": [weights["bias"]], "weight_decay": 0.0},
        {"params": [weights["wide"], weights["tall"]], "num_parts": 1},
        {"params": [weights["packed"]], "num_parts": 3},
    ]
    optimizer = Muon(groups, lr, momentum, nesterov, weight_decay=decay, ema_decay=0.5)
    copies = {p: torch.zeros(p.shape, dtype=torch.bfloat16) for p in weights.values()}
    optimizer.low_precision_copies, optimizer.gradient_scale = copies, torch.tensor(0.25)
    gradients: dict[str, list[Tensor]] = {name: [] for name in shapes}
    ema = {name: x.clone() for name, x in start.items()}
    for step in range(6):
        optimizer.found_inf = torch.tensor(float(step == 3))
        for name, p in weights.items():
            p.grad = torch.full(p.shape, math.nan) if step == 3 else draw(p.shape)
            gradients[name] += [] if step == 3 else [p.grad.double()]
        optimizer.step()
        if step != 3:
            number = len(gradients["bias"])
            for name, p in weights.items():
                ema[name].lerp_(p.detach(), max(0.5, 9 / (10 + number)))
    options = lr, decay, momentum, nesterov
    for name in ("wide", "tall", "packed"):
        num_parts = 3 if name == "packed" else 1
        pieces = zip(*(x.chunk(num_parts) for x in [start[name], *gradients[name]]), strict=True)
        wanted = torch.cat([muon_by_the_papers(x.double(), g, *options) for x, *g in pieces])
        torch.testing.assert_close(weights[name].detach(), wanted.float(), rtol=1e-4, atol=1e-4)
        assert set(optimizer.state[weights[name]]) == {"exp_avg", "shadow", "step"}
    bias = nn.Parameter(start["bias"])
    adam = torch.optim.AdamW([bias], lr, betas=(0.9, 0.95), weight_decay=0.0)
    for g in gradients["bias"]:
        bias.grad = 0.25 * g.float()
        adam.step()
    torch.testing.assert_close(weights["bias"].detach(), bias.detach(), rtol=1e-5, atol=1e-6)
    for name, p in weights.items():
        torch.testing.assert_close(optimizer.state[p]["shadow"], ema[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(copies[p], p.detach().bfloat16())


PRODIGY = ["deepspeed.optimizer.type=Prodigy", "args.lr=1", "deepspeed.optimizer.params.d0=1e-4"]
STAGE, MICRO = "deepspeed.zero_optimization.stage", "deepspeed.train_micro_batch_size_per_gpu"
ACCUMULATION = "deepspeed.gradient_accumulation_steps"
TENSOR, CONTEXT = "args.model_parallel_size=2", "args.context_parallel_size=2"
LAYOUTS = {  # ranks and arguments; a step has 4 samples
    "ZeRO-2": (2, [f"{MICRO}=2"]),
    "tp 2": (2, [TENSOR]),
    "ZeRO-1": (2, [f"{STAGE}=1", f"{MICRO}=2"]),
    "ZeRO-0, accumulating": (2, [f"{STAGE}=0", f"{MICRO}=1", f"{ACCUMULATION}=2"]),
    "cp 2": (2, [CONTEXT]),
    "dp 2 x tp 2": (4, [f"{MICRO}=2", TENSOR]),
    "dp 4": (4, [f"{MICRO}=1"]),
}
QUICK = ("ZeRO-2", "tp 2")
RESUMED = {"ZeRO-2": "ZeRO-2", "dp 2 x tp 2": "one process"}  # and from which layout
OPTIMIZERS = {"Prodigy": PRODIGY, "Muon": ["deepspeed.optimizer.type=Muon"]}


def everywhere(layouts: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize a test by layout; those that are not quick are marked soak."""
    soak = lambda name: [] if name in QUICK else pytest.mark.soak
    return pytest.mark.parametrize("layout", [pytest.param(n, marks=soak(n)) for n in layouts])


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, shared_run: Run) -> dict[str, Run]:
    """Return a run of one process per optimizer, one of each tested layout, and resumed ones."""
    mine = (item for item in request.session.items if item.module is request.module)
    tested = {item.callspec.params["layout"] for item in mine if "runs" in item.fixturenames}
    plain = shared_run.with_args(train_iters=STEPS, save_interval=SAVED_AT, keep_last=0)
    folder, found = shared_run.folder, {}
    steps: dict[int, list] = {}
    for optimizer, words in OPTIMIZERS.items():
        run = plain.with_words(*words, "deepspeed.gradient_clipping=0.28")
        name = f"{optimizer}, one process"
        found[name] = run.into(folder / name).train()
        for layout in sorted(tested):
            (ranks, more), name = LAYOUTS[layout], f"{optimizer}, {layout}"
            found[name] = run.with_words(*more).into(folder / name)
            steps.setdefault(ranks, []).append(found[name])
            if layout in RESUMED:
                again, source = folder / f"{name}, resumed", f"{optimizer}, {RESUMED[layout]}"
                found[again.name] = run.with_words(*more).into(again)
                resumed = found[again.name].with_words(f"args.resume={again / 'run'}")
                copied = ["copy", str(folder / source), f"{SAVED_AT:08d}", str(again / "run")]
                steps[ranks] += [copied, resumed]
    for ranks, of_ranks in steps.items():
        launch(ranks, of_ranks)
    return found


@pytest.mark.slow
@everywhere(LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_train_as_one(runs: dict[str, Run], optimizer: str, layout: str) -> None:
    found, one = (runs[f"{optimizer}, {name}"] for name in (layout, "one process"))
    assert len(one.losses) == STEPS
    assert_equal_training(found.path, one.path)


@pytest.mark.slow
@everywhere(RESUMED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_is_the_same(runs: dict[str, Run], optimizer: str, layout: str) -> None:
    """Bit for bit in the same layout, and up to rounding in another one."""
    again = runs[f"{optimizer}, {layout}, resumed"].path
    whole = runs[f"{optimizer}, {RESUMED[layout]}"].path
    assert len(numbers(again, "loss")) == STEPS - SAVED_AT
    assert_equal_training(again, whole, SAVED_AT)
    if RESUMED[layout] != layout:
        return
    files = sorted((whole / f"checkpoints/{STEPS:08d}").glob("*.safetensors"))
    assert len(files) == LAYOUTS[layout][0]
    for file in files:
        one, other = load_file(file), load_file(again / f"checkpoints/{STEPS:08d}" / file.name)
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in one.items())
    counters = [
        json.loads((run / f"checkpoints/{STEPS:08d}/manifest.json").read_text())["counters"]
        for run in (whole, again)
    ]
    assert counters[0] == counters[1]


@pytest.mark.parametrize("use_num_updates", [True, False])
def test_muons_average_in_host_memory_has_the_bits_of_the_devices(use_num_updates: bool) -> None:
    found = []
    for is_elsewhere in (True, False):
        torch.manual_seed(0)
        matrix, bias = (nn.Parameter(torch.randn(size)) for size in ((12, 8), (12,)))
        groups = [{"params": [matrix], "num_parts": 1}, {"params": [bias]}]
        optimizer = Muon(groups, 0.1)
        optimizer.use_num_updates = use_num_updates
        optimizer.other_ema = HostEma() if is_elsewhere else None
        for _ in range(5):
            for parameter in (matrix, bias):
                parameter.grad = torch.randn(parameter.shape)
            optimizer.step()
        if optimizer.other_ema is not None:
            optimizer.other_ema.wait()
        found.append([optimizer.state[p]["shadow"] for p in (matrix, bias)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
