"""Steps of several rows a request in emulation: every row sees the ones before it, against the float64 oracle."""

import dataclasses
import time

import pytest
import torch
from decode_step_cases import VERIFY_ROWS_PER_REQUEST, Runner, gate, same_bits, verify_batches
from tiny_geometries import FAMILIES, TINY

from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.reference.inputs import random_step, random_weights
from sgl_lowlatency.reference.plan_interpreter import PlanInterpreter, attention_items
from sgl_lowlatency.reference.step import StepOutputs

GRID = 6
SMALL_PANEL_BYTES = 20 * 1024  # several K panels
FRESH = time.time_ns() % 2**31  # inputs no earlier run has seen; failures print it


def with_group(group: int) -> Geometry:
    """Two kv heads of so many query heads each."""
    return Geometry(2, 192, 2 * group, 2, 64, 192, 512, 8192, 1e-6, False)


def check(geometry, rows_per_request, batches, page_size=1, grid=GRID, panel_budget_bytes=64 * 1024, family="qwen3"):
    """The gate on each batch of prefixes, all of one size."""
    weights = random_weights(geometry, FRESH, **FAMILIES[family])
    rows = len(batches[0]) * rows_per_request
    runner = Runner(geometry, weights, (rows,), grid, panel_budget_bytes=panel_budget_bytes, rows_per_request={rows: rows_per_request})
    for i, prefixes in enumerate(batches):
        step = random_step(geometry, prefixes, FRESH + i, page_size=page_size, rows_per_request=rows_per_request, lengths_are_prefix=True)
        report = gate(geometry, weights, [step], [runner.run(step)])
        assert report.passed, f"prefixes {prefixes}, {rows_per_request} rows a request, seed {FRESH}\n{report}"
    assert runner.kernel.executed() == {rows: len(batches)}
    return runner


@pytest.mark.parametrize("rows_per_request", VERIFY_ROWS_PER_REQUEST)
@pytest.mark.parametrize("group", range(1, 9))
def test_gate(group, rows_per_request):
    check(with_group(group), rows_per_request, verify_batches(rows_per_request))


@pytest.mark.parametrize("rows_per_request", VERIFY_ROWS_PER_REQUEST)
@pytest.mark.parametrize("name", ["group4", "group8", "group12"])
def test_long_heads_and_more_heads_than_an_item_has(name, rows_per_request):
    check(TINY[name], rows_per_request, verify_batches(rows_per_request)[-2:])


@pytest.mark.parametrize("rows_per_request", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("name", ["group2", "group4", "group5", "group8"])
def test_steps_of_32_rows(name, rows_per_request):
    runner = check(TINY[name], rows_per_request, verify_batches(rows_per_request, 32))
    assert set(runner.plans) == {32}


@pytest.mark.parametrize("rows_per_request", [12, 16])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_chains_that_span_runs_of_tokens(group, rows_per_request):
    """16 new tokens are one run, or parts of two; the last split may hold nothing else."""
    check(with_group(group), rows_per_request, [[prefix] for prefix in (0, 1, 4, 15, 16, 17, 250, 1000)])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_families_without_qk_norm(family):
    check(TINY["group2"], 4, verify_batches(4), family=family)


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("name", ["group2", "group8"])
def test_pages(name, page_size):
    check(TINY[name], 3, verify_batches(3), page_size=page_size)


@pytest.mark.parametrize("rows_per_request", [4, 8])
def test_several_panels(rows_per_request):
    runner = check(TINY["group4"], rows_per_request, verify_batches(rows_per_request), panel_budget_bytes=SMALL_PANEL_BYTES)
    assert min(op.num_panels for op in runner.plans[16].ops if op.k_extent > 512) > 1


@pytest.mark.parametrize("grid", [1, 2, 5, 13, 40])
def test_any_grid(grid):
    """From one block with every item, more than it keeps, to many splits a request."""
    geometry, prefixes = with_group(2), [1000, 63, 0]
    check(geometry, 5, [prefixes], grid=grid)
    splits = {item.num_splits for item in attention_items(geometry, [prefix + 5 for prefix in prefixes], grid, 5)}
    assert (max(splits) > 1) == (grid >= 13)


@pytest.mark.parametrize("name", ["group1", "group5", "group8"])
def test_lengths_with_and_without_the_new_tokens_give_the_same_bits(name):
    geometry, prefixes = TINY[name], [65, 0, 300]
    weights = random_weights(geometry, FRESH)
    runner = Runner(geometry, weights, (12,), GRID, rows_per_request={12: 4})
    prefix = random_step(geometry, prefixes, FRESH, rows_per_request=4, lengths_are_prefix=True)
    counted = dataclasses.replace(prefix, seq_lens=prefix.seq_lens + 4, lengths_are_prefix=False)
    assert same_bits(runner.run(prefix), runner.run(counted))


def test_decode_takes_prefixes_too():
    geometry = TINY["group2"]
    weights = random_weights(geometry, FRESH)
    runner = Runner(geometry, weights, (3,), GRID)
    counted = random_step(geometry, [1, 65, 300], FRESH)
    prefix = dataclasses.replace(counted, seq_lens=counted.seq_lens - 1, lengths_are_prefix=True)
    assert same_bits(runner.run(prefix), runner.run(counted))


def rows_of(outputs, rows):
    return StepOutputs(outputs.hidden[rows], outputs.k_rows[:, rows], outputs.v_rows[:, rows])


@pytest.mark.parametrize("name", TINY)
def test_padded_requests_are_harmless(name):
    """Requests as CUDA graphs pad them beside real ones, their length 1 taken as a prefix, in the padding slot: the real rows have
    their numbers, only the padding slot is written for the others."""
    geometry = TINY[name]
    weights = random_weights(geometry, FRESH)
    inputs = random_step(geometry, [65, 0], FRESH, num_padded=2, rows_per_request=4, lengths_are_prefix=True)
    runner = Runner(geometry, weights, (16,), GRID, rows_per_request={16: 4})
    report = gate(geometry, weights, [inputs], [runner.run(inputs)], rows=8)
    assert report.passed, f"seed {FRESH}\n{report}"


@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("name", ["group1", "group2", "group8"])
def test_requests_too_short_for_their_new_tokens_have_none(name, length):
    """Lengths that should count four new tokens and do not: nothing is written for them, and the others have their numbers."""
    geometry = TINY[name]
    weights = random_weights(geometry, FRESH)
    inputs = random_step(geometry, [65, 300], FRESH, num_padded=1, rows_per_request=4)
    inputs.seq_lens[2] = length
    runner = Runner(geometry, weights, (12,), GRID, rows_per_request={12: 4})
    ours = runner.run(inputs)
    assert not bool(ours.k_rows[:, 8:].any()) and not bool(ours.v_rows[:, 8:].any()), "the padding slot was written"
    report = gate(geometry, weights, [inputs], [ours], rows=8)
    assert report.passed, f"seed {FRESH}\n{report}"


def test_decode_and_verify_share_one_workspace():
    """Launches of decode and of verify steps in turn give what each gives alone, bit for bit."""
    geometry = TINY["group2"]
    weights = random_weights(geometry, FRESH)
    chains = {1: 1, 6: 3, 8: 8, 16: 4, 5: 1, 32: 4}
    shared = Runner(geometry, weights, tuple(chains), GRID, rows_per_request=chains)
    for turn, rows in enumerate([*chains, 16, 1, 8, 32, 16, 6]):
        chain = chains[rows]
        inputs = random_step(geometry, [97 * rows + 5 * i for i in range(rows // chain)], FRESH + turn, rows_per_request=chain, lengths_are_prefix=True)
        alone = Runner(geometry, weights, (rows,), GRID, rows_per_request=chains)
        assert same_bits(shared.run(inputs), alone.run(inputs)), f"rows {rows}, seed {FRESH + turn}"


@pytest.mark.parametrize("name", ["group1", "group2", "group5", "group8"])
def test_a_row_does_not_depend_on_the_rows_behind_it(name):
    """Other new tokens behind a row, whatever they are, leave its bits alone: in its item, its split and its tiles."""
    geometry = TINY[name]
    weights = random_weights(geometry, FRESH)
    runner = Runner(geometry, weights, (8,), GRID, rows_per_request={8: 8})
    inputs = random_step(geometry, [300], FRESH, rows_per_request=8, lengths_are_prefix=True)
    changed = inputs.clone()
    changed.input_ids[5:] = (changed.input_ids[5:] + 7) % geometry.vocab
    ours, others = runner.run(inputs), runner.run(changed)
    assert same_bits(rows_of(ours, slice(0, 5)), rows_of(others, slice(0, 5)))
    assert not torch.equal(ours.hidden[5:], others.hidden[5:])


@pytest.mark.parametrize(("name", "rows_per_request"), [("group1", 5), ("group2", 3), ("group4", 4), ("group5", 2), ("group8", 3), ("group12", 2)])
def test_buffers_follow_the_plan_interpreter(name, rows_per_request):
    """Which words are written, layer by layer, and layer 0's q, k, v, partials and attention, of the same plan run in torch."""
    geometry = TINY[name]
    weights = random_weights(geometry, FRESH)
    inputs = random_step(geometry, [1500, 17], FRESH, rows_per_request=rows_per_request, lengths_are_prefix=True)
    plan = make_plan(geometry, inputs.rows, 40, rows_per_request=rows_per_request)
    runner = Runner(geometry, weights, (inputs.rows,), 40, rows_per_request={inputs.rows: rows_per_request})
    runner.run(inputs)
    interpreter = PlanInterpreter(plan, weights, inputs.clone())
    interpreter.run()
    assert any(item.num_splits > 1 for item in interpreter.items) and any(item.num_splits == 1 for item in interpreter.items)
    for layer in range(geometry.num_layers):
        for buffer in plan.buffers:
            ours, expected = runner.kernel.buffer(buffer.name, inputs.rows, layer), interpreter.buffer(buffer.name, layer)
            where = f"{buffer.name} of layer {layer}, seed {FRESH}"
            written = expected.contiguous().view(torch.int32) != -1
            assert torch.equal(ours.contiguous().view(torch.int32) != -1, written), where
            if layer == 0 and buffer.name in ("qkv", "attention_out", "partial_out", "partial_max_sum"):
                is_element = written.repeat_interleave(ours.shape[-1] // written.shape[-1], -1)  # two bf16 a word
                ours, expected = ours.float()[is_element], expected.float()[is_element]
                assert float((ours - expected).norm() / expected.norm()) < 1e-2, where
