"""Auxiliary hidden states of decode_step in emulation: the stream that enters captured layers, against the float64 oracle."""

import dataclasses
import time

import pytest
import torch
from decode_step_cases import MIXED, Runner, gate, same_bits, verify_batches
from tiny_geometries import FAMILIES, TINY, TINY_FP8, deep

from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.reference.inputs import random_step, random_weights
from sgl_lowlatency.reference.plan_interpreter import PlanInterpreter

GRID = 6
FRESH = time.time_ns() % 2**31  # inputs no earlier run has seen; failures print it
FIXED = 11
CAPTURES_OUTPUT = 20  # dialect::Planted
CAPTURED = ([0], [1], [0, 2], [0, 1, 2])  # of three layers: the embedding, one inside, the last layer's input


def check(geometry, lengths, captured, rows_per_request=1, grid=GRID, seed=FRESH, planted=0, **kinds):
    """(runner, inputs, outputs, gate report) of one step that captures. lengths: prefixes where requests have several rows."""
    weights = random_weights(geometry, seed, **kinds)
    is_verify = rows_per_request > 1
    inputs = random_step(geometry, lengths, seed, rows_per_request=rows_per_request, lengths_are_prefix=is_verify)
    rows, options = inputs.rows, EmulationOptions(planted=planted, check_order=True)
    runner = Runner(
        geometry, weights, (rows,), grid, emulation=options, rows_per_request={rows: rows_per_request}, captured=captured
    )
    outputs = runner.run(inputs)
    assert runner.kernel.last_report.num_races == 0
    return runner, inputs, outputs, gate(geometry, weights, [inputs], [outputs], captured=captured)


def figures_of(report):
    return {figure.output: figure for figure in report.figures}


@pytest.mark.parametrize("lengths", [[65], MIXED[0], MIXED[2], MIXED[4]], ids=len)
@pytest.mark.parametrize("captured", CAPTURED, ids=str)
def test_gate(captured, lengths):
    _, _, _, report = check(TINY["group2"], lengths, captured)
    assert report.passed, f"seed {FRESH}\n{report}"
    assert sum(figure.output.startswith("aux[") for figure in report.figures) == len(captured)


@pytest.mark.parametrize("rows_per_request", [2, 4, 16])
@pytest.mark.parametrize("captured", CAPTURED, ids=str)
def test_verify_rows(captured, rows_per_request):
    for prefixes in verify_batches(rows_per_request)[-2:]:
        _, _, _, report = check(TINY["group2"], prefixes, captured, rows_per_request)
        assert report.passed, f"prefixes {prefixes}, seed {FRESH}\n{report}"


@pytest.mark.parametrize("name", TINY)
def test_every_geometry(name):
    _, _, _, report = check(TINY[name], MIXED[1], [0, 1])
    assert report.passed, f"seed {FRESH}\n{report}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    _, _, _, report = check(TINY["group2"], MIXED[0], [1, 2], **FAMILIES[family])
    assert report.passed, f"seed {FRESH}\n{report}"


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_channel"])
def test_fp8_weights(weight_format):
    _, _, _, report = check(TINY_FP8["group4"], MIXED[0], [0, 1], seed=FIXED, weight_format=weight_format)  # see test_decode_step_fp8
    assert report.passed, f"seed {FIXED}\n{report}"


@pytest.mark.parametrize("grid", [1, 2, 5, 13, 40])
def test_any_grid(grid):
    """Also grids with blocks that own no tile of down, or nothing at all."""
    _, _, _, report = check(TINY["group1"], MIXED[1], [0, 1], grid=grid)
    assert report.passed, f"seed {FRESH}\n{report}"


def test_the_stream_that_enters_a_layer_is_what_the_layer_before_hands_over():
    """Bit by bit, in all layers of which the hand-over buffers still hold it; what enters layer 0 is the embedding."""
    geometry = deep(4)
    runner, inputs, outputs, _ = check(geometry, MIXED[2], [0, 1, 2, 3])
    assert torch.equal(outputs.aux[0], runner.weights.embedding[inputs.input_ids])
    for layer in range(1, 4):
        handed_over = runner.kernel.buffer("end_x", inputs.rows, layer - 1)
        assert torch.equal(outputs.aux[layer].view(torch.int16), handed_over.view(torch.int16))


def test_layers_go_by_their_number_and_not_by_their_place():
    """Each of many layers alone is what it is among all of them."""
    geometry = deep(11)
    _, _, among_all, _ = check(geometry, [65, 3], list(range(11)))
    for layer in (0, 1, 7, 8, 10):
        _, _, alone, _ = check(geometry, [65, 3], [layer])
        assert torch.equal(alone.aux[0], among_all.aux[layer])


def test_nothing_else_changes_and_a_kernel_may_stop_capturing():
    geometry = TINY["group2"]
    weights, inputs = random_weights(geometry, FRESH), random_step(geometry, MIXED[0], FRESH)
    runner = Runner(geometry, weights, (3,), GRID)
    without = runner.run(inputs)
    runner.kernel.capture([0, 2])
    captured = runner.run(inputs)
    runner.kernel.capture([1])
    other = runner.run(inputs)
    runner.kernel.capture([])
    again = runner.run(inputs)
    assert without.aux is None and again.aux is None and (captured.aux.shape[0], other.aux.shape[0]) == (2, 1)
    assert same_bits(without, again)
    assert all(same_bits(without, dataclasses.replace(outputs, aux=None)) for outputs in (captured, other))


def test_the_interpreter_captures_what_the_kernel_does():
    """To within the order of float32 sums; the embedding exactly."""
    seed, captured = 11, [0, 1, 2]
    runner, inputs, outputs, _ = check(TINY["group2"], MIXED[1], captured, seed=seed)
    interpreted = PlanInterpreter(runner.plans[inputs.rows], runner.weights, inputs.clone(), captured).run()
    assert torch.equal(interpreted.aux[0], outputs.aux[0])
    error = (interpreted.aux.float() - outputs.aux.float()).norm(dim=-1) / interpreted.aux.float().norm(dim=-1)
    assert float(error.max()) < 0.01


def test_padded_rows_leave_the_others_alone():
    geometry = TINY["group2"]
    weights = random_weights(geometry, FRESH)
    inputs = random_step(geometry, [65, 1, 300], FRESH, num_padded=5)
    runner = Runner(geometry, weights, (8,), GRID, captured=[0, 2])
    report = gate(geometry, weights, [inputs], [runner.run(inputs)], rows=3, captured=[0, 2])
    assert report.passed, f"seed {FRESH}\n{report}"


@pytest.mark.parametrize("rows_per_request", [1, 4])
@pytest.mark.parametrize("captured", [*CAPTURED, [2]], ids=str)
def test_the_stream_that_leaves_a_layer_misses_the_gate(captured, rows_per_request):
    """In every captured layer, and nowhere else."""
    _, _, _, report = check(TINY["group2"], [64, 65], captured, rows_per_request, planted=CAPTURES_OUTPUT)
    for name, figure in figures_of(report).items():
        if name.startswith("aux["):
            assert figure.ratio > 10, str(report)
        else:
            assert figure.passed, str(report)


def test_layers_the_model_lacks_and_outputs_that_do_not_fit_are_refused():
    geometry = TINY["group2"]
    weights, inputs = random_weights(geometry, 1), random_step(geometry, [5, 6], 1)
    runner = Runner(geometry, weights, (2,), GRID)
    for layers in ([3], [-1], [1, 0], [1, 1]):
        with pytest.raises(ValueError) as error:
            runner.kernel.capture(layers)
        assert str(error.value) == f"captured layers {layers} are not ascending ones of 0 to 2"
    runner.attach(inputs)
    hidden = torch.empty(2, geometry.hidden, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^aux_out is given, the captured layers are \[\]$"):
        runner.launch(inputs, hidden, hidden)
    runner.kernel.capture([0, 2])
    with pytest.raises(ValueError, match=r"^aux_out is missing, the captured layers are \[0, 2\]$"):
        runner.launch(inputs, hidden)
    with pytest.raises(ValueError, match=r"^aux_out: shape \(2, 256\) is not \(2, 512\)$"):
        runner.launch(inputs, hidden, hidden)
    with pytest.raises(ValueError, match=r"^aux_out: dtype torch.float32 is not torch.bfloat16$"):
        runner.launch(inputs, hidden, torch.empty(2, 2 * geometry.hidden))


def test_a_gate_compares_aux_of_all_or_of_none():
    geometry = TINY["group2"]
    weights, inputs = random_weights(geometry, 1), random_step(geometry, [5], 1)
    outputs = Runner(geometry, weights, (1,), GRID, captured=[1]).run(inputs)
    with pytest.raises(ValueError, match="^some of the outputs have aux and some have none$"):
        gate(geometry, weights, [inputs], [outputs])
    with pytest.raises(ValueError, match="^some of the outputs have aux and some have none$"):
        gate(geometry, weights, [inputs], [dataclasses.replace(outputs, aux=None)], captured=[1])
