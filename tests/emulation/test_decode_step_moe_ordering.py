"""decode_step of MoE layers under the adversarial scheduler, with bugs planted in it, and with words that nobody hands over."""

import itertools
import re

import pytest
import torch
from decode_step_cases import Runner, lose_tile, same_bits
from moe_cases import TINY_MOE, deep_moe, moe_gate, run
from schedules import CLEAR_OVERTAKES, STARVATION, UNORDERED_CLEAR, races_of, require_the_same_under_every_schedule

from sgl_lowlatency import _C
from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import DecodeStepFault
from sgl_lowlatency.plan.static_plan import PlanError, make_plan
from sgl_lowlatency.reference.inputs import random_step, random_weights

LENGTHS = [65, 63, 300, 1, 17, 128, 2, 64, 33, 15, 16, 31, 32, 127, 129, 100]
MISSING_FENCE, MISSING_AWAIT, RING_NO_WAIT, TIE_TO_HIGHER_ID, SHIFTED_ROW_BITS, PLACE_COUNTS_ITSELF = 1, 2, 9, 15, 17, 18  # dialect::Planted
STALE_ROUTING, UNWEIGHTED_EXPERT, UNROUNDED_LOGITS, NEXT_EXPERT = 23, 24, 25, 26


@pytest.mark.parametrize("starvation", STARVATION.values(), ids=STARVATION.keys())
@pytest.mark.parametrize(("name", "rows"), [("few", 1), ("few", 16), ("many", 5), ("wide", 8), ("raw", 2), ("most", 5)])
def test_no_race_and_the_same_bits_under_every_schedule(name, rows, starvation):
    geometry = TINY_MOE[name]
    weights = random_weights(geometry, 11, has_lm_head=True)
    inputs = random_step(geometry, LENGTHS[:rows], 11)
    options = EmulationOptions(check_order=True, starvation=starvation)
    runner = Runner(geometry, weights, (rows,), 5, panel_budget_bytes=20 * 1024, emulation=options)
    require_the_same_under_every_schedule(runner, options, inputs)


@pytest.mark.parametrize("starvation", STARVATION.values(), ids=STARVATION.keys())
@pytest.mark.parametrize(("name", "rows_per_request", "prefixes"), [("few", 4, [14, 0]), ("many", 3, [65, 1, 300]), ("raw", 8, [17, 63])])
def test_verify_steps_have_no_race_and_the_same_bits_under_every_schedule(name, rows_per_request, prefixes, starvation):
    geometry, rows = TINY_MOE[name], rows_per_request * len(prefixes)
    inputs = random_step(geometry, prefixes, 11, rows_per_request=rows_per_request, lengths_are_prefix=True)
    options = EmulationOptions(check_order=True, starvation=starvation)
    runner = Runner(geometry, random_weights(geometry, 11), (rows,), 5, rows_per_request={rows: rows_per_request}, emulation=options)
    first = runner.run(inputs)
    for seed in range(1, 5):
        options.seed = seed
        assert same_bits(runner.run(inputs), first) and races_of(runner) == ([], 0), f"seed {seed}"


@pytest.mark.parametrize("grid", [1, 8])
@pytest.mark.parametrize("num_live", [0, 1])
def test_a_row_of_padding_has_no_race_under_every_schedule(num_live, grid):
    """Twelve layers, with experts or without any. One row of padding: several race in their slot, as they may."""
    geometry = deep_moe(12)
    inputs = random_step(geometry, LENGTHS[:num_live], 17, num_padded=1)
    options = EmulationOptions(check_order=True)
    runner = Runner(geometry, random_weights(geometry, 17), (num_live + 1,), grid, emulation=options)
    first = runner.run(inputs)
    for seed, starvation in itertools.product(range(3), STARVATION.values()):
        options.seed, options.starvation = seed, starvation
        assert same_bits(runner.run(inputs), first) and races_of(runner) == ([], 0), f"seed {seed}"


@pytest.mark.parametrize("grid", [1, 5, 8])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_generations_have_no_race_under_every_schedule(rows, grid):
    """Twelve layers, in which every generation comes twice."""
    geometry = deep_moe(12)
    weights = random_weights(geometry, 17)
    inputs = random_step(geometry, LENGTHS[:rows], 17)
    options = EmulationOptions(check_order=True)
    runner = Runner(geometry, weights, (rows,), grid, emulation=options)
    first = runner.run(inputs)
    for seed, starvation in itertools.product(range(3), STARVATION.values()):
        options.seed, options.starvation = seed, starvation
        assert same_bits(runner.run(inputs), first)
        assert races_of(runner) == ([], 0), f"seed {seed} starvation {starvation}"


def test_blocks_without_tiles_of_gate_up_have_no_race():
    """Fewer tiles than blocks: a router that sends all rows to one expert of few tiles leaves blocks with none of them."""
    geometry = deep_moe(12)
    geometry = type(geometry)(**{**vars(geometry), "top_k": 1, "hidden": 256, "num_q_heads": 4})
    weights = random_weights(geometry, 18)
    inputs = random_step(geometry, LENGTHS[:1], 18)
    options = EmulationOptions(check_order=True)
    runner = Runner(geometry, weights, (1,), 16, emulation=options)
    assert any(abi.even_share(geometry.moe_intermediate // 8, block, 16)[1] == 0 for block in range(16))
    first = runner.run(inputs)
    for seed, starvation in itertools.product(range(3), STARVATION.values()):
        options.seed, options.starvation = seed, starvation
        assert same_bits(runner.run(inputs), first)
        assert races_of(runner) == ([], 0), f"seed {seed} starvation {starvation}"


@pytest.mark.parametrize("num_layers", [1, 3, 4, 9])
def test_whatever_earlier_launches_left_is_cleared_before_it_is_used(num_layers):
    """Every word that the books call used holds foreign data, router logits included: none of it is taken for this launch's."""
    geometry = deep_moe(num_layers)
    runner = Runner(geometry, random_weights(geometry, 15), (5,), 6)
    inputs = random_step(geometry, LENGTHS[:5], 15)
    expected = runner.run(inputs)
    generation_words = runner.plans[5].generation_bytes // 4
    for turn in range(9):
        used = runner.kernel.sync_words(_C.abi.kUsedBytesOffset, abi.GENERATIONS)
        for generation, used_bytes in zip(runner.kernel.workspace.view(torch.int32).view(abi.GENERATIONS, generation_words), used, strict=True):
            generation[: used_bytes // 4] = 0x7F7F7F7F  # huge, in bf16 and in fp32
        assert same_bits(runner.run(inputs), expected), f"launch {turn}"


def planted(bug, seed=0, rows=5, name="raw", check_order=False, num_launches=1, geometry=None, equal_experts=False):
    """(runner, gate report) of a step with the bug in it, the last of some."""
    geometry = geometry or TINY_MOE[name]
    weights = random_weights(geometry, 21)
    if equal_experts:
        for layer in weights.layers:
            layer.router[1::2] = layer.router[0::2]
    inputs = random_step(geometry, LENGTHS[:rows], 21)
    runner = Runner(geometry, weights, (rows,), 5, deadline_s=0.5, emulation=EmulationOptions(seed=seed, planted=bug, check_order=check_order))
    for _ in range(num_launches - 1):
        runner.run(inputs)
    return runner, moe_gate(geometry, weights, [inputs], [run(runner, inputs)])


@pytest.mark.parametrize("name", TINY_MOE)
@pytest.mark.parametrize("seed", range(2))
def test_without_a_bug_everything_is_green(name, seed):
    runner, report = planted(0, seed, name=name, check_order=True, num_launches=2)
    assert report.passed, str(report)
    assert races_of(runner) == ([], 0)


@pytest.mark.parametrize(
    "bug",
    [UNWEIGHTED_EXPERT, SHIFTED_ROW_BITS, PLACE_COUNTS_ITSELF, NEXT_EXPERT],
    ids=["unweighted", "shifted row bits", "place counts itself", "next expert"],
)
@pytest.mark.parametrize("name", ["many", "raw"])
def test_wrong_routing_is_found(name, bug):
    """Wrong numbers, or work that does not fit together and ends the launch. Before the first MoE half nothing is blamed."""
    try:
        _, report = planted(bug, name=name)
    except (RuntimeError, DecodeStepFault) as error:
        assert bug not in (UNWEIGHTED_EXPERT, NEXT_EXPERT) and re.search("load_stage|waited|outside|mbarrier", str(error)), str(error)
    else:
        figures = {figure.output: figure for figure in report.figures}
        assert figures["hidden"].ratio > 4, str(report)
        assert figures["k_rows[0]"].passed and figures["router_logits[0]"].passed, str(report)


def test_ties_to_the_higher_id_miss_the_gate():
    """Equal logits, different experts: the oracle takes the lower id of the kernel's own logits."""
    assert planted(0, equal_experts=True)[1].passed
    _, report = planted(TIE_TO_HIGHER_ID, equal_experts=True)
    assert report.figures[0].output == "hidden" and report.figures[0].ratio > 4, str(report)


@pytest.mark.parametrize("bug", [0, UNROUNDED_LOGITS], ids=["none", "cut"])
def test_logits_are_rounded_as_a_bf16_product_is(bug):
    """From the stream that was handed over they are known but for the order of float32 sums: almost all are the float64 product's, rounded. Cut
    instead of rounded, half of them are not."""
    runner, _ = planted(bug, rows=16)
    for layer in range(runner.geometry.num_layers):
        scaled, squares = (runner.kernel.buffer(f"mid_{name}", 16, layer).double() for name in ("scaled", "squares"))
        inverse_rms = torch.rsqrt(squares.sum(-1, keepdim=True) / runner.geometry.hidden + runner.geometry.rms_eps)
        expected = (scaled @ runner.weights.layers[layer].router.double().T * inverse_rms).bfloat16()
        other = float((runner.kernel.buffer("router_logits", 16, layer) != expected).float().mean())
        assert other < 0.01 if bug == 0 else 0.4 < other < 0.6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bug", [RING_NO_WAIT, STALE_ROUTING], ids=["ring", "stale routing"])
def test_weights_of_the_wrong_moment_are_found(bug, seed):
    """A producer that does not wait for the routing streams what the memory happens to say: the launch ends, or the numbers are wrong."""
    try:
        runner, report = planted(bug, seed, check_order=True)
    except (RuntimeError, DecodeStepFault) as error:
        assert re.search("load_stage|mbarrier|ring stage|waited", str(error)), str(error)
    except ValueError as error:  # what lay in the ring made NaN logits, which leave the oracle none to compare
        assert "is not finite" in str(error)
    else:
        assert not report.passed or runner.kernel.last_report.num_races > 0


@pytest.mark.parametrize("seed", range(4))
def test_words_taken_unwritten_are_not_a_number(seed):
    try:
        _, report = planted(MISSING_AWAIT, seed)
    except ValueError as error:  # NaN logits of ours leave the oracle none to compare
        assert "is not finite" in str(error)
    else:
        assert not report.passed


@pytest.mark.parametrize("seed", range(4))
def test_a_missing_fence_leaves_clears_in_no_order(seed):
    geometry = deep_moe(6)
    weights, options = random_weights(geometry, 21), EmulationOptions(seed=seed, planted=MISSING_FENCE, check_order=True)
    inputs = random_step(geometry, LENGTHS[:5], 21)
    runner, kinds = Runner(geometry, weights, (5,), 5, emulation=options), set()
    for _ in range(2):
        try:
            runner.run(inputs)
        except DecodeStepFault as error:  # blocks that found other words routed otherwise, and some wait for what nobody hands over
            assert "which no block has written" in str(error)
        kinds |= {race.kind for race in runner.kernel.last_report.races}
        if runner.kernel.fault() is not None:
            break
    assert {UNORDERED_CLEAR, CLEAR_OVERTAKES} <= kinds


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("op", "edge", "content"),
    [("router", "router", "router logits"), ("out_proj", "out_proj", "residual stream after attention"), ("down", "down", "embedding")],
)
def test_a_lost_tile_ends_at_the_deadline_and_is_named(op, edge, content, seed):
    """Of down, the embedding comes first."""
    geometry = TINY_MOE["raw"]
    options = EmulationOptions(seed=seed)
    runner = Runner(geometry, random_weights(geometry, 21), (5,), 5, deadline_s=0.5, emulation=options)
    lose_tile(runner, 5, abi.OP_INDEX[op])
    layer = -1 if op == "down" else 0
    with pytest.raises(DecodeStepFault, match=rf"waited .* for word \d+ of edge '{edge}' of layer {layer} \({content}\)"):
        runner.run(random_step(geometry, LENGTHS[:5], 21))


def test_a_grid_with_blocks_that_own_no_tile_of_down_is_refused():
    geometry = TINY_MOE["raw"]
    make_plan(geometry, 1, geometry.hidden // 16)
    with pytest.raises(PlanError, match="grid 9 leaves blocks without tiles of down: hidden 128 has 8"):
        make_plan(geometry, 1, geometry.hidden // 16 + 1)
