"""decode_step of MoE layers with FP8 experts in emulation: numerics against the float64 oracle, the scales, schedules, refusals."""

import dataclasses

import pytest
import torch
from decode_step_cases import Runner, same_bits, with_subnormal_codes
from moe_cases import TINY_MOE, TINY_MOE_FP8, biased, moe_gate, run

from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.plan.static_plan import PlanError
from sgl_lowlatency.reference import moe_step
from sgl_lowlatency.reference.inputs import random_step, random_weights
from sgl_lowlatency.reference.plan_interpreter import PlanInterpreter

GRID = 6
FORMAT = "fp8_block"
FIXED = 11  # see test_decode_step_fp8.py
ROWS = (1, 5, 16)
LENGTHS = [65, 1, 300, 64, 2, 63, 100, 31, 32, 33, 15, 16, 17, 1, 127, 128]
WRONG_SCALE_BLOCK, GATE_SCALE_FOR_UP, PARTIAL_NO_WAIT = 13, 14, 22  # dialect::Planted


def check(name, rows, weights=None, planted=0, seed=0, grid=GRID, rows_per_request=1, **plan):
    """The gate's report of a step, or of four of few rows."""
    geometry = TINY_MOE_FP8[name]
    weights = weights or random_weights(geometry, FIXED, has_lm_head=True, weight_format=FORMAT)
    options = EmulationOptions(seed=seed, planted=planted)
    runner = Runner(geometry, weights, (rows,), grid, emulation=options, rows_per_request={rows: rows_per_request}, **plan)
    requests = rows // rows_per_request
    steps = [
        random_step(geometry, [length + rows_per_request for length in LENGTHS[:requests]], FIXED + i, rows_per_request=rows_per_request)
        for i in range(2 if rows <= 3 else 1)
    ]
    return moe_gate(geometry, weights, steps, [run(runner, step) for step in steps]), runner


@pytest.mark.parametrize(("name", "rows"), [*[(name, rows) for name in ("few", "many") for rows in ROWS], ("wide", 1), ("wide", 5), ("tall", 8)])
def test_gate(name, rows):
    report, _ = check(name, rows)
    assert report.passed, f"{name} rows {rows}\n{report}"


@pytest.mark.parametrize(("rows", "rows_per_request"), [(6, 6), (12, 3)])
def test_verify(rows, rows_per_request):
    report, _ = check("few", rows, rows_per_request=rows_per_request)
    assert report.passed, str(report)


@pytest.mark.parametrize("grid", [5, 8])
def test_any_grid(grid):
    report, _ = check("many", 5, grid=grid)
    assert report.passed, str(report)


def test_padded_rows_are_harmless():
    geometry = TINY_MOE_FP8["few"]
    weights = random_weights(geometry, FIXED, has_lm_head=True, weight_format=FORMAT)
    step = random_step(geometry, [65], FIXED, num_padded=2)
    report = moe_gate(geometry, weights, [step], [run(Runner(geometry, weights, (3,), GRID), step)])
    assert report.passed, str(report)


def test_a_step_of_padding_alone_reads_no_expert_and_no_scale():
    """NaN in either would show."""
    geometry = TINY_MOE_FP8["few"]
    weights = random_weights(geometry, FIXED, has_lm_head=True, weight_format=FORMAT)
    for layer in weights.layers:
        layer.gate_up_scale.fill_(float("nan"))
        layer.down_scale.fill_(float("nan"))
    runner = Runner(geometry, weights, (1,), GRID, emulation=EmulationOptions(check_order=True))
    assert bool(runner.run(random_step(geometry, [], FIXED, num_padded=1)).hidden.isfinite().all())
    assert runner.kernel.last_report.num_races == 0, "several such rows would race in the padding slot, as they may"


def test_activations_in_several_panels():
    report, runner = check("wide", 2, grid=13, panel_budget_bytes=2 * (1152 * 2 + 16))
    plan = runner.plans[2]
    assert report.passed, str(report)
    assert plan.panel_pairs < 2 * plan.geometry.top_k and plan.op("down").max_tiles > 1


@pytest.mark.parametrize("rows", [2, 16])
def test_all_rows_on_the_same_experts(rows):
    geometry = TINY_MOE_FP8["few"]
    weights = biased(geometry, random_weights(geometry, FIXED, has_lm_head=True), lambda token: [15, 14])
    quiet = random_weights(geometry, FIXED, has_lm_head=True, weight_format=FORMAT)
    layers = [
        dataclasses.replace(layer, router=other.router, post_norm=other.post_norm)
        for layer, other in zip(quiet.layers, weights.layers, strict=True)
    ]
    for layer in layers:
        layer.down_scale.mul_(0.05)
        layer.out_proj_scale.mul_(0.05)
    report, _ = check("few", rows, dataclasses.replace(weights, layers=layers))
    assert report.passed, str(report)


def test_subnormal_codes_count():
    geometry = TINY_MOE_FP8["few"]
    weights = with_subnormal_codes(random_weights(geometry, FIXED, has_lm_head=True, weight_format=FORMAT), FIXED)
    report, _ = check("few", 3, weights)
    assert report.passed, str(report)


@pytest.mark.parametrize("planted", [WRONG_SCALE_BLOCK, GATE_SCALE_FOR_UP])
def test_a_wrong_scale_misses_the_gate(planted):
    """By a margin. gate's scale for up is the experts' alone: the first layer's KV rows do not see it."""
    report, _ = check("few", 3, planted=planted)
    figures = {figure.output: figure for figure in report.figures}
    assert figures["hidden"].ratio > 10 and not figures["k_rows[1]"].passed
    assert figures["v_rows[0]"].passed == (planted == GATE_SCALE_FOR_UP)


def test_sglangs_own_error_is_several_times_ours():
    """SGLang rounds what it multiplies to FP8 as well; the gate's measure does not, and would let nothing of that size pass."""
    geometry = TINY_MOE_FP8["few"]
    weights, step = random_weights(geometry, FIXED, weight_format=FORMAT), random_step(geometry, LENGTHS[:5], FIXED)
    ours = run(Runner(geometry, weights, (5,), GRID), step)
    oracle = moe_step.decode_step(geometry, weights, step, choices=ours.choices).outputs.hidden
    sglang = moe_step.standard_step(geometry, weights, step, choices=ours.choices).outputs.hidden
    assert float((ours.outputs.hidden - oracle).norm()) * 4 < float((sglang - oracle).norm())


@pytest.mark.parametrize("seed", range(3))
def test_sums_that_do_not_wait_for_their_parts_miss_the_gate(seed):
    """Several tiles of gate_up are summed behind one barrier. With every schedule some warp's part is late."""
    assert TINY_MOE_FP8["few"].moe_intermediate // 8 * 2 / GRID > 2  # tiles of a block, of two experts at least
    try:
        report, _ = check("few", 3, planted=PARTIAL_NO_WAIT, seed=seed)
    except ValueError as error:  # what lay there before made NaN logits, which leave the oracle none to compare
        assert "is not finite" in str(error)
    else:
        figures = {figure.output: figure for figure in report.figures}
        assert not report.passed and figures["v_rows[0]"].passed


@pytest.mark.parametrize("starvation", range(4), ids=["even", "starved block", "starved warp", "favoured block"])
@pytest.mark.parametrize(("name", "rows"), [("few", 3)])
def test_no_race_and_the_same_bits_under_every_schedule(name, rows, starvation):
    geometry = TINY_MOE_FP8[name]
    weights, inputs = random_weights(geometry, FIXED, weight_format=FORMAT), random_step(geometry, LENGTHS[:rows], FIXED)
    options = EmulationOptions(check_order=True, starvation=starvation)
    runner, first = Runner(geometry, weights, (rows,), 5, emulation=options), None
    for seed in range(2):
        options.seed = seed
        outputs = runner.run(inputs)
        assert runner.kernel.last_report.num_races == 0, f"seed {seed}"
        first = first or outputs
        assert same_bits(outputs, first), f"seed {seed}"


def test_buffers_follow_the_plan_interpreter():
    geometry = TINY_MOE_FP8["few"]
    weights, inputs = random_weights(geometry, FIXED, weight_format=FORMAT), random_step(geometry, LENGTHS[:5], FIXED)
    runner = Runner(geometry, weights, (5,), GRID)
    runner.run(inputs)
    interpreter = PlanInterpreter(runner.plans[5], weights, inputs.clone())
    interpreter.run()
    for layer in range(geometry.num_layers):
        for name in ("qkv", "router_logits", "activation", "end_x"):
            ours, expected = (of.float() for of in (runner.kernel.buffer(name, 5, layer), interpreter.buffer(name, layer)))
            error = float((ours - expected).norm() / expected.norm())
            assert error < (1e-5 if (name, layer) == ("qkv", 0) else 1e-2), f"{name} of layer {layer} is {error:.1e} off"


def test_the_router_is_read_in_bf16():
    geometry = TINY_MOE_FP8["few"]
    weights = random_weights(geometry, FIXED, weight_format=FORMAT)
    plan = Runner(geometry, weights, (1,), GRID).plans[1]
    assert {op.name: op.element_bytes for op in plan.ops} == {"qkv": 1, "out_proj": 1, "router": 2, "gate_up": 1, "down": 1}
    object.__setattr__(weights.layers[1], "router", weights.layers[1].router.to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"layers\[1\].router: dtype torch.float8_e4m3fn is not torch.bfloat16"):
        Runner(geometry, weights, (1,), GRID)


def test_scales_of_rows_are_refused():
    geometry = TINY_MOE_FP8["few"]
    with pytest.raises(ValueError, match="MoE layers have scales of blocks, not of rows"):
        Runner(geometry, random_weights(geometry, FIXED, weight_format="fp8_channel"), (1,), GRID)


def test_channels_off_the_blocks_are_refused():
    with pytest.raises(PlanError, match="config.moe_intermediate_size 64 is not a multiple of 128"):
        Runner(TINY_MOE["few"], random_weights(TINY_MOE_FP8["few"], FIXED, weight_format=FORMAT), (1,), GRID)


def test_what_has_no_instance_is_refused_by_name():
    geometry = dataclasses.replace(TINY_MOE_FP8["few"], head_dim=64, num_q_heads=8, num_kv_heads=4)
    runner = Runner(geometry, random_weights(geometry, FIXED, weight_format=FORMAT), (1,), GRID)
    with pytest.raises(ValueError, match="of MoE layers in FP8, head_dim 64 is not 128"):
        runner.run(random_step(geometry, [3], FIXED))
