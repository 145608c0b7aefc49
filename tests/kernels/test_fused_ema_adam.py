"""FusedEmaAdam against stored and computed float64 numbers; its counters and skipped steps; the sum of
squares of the gradient's norm. test_ema_adam_kernel.py has the table of the Triton kernels."""

import itertools

import pytest
import torch
from safetensors.torch import load_file

from cogfast.kernels.fused_ema_adam import FusedEmaAdam, fused_ema_adam_reference, sum_of_squares
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS

HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
NAMES = {"p": None, "m": "exp_avg", "v": "exp_avg_sq", "shadow": "shadow"}


def without_kernel(monkeypatch):
    """Let FusedEmaAdam update CPU tensors as if the C++ library were not compiled."""
    monkeypatch.setattr("cogfast.kernels.torch_library.HAS_CPU_KERNELS", False)


@pytest.fixture(params=[pytest.param("cpu", marks=NEEDS_CPU_KERNELS), "torch", "triton"])
def build(request):
    """Build a FusedEmaAdam that updates CPU tensors by the C++ kernel, by PyTorch's ops, or by the
    interpreted Triton kernels."""

    def build(*arguments, **options):
        optimizer = FusedEmaAdam(*arguments, **options)
        if request.param in ("torch", "triton"):
            optimizer._update_on_cpu = vars(FusedEmaAdam)[f"_update_with_{request.param}"].__get__(
                optimizer
            )
        return optimizer

    build.on = request.param
    return build


def close(actual, expected):
    torch.testing.assert_close(actual.detach().double(), expected, rtol=1e-6, atol=1e-7)


def run(optimizer, params, grads):
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()


def random_case(shapes, num_steps=5):
    generator = torch.Generator().manual_seed(0)
    draw = lambda: [torch.randn(s, generator=generator) for s in shapes]
    return [p.requires_grad_() for p in draw()], [draw() for _ in range(num_steps)]


def reference(p, grads, *, num_updates=True, adam_w_mode=True, **hyper):
    """Compute p, m, v and shadow after all of `grads` in float64."""
    p = p.detach().double().clone()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    shadow = p.clone()
    for t, g in enumerate(grads, 1):
        decay = min(0.9999, (1 + t) / (10 + t)) if num_updates else 0.9999
        options = {"adam_w_mode": adam_w_mode, "step": t, "ema_decay": decay, **HYPER, **hyper}
        fused_ema_adam_reference(p, g.double(), m, v, shadow, **options)
    return {"p": p, "exp_avg": m, "exp_avg_sq": v, "shadow": shadow}


def assert_equal_reference(optimizer, params, expected):
    """Compare weights, moments and EMA of all parameters with what `reference` returned for each."""
    for p, e in zip(params, expected, strict=True):
        close(p, e["p"])
        for name in ("exp_avg", "exp_avg_sq", "shadow"):
            close(optimizer.state[p][name], e[name])


@pytest.mark.parametrize(
    ("adam_w_mode", "num_updates", "bias_correction"),
    [
        (True, True, True),
        (True, True, False),
        (True, False, True),
        (False, True, True),
        (False, False, True),
    ],
    ids=["adamw", "unbiased", "adamw-constant", "adam", "adam-constant"],
)
def test_equals_the_stored_float64_numbers(
    golden, build, adam_w_mode, num_updates, bias_correction
):
    stored = load_file(golden / "fused_ema_adam" / "golden_f64.safetensors")
    key = f"adamw_{adam_w_mode}.num_updates_{num_updates}.bias_correction_{bias_correction}."
    p = stored["p0"].float().requires_grad_()
    optimizer = build(
        [p],
        bias_correction=bias_correction,
        adam_w_mode=adam_w_mode,
        use_num_upates=num_updates,
        **HYPER,
    )
    for i, grad in enumerate(stored["grads"]):
        p.grad = grad.float()
        optimizer.step()
        for name, state in NAMES.items():
            if key + name in stored:
                close(p if state is None else optimizer.state[p][state], stored[key + name][i])
    assert optimizer.state[p]["step"] == 5


def test_flat_tensor_longer_than_a_chunk(monkeypatch):
    """4,099 elements in chunks of 64, of which the last has 3."""
    without_kernel(monkeypatch)
    monkeypatch.setattr("cogfast.kernels.fused_ema_adam._CPU_CHUNK", 64)
    params, grads = random_case([(4099,)])
    expected = [reference(params[0], [g[0] for g in grads])]
    optimizer = FusedEmaAdam(params, **HYPER)
    run(optimizer, params, grads)
    assert_equal_reference(optimizer, params, expected)


def test_averaged_lends_the_ema(build):
    """Weights and their 16-bit copies are the EMA's within the block, and bit for bit as before after it,
    also after an error; the EMA and the next steps do not change."""
    params, grads = random_case([(7, 3), (5,), (11,)], num_steps=4)
    grads = [[*step[:2], None] for step in grads]  # the third is never updated: it has no EMA
    runs = [[p.detach().clone().requires_grad_() for p in params] for _ in range(2)]
    plain, lending = (build(each, **HYPER) for each in runs)
    copy = runs[1][0].detach().bfloat16()
    lending.low_precision_copies[runs[1][0]] = copy
    run(plain, runs[0], grads[:2])
    run(lending, runs[1], grads[:2])
    before = [p.detach().clone() for p in (*runs[1], copy)]
    shadows = [lending.state[p]["shadow"].clone() for p in runs[1][:2]]
    assert not torch.equal(before[0], shadows[0])
    with pytest.raises(KeyError, match="planted"), lending.averaged():
        for p, shadow in zip(runs[1], [*shadows, before[2]], strict=True):
            assert torch.equal(p, shadow)
        assert torch.equal(copy, shadows[0].bfloat16())
        raise KeyError("planted")
    for p, own in zip((*runs[1], copy), before, strict=True):
        assert torch.equal(p, own)
    run(plain, runs[0], grads[2:])
    run(lending, runs[1], grads[2:])
    for p, other in zip(*runs, strict=True):
        assert torch.equal(p, other)
    assert torch.equal(plain.state[runs[0][0]]["shadow"], lending.state[runs[1][0]]["shadow"])


def test_each_parameter_counts_its_own_steps(build):
    """A parameter without a gradient is not changed, nor is the bias correction of the rest."""
    params, grads = random_case([(7, 3), (5,), (11,)])
    for step in (0, 2, 3):
        grads[step][1] = None
    grads[4][2] = None
    expected = [
        reference(p, [g[i] for g in grads if g[i] is not None]) for i, p in enumerate(params)
    ]
    optimizer = build([{"params": params[:2]}, {"params": params[2:]}], **HYPER)
    run(optimizer, params, grads)
    assert [int(optimizer.state[p]["step"]) for p in params] == [5, 2, 4]
    assert_equal_reference(optimizer, params, expected)


def test_groups_stepped_one_by_one_count_once(build):
    """DeepSpeed calls step() once per group, which makes SAT's EMA warm up twice as fast."""
    params, grads = random_case([(6,), (4,)])
    other = {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-4, "betas": (0.5, 0.9)}
    expected = [reference(params[0], [g[0] for g in grads])]
    expected.append(reference(params[1], [g[1] for g in grads], **other))
    optimizer = build([{"params": params[:1]}, {"params": params[1:], **other}], **HYPER)
    groups = optimizer.param_groups
    for step in grads:
        for group, p, g in zip(groups, params, step, strict=True):
            p.grad, optimizer.param_groups = g.clone(), [group]
            optimizer.step()
            p.grad = None
    assert_equal_reference(optimizer, params, expected)


def test_tensors_that_are_not_contiguous(build):
    base, grads = random_case([(6, 8)])
    p = base[0].detach().t().requires_grad_()
    grads = [[g[0].t()] for g in grads]
    expected = reference(p, [g[0] for g in grads])
    optimizer = build([p], **HYPER)
    run(optimizer, [p], grads)
    assert not p.is_contiguous()
    assert_equal_reference(optimizer, [p], [expected])


def test_found_inf_skips_the_step_and_its_counters(build):
    params, grads = random_case([(6,), (3, 4)], num_steps=6)
    expected = [
        reference(p, [g[i] for j, g in enumerate(grads) if j not in (0, 3)])
        for i, p in enumerate(params)
    ]
    for bad in (grads[0], grads[3]):
        bad[0][2], bad[1][0] = float("inf"), float("nan")
    optimizer = build(params, **HYPER)
    for j, step in enumerate(grads):
        optimizer.found_inf = torch.tensor(float(j in (0, 3)))
        run(optimizer, params, [step])
    assert_equal_reference(optimizer, params, expected)


@torch.no_grad()
def test_ema_weight_late_in_a_run(build):
    """1 - d keeps float32's precision although d itself is close to 1."""
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.zeros(3)
    optimizer = build([p], lr=0.0, ema_decay=0.9999)
    state, group = optimizer.state_of(p), optimizer.param_groups[0]
    for t, weight in ((1000, 9 / 1010), (10**6, 1e-4)):
        state["step"].fill_(t - 1)
        state["shadow"].zero_()
        optimizer._update_on_cpu([p], group)
        assert state["shadow"].tolist() == pytest.approx([weight] * 3, rel=2e-7)


def test_state_filled_in_by_a_resumed_run(build):
    """The trainer writes state before the first step; its counters may be plain numbers."""
    params, grads = random_case([(6,)], num_steps=4)
    optimizer = build(params, **HYPER)
    run(optimizer, params, grads[:2])
    q = params[0].detach().clone().requires_grad_()
    other = build([q], **HYPER)
    other.state[q] = {k: v.clone() for k, v in optimizer.state[params[0]].items()} | {"step": 2}
    run(optimizer, params, grads[2:])
    run(other, [q], grads[2:])
    assert torch.equal(params[0], q) and other.state[q]["step"] == 4
    assert torch.equal(optimizer.state[params[0]]["shadow"], other.state[q]["shadow"])


@pytest.mark.parametrize("keyword", ["use_num_updates", "use_num_upates"])
def test_both_spellings_turn_the_warm_up_off(keyword):
    params, grads = random_case([(6,)])
    expected = reference(params[0], [g[0] for g in grads], num_updates=False)
    optimizer = FusedEmaAdam(params, **HYPER, **{keyword: False})
    run(optimizer, params, grads)
    close(optimizer.state[params[0]]["shadow"], expected["shadow"])


def test_gradient_scale_and_learning_rate_as_tensors(build):
    """A clip factor and a changing learning rate, both on the parameters' device."""
    params, grads = random_case([(40,), (3, 7)])
    expected = [reference(p, [0.25 * g[i] for g in grads], lr=2e-3) for i, p in enumerate(params)]
    optimizer = build(params, **HYPER)
    optimizer.gradient_scale = torch.tensor(0.25)
    optimizer.param_groups[0]["lr"] = torch.tensor(2e-3)
    run(optimizer, params, grads)
    assert_equal_reference(optimizer, params, expected)
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads[-1], strict=True))


def test_low_precision_copies(build):
    """Some parameters have copies; a skipped step does not change them."""
    params, grads = random_case([(40,), (3, 7), (6, 5)])
    params[2] = params[2].detach().t().requires_grad_()  # strided
    grads = [[a, b, c.t()] for a, b, c in grads]
    optimizer = build(params, **HYPER)
    copies = [torch.full(p.shape, 7.0, dtype=torch.bfloat16) for p in (params[0], params[2])]
    optimizer.low_precision_copies = {params[0]: copies[0], params[2]: copies[1]}
    optimizer.found_inf = torch.ones(())
    run(optimizer, params, grads[:1])
    assert all(torch.equal(c, torch.full_like(c, 7.0)) for c in copies)
    optimizer.found_inf = torch.zeros(())
    run(optimizer, params, grads)
    for p, c in ((params[0], copies[0]), (params[2], copies[1])):
        # One unit in the last place: the interpreter truncates.
        torch.testing.assert_close(c.float(), p.float(), rtol=2**-7, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_non_finite_gradients_propagate(build):
    """If no flag is given, there is NaN where Adam gives NaN, and nowhere else."""
    params, grads = random_case([(1030,)], num_steps=2)
    for index, value in ((3, float("inf")), (1000, float("nan")), (1029, -float("inf"))):
        grads[0][0][index] = value
    expected = reference(params[0], [g[0] for g in grads])
    optimizer = build(params, **HYPER)
    run(optimizer, params, grads)
    for name, actual in optimizer.state[params[0]].items():
        if name != "step":
            torch.testing.assert_close(
                actual.double(), expected[name], rtol=1e-6, atol=1e-7, equal_nan=True
            )
    assert expected["shadow"].isnan().nonzero().flatten().tolist() == [3, 1000, 1029]
    assert torch.equal(params[0].isnan(), expected["p"].isnan())


def test_autograd_notices_new_weights_and_copies(build):
    """A graph that saved the old weights must not give gradients with the new ones. The copies are the
    weights that a model in bf16 trains with."""
    p, weight = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    optimizer = build([p])
    optimizer.low_precision_copies[p] = weight.detach()
    losses = p.square().sum(), weight.square().sum()
    optimizer.step()
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- on a CPU ---

# Empty, one element, less than a vector, a piece and one more, several pieces.
LENGTHS = (0, 1, 7, 4096, 4097, 8203)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_all_lengths_and_dtypes_equal_float64(adam_w_mode, build):
    """Every combination of dtypes of weights, gradients and copies, with a scale of the gradients."""
    lengths = (0, 1, 7, 4097) if build.on != "triton" else (0, 7)
    kinds = list(itertools.product(lengths, DTYPES, DTYPES, (None, *DTYPES)))
    start, (grads,) = random_case([n for n, *_ in kinds], num_steps=1)
    params, copies = [], {}
    for i, (p, (n, dtype, gradient, copy)) in enumerate(zip(start, kinds, strict=True)):
        params.append(p.detach().to(dtype).requires_grad_())
        params[i].grad_dtype = None
        grads[i] = grads[i].to(gradient)
        if copy is not None:
            copies[params[i]] = torch.zeros(n, dtype=copy)
    options = {**HYPER, "adam_w_mode": adam_w_mode}
    expected = [
        reference(p, [0.7 * g.double()], **options) for p, g in zip(params, grads, strict=True)
    ]
    optimizer = build(params, **options)
    optimizer.low_precision_copies = copies
    optimizer.gradient_scale = torch.tensor(0.7)
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer.step()
    for p, want in zip(params, expected, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "shadow"):
            close(optimizer.state[p][name], want[name])
        for x in (p, *([copies[p]] if p in copies else [])):
            # Half a unit in the last place, and the float32 arithmetic before. The interpreter truncates.
            unit = 0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
            rtol = (unit if build.on == "triton" else unit / 2) + 1e-6
            torch.testing.assert_close(x.detach().double(), want["p"], rtol=rtol, atol=1e-6)


@NEEDS_CPU_KERNELS
def test_the_cpu_kernel_refuses_state_of_another_shape_or_dtype():
    p = torch.ones(4, requires_grad=True)
    p.grad = torch.ones(4)
    for name, wrong in (("exp_avg", torch.zeros(3)), ("shadow", torch.zeros(4).double())):
        optimizer = FusedEmaAdam([p])
        optimizer.state_of(p)[name] = wrong
        with pytest.raises(RuntimeError, match="must be"):
            optimizer.step()
        assert optimizer.state[p]["step"] == 0 and torch.equal(p.detach(), torch.ones(4))


@pytest.mark.parametrize("on", [pytest.param("cpu", marks=NEEDS_CPU_KERNELS), "plain"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
def test_sum_of_squares(on, dtype, monkeypatch):
    """All tensors in one call, in float64, where float32 would overflow, too."""
    if on == "plain":
        without_kernel(monkeypatch)
    tensors = [g.to(dtype) for g in random_case(LENGTHS)[1][0]]
    tensors += [torch.full((3, 5), 1e25, dtype=dtype)[:, ::2], torch.randn(6, 4).to(dtype).t()]
    got = sum_of_squares(tensors)
    want = sum(x.double().square().sum() for x in tensors)
    assert got.dtype == torch.float64 and got.shape == ()
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)
    for x in tensors[:6]:  # without the large ones, which hide the rest
        torch.testing.assert_close(
            sum_of_squares([x]), x.double().square().sum(), rtol=1e-13, atol=0
        )


def test_sum_of_squares_of_other_tensors():
    """Half precision, non-finite numbers and no tensor at all."""
    half = torch.randn(50, generator=torch.Generator().manual_seed(1)).half()
    want = half.double().square().sum() + 2
    torch.testing.assert_close(sum_of_squares([half, torch.ones(2)]), want)
    assert sum_of_squares([torch.ones(9), torch.tensor([float("nan")])]).isnan()
    assert sum_of_squares([torch.ones(40), torch.tensor([-float("inf")])]) == float("inf")
    assert sum_of_squares([]) == 0


@NEEDS_CPU_KERNELS
def test_opcheck():
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.cogfast.sum_of_squares, ([torch.ones(5), torch.ones(3)],), test_utils=tests
    )
    streams = [[torch.rand(5), torch.rand(3)] for _ in range(5)]
    copies = [torch.zeros(5).bfloat16(), None]
    numbers = {**HYPER, "beta1": 0.9, "beta2": 0.95, "ema_decay": 0.99, "gradient_scale": 0.5}
    del numbers["betas"]
    flags = dict.fromkeys(("bias_correction", "adam_w_mode", "use_num_updates"), True)
    steps = [torch.zeros(()), torch.zeros(())]
    arguments = (*streams, copies, [None, None], [None, None], steps)
    torch.library.opcheck(
        torch.ops.cogfast.ema_adam_, arguments, {**numbers, **flags}, test_utils=tests
    )
    average = (torch.rand(5), torch.rand(5), torch.tensor(0.5))
    torch.library.opcheck(torch.ops.cogfast.average_, average, test_utils=tests)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_8bit", [False, True])
def test_a_state_dict_is_loaded_in_its_own_dtypes(dtype: torch.dtype, is_8bit: bool) -> None:
    """Three steps, saving and loading, and three more are six steps, bit for bit."""
    start, runs = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype), []
    for is_cut in (False, True):
        p = torch.nn.Parameter(start.clone())
        optimizer = FusedEmaAdam([p], lr=1e-2, ema_decay=0.9)
        optimizer.has_8bit_moments = is_8bit
        for i in range(6):
            if is_cut and i == 3:
                state, p = optimizer.state_dict(), torch.nn.Parameter(p.detach().clone())
                optimizer = FusedEmaAdam([p], lr=1e-2, ema_decay=0.9)
                optimizer.has_8bit_moments = is_8bit
                optimizer.load_state_dict(state)
            p.grad = torch.randn(300, generator=torch.Generator().manual_seed(i)).to(dtype)
            optimizer.step()
        runs.append([p.detach(), *optimizer.state[p].values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_step_within_averaged_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedEmaAdam([p])
    p.grad = torch.ones(4)
    optimizer.step()
    with optimizer.averaged(), pytest.raises(RuntimeError, match=r"step\(\) within averaged"):
        optimizer.step()
    optimizer.step()
