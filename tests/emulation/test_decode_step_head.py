"""The LM head inside decode_step, in emulation: logits through the numerics gate, the same bits under every schedule, no race, and bugs
of the head that turn red."""

import dataclasses
import time

import pytest
import torch
from decode_step_cases import MIXED, Runner, gate, lose_tile, same_bits
from tiny_geometries import FAMILIES, TINY, TINY_FP8

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.reference.inputs import random_step, random_weights
from sgl_lowlatency.reference.plan_interpreter import PlanInterpreter

GRID = 6
SMALL_PANEL_BYTES = 20 * 1024  # several K panels from a few rows on
UNSCALED_HEAD = 21  # dialect::Planted
FRESH = time.time_ns() % 2**31  # inputs no earlier run has seen; failures print it
FIXED = 11
LENGTHS = MIXED[1]


def make(geometry, rows, *, grid=GRID, panel_budget_bytes=64 * 1024, options=None, seed=FRESH, rows_per_request=1, weights=None, **kinds):
    weights = weights or random_weights(geometry, seed, has_lm_head=True, **kinds)
    return Runner(
        geometry, weights, (rows,), grid, panel_budget_bytes=panel_budget_bytes, emulation=options, rows_per_request={rows: rows_per_request}
    )


def check(runner, steps):
    outputs = [runner.run(step) for step in steps]
    report = gate(runner.geometry, runner.weights, steps, outputs)
    assert report.figures[-1].output == "logits" and report.top_token.num_rows == sum(step.rows for step in steps)
    assert report.passed, f"seed {FRESH}\n{report}"
    return outputs


@pytest.mark.parametrize("lengths", MIXED, ids=len)
@pytest.mark.parametrize("name", TINY)
def test_gate(name, lengths):
    check(make(TINY[name], len(lengths)), [random_step(TINY[name], lengths, FRESH)])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_families_without_qk_norm(family):
    check(make(TINY["group4"], 5, **FAMILIES[family]), [random_step(TINY["group4"], LENGTHS, FRESH)])


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("name", TINY_FP8)
@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_channel"])
def test_a_bf16_head_behind_fp8_layers(weight_format, name, rows):
    lengths = [1 + 31 * row for row in range(rows)]
    check(make(TINY_FP8[name], rows, seed=FIXED, weight_format=weight_format), [random_step(TINY_FP8[name], lengths, FIXED)])  # see test_decode_step_fp8


@pytest.mark.parametrize(("name", "rows_per_request", "prefixes"), [("group2", 2, [0, 65]), ("group5", 4, [14, 1, 300]), ("group8", 8, [63, 64])])
def test_verify_steps(name, rows_per_request, prefixes):
    step = random_step(TINY[name], prefixes, FRESH, rows_per_request=rows_per_request, lengths_are_prefix=True)
    check(make(TINY[name], step.rows, rows_per_request=rows_per_request), [step])


@pytest.mark.parametrize("grid", [1, 5, 40])
@pytest.mark.parametrize("vocab", [505, 511, 512])
def test_any_vocabulary_on_any_grid(vocab, grid):
    """Vocabularies that end inside a tile, the padding of the weight poisoned; on 40 blocks some have no tile of the head."""
    geometry = dataclasses.replace(TINY["group1"], vocab=vocab)
    weights = random_weights(geometry, FRESH, has_lm_head=True)
    weights.lm_head[vocab:] = float("nan")
    runner = make(geometry, 5, grid=grid, weights=weights)
    counts = [count for _, count in runner.plans[5].head.tiles]
    assert sum(counts) == 32 and (min(counts) == 0) == (grid == 40)
    check(runner, [random_step(geometry, LENGTHS, FRESH)])


def test_tied_embeddings():
    geometry = dataclasses.replace(TINY["group2"], tied_head=True, vocab=504)
    weights = random_weights(geometry, FRESH, has_lm_head=True)
    assert weights.lm_head.data_ptr() == weights.embedding.data_ptr() and weights.lm_head.shape == (512, geometry.hidden)
    check(make(geometry, 5, weights=weights), [random_step(geometry, LENGTHS, FRESH)])


@pytest.mark.parametrize(("name", "rows"), [("group4", 16), ("group5", 16)])
def test_more_tiles_than_accumulators(name, rows):
    """K in several panels: the head is walked in several goes, each over all of K."""
    geometry = dataclasses.replace(TINY[name], vocab=4000)
    runner = make(geometry, rows, grid=3, panel_budget_bytes=SMALL_PANEL_BYTES)
    plan = runner.plans[rows]
    assert plan.head.num_panels > 1 and 0 < plan.max_tiles_multi_panel < plan.head.max_tiles
    check(runner, [random_step(geometry, [65] * rows, FRESH)])


def test_a_launch_without_logits_leaves_them_and_gives_the_same_step():
    """One kernel serves both, in turn; hidden states and KV do not depend on the head."""
    geometry = TINY["group5"]
    runner = make(geometry, 5)
    step = random_step(geometry, LENGTHS, FRESH)
    with_logits, without, again = runner.run(step), runner.run(step, with_logits=False), runner.run(step)
    assert without.logits is None and same_bits(with_logits, without) and same_bits(with_logits, again)
    bare = Runner(geometry, dataclasses.replace(runner.weights, lm_head=None), (5,), GRID)
    assert bare.plans[5].head is None and same_bits(bare.run(step), with_logits)
    assert runner.kernel.executed() == {5: 3}


@pytest.mark.parametrize("name", ["group2", "group12"])
def test_the_same_bits_under_every_schedule_and_no_race(name):
    geometry = TINY[name]
    step, first = random_step(geometry, LENGTHS, FRESH), None
    for seed in range(6):
        runner = make(geometry, 5, options=EmulationOptions(seed=seed, check_order=True))
        outputs = runner.run(step)
        assert runner.kernel.last_report.num_races == 0, runner.kernel.last_report.races[0]
        first = first or outputs
        assert same_bits(first, outputs), f"schedule {seed}, inputs {FRESH}"


@pytest.mark.parametrize("name", TINY)
def test_logits_follow_the_plan_interpreter(name):
    runner = make(TINY[name], 5, seed=FIXED, panel_budget_bytes=SMALL_PANEL_BYTES)
    step = random_step(TINY[name], LENGTHS, FIXED)
    expected = PlanInterpreter(runner.plans[5], runner.weights, step.clone()).run().logits
    ours = runner.run(step).logits
    assert float((ours - expected).norm() / expected.norm()) < 1e-2
    assert torch.equal(ours, ours.bfloat16().float()), "not rounded as SGLang's are"


@pytest.mark.parametrize("weight_format", ["bf16", "fp8_block"])
def test_unscaled_logits_miss_the_gate(weight_format):
    """The planted head leaves 1 / rms out; nothing else of the step is blamed."""
    geometry = TINY_FP8["group2"]
    step = random_step(geometry, LENGTHS, FIXED)
    for planted, is_right in ((0, True), (UNSCALED_HEAD, False)):
        runner = make(geometry, 5, seed=FIXED, options=EmulationOptions(planted=planted), weight_format=weight_format)
        report = gate(geometry, runner.weights, [step], [runner.run(step)])
        assert report.passed == is_right, str(report)
        assert is_right or [figure.output for figure in report.misses] == ["logits"] and report.misses[0].ratio > 20, str(report)


def test_a_tile_that_nobody_owns_leaves_its_logits_unwritten():
    """Nobody waits for logits: what is lost is seen by the gate and by the validator, not by a deadline."""
    geometry = TINY["group2"]
    runner = make(geometry, 5)
    step = random_step(geometry, LENGTHS, FRESH)
    lose_tile(runner, 5, abi.HEAD_OP)
    outputs = runner.run(step)
    is_lost = torch.arange(geometry.vocab) < abi.TILE_ROWS
    assert torch.equal(outputs.logits.isnan(), is_lost.expand(5, -1))
    report = gate(geometry, runner.weights, [step], [outputs])
    assert [figure.output for figure in report.misses] == ["logits"] and report.misses[0].num_not_finite == 5 * abi.TILE_ROWS


def test_what_does_not_fit_is_refused():
    geometry = TINY["group2"]
    step = random_step(geometry, [65], FRESH)
    bare = Runner(geometry, random_weights(geometry, FRESH), (1,), GRID)
    bare.attach(step)
    hidden, logits = torch.empty(1, geometry.hidden).bfloat16(), torch.empty(1, geometry.vocab)
    with pytest.raises(ValueError, match="logits: the weights have no LM head"):
        bare.launch(step, hidden, logits=logits)
    runner = make(geometry, 1)
    runner.attach(step)
    with pytest.raises(ValueError, match=r"logits: shape \(1, 511\) is not \(1, 512\)"):
        runner.launch(step, hidden, logits=logits[:, 1:])
    with pytest.raises(ValueError, match="logits: dtype torch.bfloat16 is not torch.float32"):
        runner.launch(step, hidden, logits=logits.bfloat16())
    params = runner.kernel._params[1]
    for k_panel, num_tiles, reason in ((256, 0, r"logits are asked for, and ops\[4\] has no tiles"), (256, 31, r"ops\[4\].num_tiles 31 is not 32")):
        params.set_op(abi.HEAD_OP, 256, k_panel, num_tiles)
        with pytest.raises(ValueError, match=reason):
            runner.launch(step, hidden, logits=logits)
    weights = dataclasses.replace(runner.weights, lm_head=runner.weights.lm_head[:-8])
    with pytest.raises(ValueError, match="lm_head: 504 rows do not hold a vocabulary of 512 in tiles of 16 rows"):
        make(geometry, 1, weights=weights)
    with pytest.raises(ValueError, match="the plans are not for weights without an LM head"):
        type(runner.kernel)(geometry, runner.plans, dataclasses.replace(runner.weights, lm_head=None), torch.device("cpu"), 5.0)
