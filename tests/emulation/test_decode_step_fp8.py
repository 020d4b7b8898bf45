"""decode_step with FP8 weights, in emulation: the numerics gate on the dequantised weights, the same bits under every schedule, no race,
and planted bugs of the scales that turn red."""

import dataclasses
import math

import pytest
import torch
from decode_step_cases import CONTEXTS, MIXED, ROWS, Runner, gate, join, same_bits, with_subnormal_codes
from tiny_geometries import FAMILIES, TINY_FP8

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import MATRICES
from sgl_lowlatency.reference import dense_decode, standard_path
from sgl_lowlatency.reference.gate import compare
from sgl_lowlatency.reference.inputs import random_step, random_weights
from sgl_lowlatency.reference.plan_interpreter import PlanInterpreter

GRID = 6
FORMATS = ("fp8_block", "fp8_channel")
SMALL_PANEL_BYTES = 36 * 1024  # a stage's K of 16 rows, and little more
WRONG_SCALE_BLOCK, GATE_SCALE_FOR_UP, PARTIAL_NO_WAIT = 13, 14, 22  # dialect::Planted
FIXED = 11
# The inputs are the same in every run: the measure, SGLang's path without its rounding of activations, has its largest error in the few elements
# of one loud channel, and by luck a path as good has one more than twice as large for 1 in 100 seeds of 16 rows, whatever schedule or version of
# the kernel. bf16 shows none in 900. V rows have been compared in units of their scales since (the worst of 45 fresh seeds of 16 rows came to 1.05
# where it had been 1.42); hidden and K rows, 1.44 and 1.36 in these, have no such units.


def run(name, lengths, weight_format, seed, page_size=1, grid=GRID, panel_budget_bytes=64 * 1024, family="qwen3", planted=0):
    """(runner, steps, outputs): one step, or, so that few elements do not decide by luck, four steps of few rows."""
    geometry = TINY_FP8[name]
    weights = random_weights(geometry, seed, weight_format=weight_format, **FAMILIES[family])
    options = EmulationOptions(planted=planted)
    runner = Runner(geometry, weights, (len(lengths),), grid, panel_budget_bytes=panel_budget_bytes, emulation=options)
    steps = [random_step(geometry, lengths, seed + i, page_size=page_size) for i in range(4 if len(lengths) <= 3 else 1)]
    return runner, steps, [runner.run(step) for step in steps]


def check(name, lengths, weight_format, **options):
    runner, steps, outputs = run(name, lengths, weight_format, FIXED, **options)
    report = gate(runner.geometry, runner.weights, steps, outputs)
    assert report.passed, f"{name} {weight_format} lengths {lengths} seed {FIXED}\n{report}"
    return runner, steps, outputs


def value_of(code):
    """An e4m3 code's number, as the format defines it; its NaN codes continue the largest exponent."""
    sign, exponent, mantissa = -1.0 if code >= 128 else 1.0, code >> 3 & 15, code & 7
    return sign * (math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9))


def test_every_code_becomes_its_number_in_every_byte():
    result = _C.emulation_selftest("fp8_codes", 0)
    assert result["status"] == "ok"
    values = [value_of(code) for code in range(256)]
    of_torch = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()
    assert all(ours == theirs or theirs != theirs for ours, theirs in zip(values, of_torch))
    assert [code for code in range(256) if of_torch[code] != of_torch[code]] == [0x7F, 0xFF] and values[0x7F] == 480
    assert result["values"] == values * 4
    assert [math.copysign(1.0, value) for value in result["values"]] == [math.copysign(1.0, value) for value in values * 4]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_gate(weight_format, rows, context):
    check("group2", [context] * rows, weight_format)


@pytest.mark.parametrize("lengths", MIXED, ids=len)
@pytest.mark.parametrize("name", TINY_FP8)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_mixed_lengths(weight_format, name, lengths):
    check(name, lengths, weight_format)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_families_without_qk_norm(weight_format, family):
    check("group4", MIXED[1], weight_format, family=family)


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_pages(weight_format, page_size):
    check("group8", MIXED[1], weight_format, page_size=page_size)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_several_panels(weight_format, rows):
    runner, _, _ = check("group4", [65] * rows, weight_format, panel_budget_bytes=SMALL_PANEL_BYTES)
    if rows == 16:
        assert [op.num_panels for op in runner.plans[16].ops] == [2, 1, 2, 3]


@pytest.mark.parametrize("grid", [1, 5, 13, 40])
def test_any_grid(grid):
    check("group12", MIXED[1], "fp8_block", grid=grid)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_sglangs_own_error_is_several_times_ours(weight_format):
    """SGLang rounds the activations to FP8 as well; the gate's measure does not, and would let nothing of that size pass."""
    runner, steps, outputs = check("group4", MIXED[1], weight_format)
    arguments = runner.geometry, runner.weights
    oracle = join([dense_decode.decode_step(*arguments, step) for step in steps])
    sglang = join([standard_path.decode_step(*arguments, step) for step in steps])
    for figure in compare(join(outputs), sglang, oracle).figures:
        assert figure.ours_rel_l2 * 4 < figure.standard_rel_l2, str(figure)
    assert not gate(*arguments, steps, [sglang]).passed


@pytest.mark.parametrize("weight_format", FORMATS)
def test_subnormal_codes_count(weight_format):
    geometry = TINY_FP8["group2"]
    weights = with_subnormal_codes(random_weights(geometry, FIXED, weight_format=weight_format), FIXED)
    assert 0 < float(weights.layers[0].down.float().abs().max()) < 2.0**-6
    steps = [random_step(geometry, MIXED[0], FIXED + i) for i in range(4)]
    runner = Runner(geometry, weights, (3,), GRID)
    report = gate(geometry, weights, steps, [runner.run(step) for step in steps])
    assert report.passed, f"seed {FIXED}\n{report}"


@pytest.mark.parametrize(("planted", "weight_format"), [(WRONG_SCALE_BLOCK, "fp8_block"), *[(GATE_SCALE_FOR_UP, each) for each in FORMATS]])
@pytest.mark.parametrize("name", ["group2", "group4"])
def test_a_wrong_scale_misses_the_gate(name, planted, weight_format):
    """By a margin, and from where it acts: a wrong block of K at once, gate's scale for up behind the first layer's KV rows."""
    runner, steps, outputs = run(name, [65, 63, 300], weight_format, 21, planted=planted)
    figures = {figure.output: figure for figure in gate(runner.geometry, runner.weights, steps, outputs).figures}
    assert figures["hidden"].ratio > 10 and not figures["k_rows[1]"].passed and not figures["v_rows[1]"].passed
    assert figures["v_rows[0]"].passed == (planted == GATE_SCALE_FOR_UP)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["group2", "group4"])
def test_a_sum_that_does_not_wait_for_its_parts_misses_the_gate(name, seed):
    """Tiles are finished a tile late: their finishers await the other warps' parts. With every schedule one of them is late."""
    geometry = TINY_FP8[name]
    weights, step = random_weights(geometry, 11, weight_format="fp8_block"), random_step(geometry, [65, 3], 11)
    for planted, is_right in ((0, True), (PARTIAL_NO_WAIT, False)):
        runner = Runner(geometry, weights, (2,), 4, emulation=EmulationOptions(seed=seed, planted=planted))
        assert max(op.max_tiles for op in runner.plans[2].ops) > 2
        assert gate(geometry, weights, [step], [runner.run(step)]).passed == is_right


@pytest.mark.parametrize("starvation", range(4), ids=["even", "starved block", "starved warp", "favoured block"])
@pytest.mark.parametrize(
    ("name", "lengths", "weight_format"),
    [("group2", MIXED[2], "fp8_block"), ("group4", MIXED[0], "fp8_block"), ("group12", MIXED[1], "fp8_channel")],
)
def test_no_race_and_the_same_bits_under_every_schedule(name, lengths, weight_format, starvation):
    geometry = TINY_FP8[name]
    inputs = random_step(geometry, lengths, 11)
    options = EmulationOptions(check_order=True, starvation=starvation)
    weights = random_weights(geometry, 11, weight_format=weight_format)
    runner = Runner(geometry, weights, (len(lengths),), 5, panel_budget_bytes=SMALL_PANEL_BYTES, emulation=options)
    first = None
    for seed in range(4):
        options.seed = seed
        outputs = runner.run(inputs)
        assert runner.kernel.last_report.num_races == 0, f"seed {seed}"
        first = first or outputs
        assert same_bits(outputs, first), f"seed {seed}"


@pytest.mark.parametrize("weight_format", FORMATS)
def test_buffers_follow_the_plan_interpreter(weight_format):
    """Layer 0's qkv are those of the same plan run in torch to within the order of float32 sums, the rest to within bf16 rounding."""
    geometry = TINY_FP8["group4"]
    weights = random_weights(geometry, FIXED, weight_format=weight_format)
    inputs = random_step(geometry, MIXED[1], FIXED)
    runner = Runner(geometry, weights, (5,), GRID, panel_budget_bytes=SMALL_PANEL_BYTES)
    runner.run(inputs)
    interpreter = PlanInterpreter(runner.plans[5], weights, inputs.clone())
    interpreter.run()
    for layer in range(geometry.num_layers):
        for name in ("qkv", "attention_out", "mid_x", "activation", "end_x"):
            ours, expected = (of.float() for of in (runner.kernel.buffer(name, 5, layer), interpreter.buffer(name, layer)))
            error = float((ours - expected).norm() / expected.norm())
            assert error < (1e-5 if (name, layer) == ("qkv", 0) else 1e-2), f"{name} of layer {layer} is {error:.1e} off, seed {FIXED}"


def test_equal_codes_under_block_and_row_scales_are_one_model():
    """A scale that is the same in every block and row, and a power of two, is exact wherever it is applied: the same bits."""
    geometry, scale = TINY_FP8["group2"], 2.0**-12
    block = random_weights(geometry, 5, weight_format="fp8_block")
    of_rows = []
    for layer in block.layers:
        for name in MATRICES:
            getattr(layer, f"{name}_scale").fill_(scale)
        scales = {f"{name}_scale": torch.full(getattr(layer, name).shape[:1], scale) for name in MATRICES}
        of_rows.append(dataclasses.replace(layer, **scales))
    channel = dataclasses.replace(block, layers=of_rows)
    assert (block.format, channel.format) == FORMATS
    inputs = random_step(geometry, MIXED[1], 5)
    outputs = [Runner(geometry, weights, (5,), GRID).run(inputs) for weights in (block, channel)]
    assert same_bits(*outputs)


def test_plans_of_another_element_are_refused():
    geometry = TINY_FP8["group2"]
    runner = Runner(geometry, random_weights(geometry, 0), (1,), GRID)
    with pytest.raises(ValueError, match="the plans are not for fp8_block weights"):
        type(runner.kernel)(geometry, runner.plans, random_weights(geometry, 0, weight_format="fp8_block"), torch.device("cpu"), 1.0)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("down_scale", lambda scale: None, r"layers\[0\].down_scale: missing"),
        ("down_scale", lambda scale: scale.bfloat16(), r"layers\[0\].down_scale: dtype torch.bfloat16 is not torch.float32"),
        ("gate_up_scale", lambda scale: scale[1:], r"layers\[0\].gate_up_scale: shape \(5, 2\) is not \(6, 2\)"),
        ("out_proj", lambda weight: weight.bfloat16(), r"layers\[0\].out_proj: dtype torch.bfloat16 is not torch.float8_e4m3fn"),
        ("qkv", lambda weight: weight.T.contiguous().T, r"layers\[0\].qkv: strides .* are not contiguous"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(field, change, message):
    geometry = TINY_FP8["group2"]
    weights = random_weights(geometry, 0, weight_format="fp8_block")
    object.__setattr__(weights.layers[0], field, change(getattr(weights.layers[0], field)))
    with pytest.raises(ValueError, match=message):
        Runner(geometry, weights, (1,), GRID)


def test_scales_belong_to_fp8_weights_alone():
    geometry = TINY_FP8["group2"]
    weights = random_weights(geometry, 0)
    object.__setattr__(weights.layers[0], "qkv_scale", torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"layers\[0\].qkv_scale: a bf16 matrix has none"):
        Runner(geometry, weights, (1,), GRID)
