"""decode_step of MoE layers in emulation against the float64 oracle: numerics, choices, and what routing makes of the work."""

import dataclasses
import itertools
import time

import pytest
import torch
from decode_step_cases import Runner, same_bits
from moe_cases import TINY_MOE, biased, kernel_logits, moe_gate, run

from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
from sgl_lowlatency.reference import moe_step, routing
from sgl_lowlatency.reference.inputs import random_step, random_weights
from sgl_lowlatency.reference.plan_interpreter import PlanInterpreter

GRID = 6
FRESH = time.time_ns() % 2**31  # inputs no earlier run has seen; failures print it
ROWS = (1, 2, 5, 8, 16)
LENGTHS = [65, 1, 300, 64, 2, 63, 100, 31, 32, 33, 15, 16, 17, 1, 127, 128]


def check(name, rows, seed, grid=GRID, weights=None, **plan):
    geometry = TINY_MOE[name]
    weights = weights or random_weights(geometry, seed, has_lm_head=True)
    runner = Runner(geometry, weights, (rows,), grid, **plan)
    steps = [random_step(geometry, LENGTHS[:rows], seed + i) for i in range(4 if rows <= 3 else 1)]
    runs = [run(runner, step) for step in steps]
    report = moe_gate(geometry, weights, steps, runs)
    assert report.passed, f"{name} rows {rows} seed {seed}\n{report}"
    return runner, steps, runs


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", TINY_MOE)
def test_gate(name, rows):
    check(name, rows, FRESH + rows)


@pytest.mark.parametrize("grid", [1, 2, 5, 8])
def test_any_grid_with_tiles_of_down_for_every_block(grid):
    for name in ("many", "raw"):
        check(name, 5, FRESH, grid)


def test_32_rows():
    geometry = TINY_MOE["few"]
    weights = random_weights(geometry, FRESH)
    inputs = random_step(geometry, LENGTHS * 2, FRESH)
    runner = Runner(geometry, weights, (32,), GRID)
    report = moe_gate(geometry, weights, [inputs], [run(runner, inputs)])
    assert report.passed, f"seed {FRESH}\n{report}"


@pytest.mark.parametrize("rows", [2, 16])
def test_activations_in_several_panels(rows):
    """As few pairs at a time as an expert may have; each block reads the panels again for each of its tiles."""
    runner, _, _ = check("wide", rows, FRESH, grid=13, panel_budget_bytes=rows * (640 * 2 + 16))
    plan = runner.plans[rows]
    assert plan.panel_pairs < rows * plan.geometry.top_k and plan.op("down").max_tiles > 1


def activations(geometry, weights, runner, inputs, layer, choices):
    """bf16 [rows * top_k, moe_intermediate]: by pair, from the kernel's own stream, in float32 and rounded as it rounds."""
    g, of_layer = geometry, moe_step.tensors(weights.layers[layer])
    scaled = runner.kernel.buffer("mid_scaled", inputs.rows, layer).float()
    squares = runner.kernel.buffer("mid_squares", inputs.rows, layer)
    inverse_rms = torch.rsqrt(squares.sum(-1, keepdim=True) / g.hidden + g.rms_eps)
    pairs = []
    for expert in routing.place(choices.ids, g.num_experts).experts:
        for row in range(inputs.rows):
            if expert in choices.ids[row].tolist():
                gate, up = (scaled[row] @ of_layer.w13[expert].float().T * inverse_rms[row]).chunk(2)
                pairs.append((torch.nn.functional.silu(gate) * up).bfloat16())
    return torch.stack(pairs)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", TINY_MOE)
def test_every_pair_is_the_chosen_experts(name, rows):
    """The order of pairs says which experts each row chose, in exactly the oracle's set, from exactly the logits that were handed over; and each is
    what that expert makes of that row."""
    geometry = TINY_MOE[name]
    weights = random_weights(geometry, FRESH)
    inputs = random_step(geometry, LENGTHS[:rows], FRESH)
    runner = Runner(geometry, weights, (rows,), GRID)
    choices = run(runner, inputs).choices
    for layer in range(geometry.num_layers):
        ours = runner.kernel.buffer("activation", rows, layer).float()
        expected = activations(geometry, weights, runner, inputs, layer, choices[layer]).float()
        assert ours.shape == expected.shape == (rows * geometry.top_k, geometry.moe_intermediate)
        error = (ours - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.max()) < 2e-3, f"pair {int(error.argmax())} of layer {layer}, seed {FRESH}"


FIXED = 11  # where two bf16 paths are compared with each other: how far they part, and whether near ties fall alike, is the seed's luck


@pytest.mark.parametrize("name", TINY_MOE)
def test_buffers_follow_the_plan_interpreter(name):
    """In every layer the kernel's buffers are those of the same plan run in torch, down to which words are written."""
    geometry = TINY_MOE[name]
    weights = random_weights(geometry, FIXED)
    inputs = random_step(geometry, LENGTHS[:5], FIXED)
    runner = Runner(geometry, weights, (5,), GRID)
    choices = run(runner, inputs).choices
    interpreter = PlanInterpreter(runner.plans[5], weights, inputs.clone())
    interpreter.run()
    assert torch.equal(interpreter.choices.ids.sort().values, choices[-1].ids.sort().values), "a near tie fell otherwise: take another seed"
    for layer in range(-1, geometry.num_layers):
        for buffer in runner.plans[5].buffers:
            ours, expected = runner.kernel.buffer(buffer.name, 5, layer), interpreter.buffer(buffer.name, layer)
            where = f"{buffer.name} of layer {layer}, seed {FIXED}"
            written = expected.contiguous().view(torch.int32) != -1
            assert torch.equal(ours.contiguous().view(torch.int32) != -1, written), where
            assert bool(written.all()) == (buffer.edge != "partial") if layer >= 0 else bool(written.any()) == (buffer.edge == "down"), where
            if not bool(written.any()):
                continue
            is_element = written.repeat_interleave(ours.shape[-1] // written.shape[-1], -1)  # two bf16 a word
            ours, expected = ours.float()[is_element], expected.float()[is_element]
            error = float((ours - expected).norm() / expected.norm())
            assert error < (3e-2 if buffer.edge == "partial" and layer > 0 else 1e-2), f"{where} is {error:.1e} off"


@pytest.mark.parametrize("name", ["few", "wide"])
@pytest.mark.parametrize("rows", [2, 5, 8, 16])
def test_all_rows_on_the_same_experts(name, rows):
    """One expert has every row; blocks share few tiles, and on a grid of 6 some have none of gate_up where an expert has fewer."""
    geometry = TINY_MOE[name]
    last = geometry.num_experts - 1
    weights = biased(geometry, random_weights(geometry, FRESH), lambda token: [last - rank for rank in range(geometry.top_k)])
    _, _, runs = check(name, rows, FRESH, weights=weights)
    for choices in runs[0].choices:
        assert choices.ids.tolist() == [[last - rank for rank in range(geometry.top_k)]] * rows


@pytest.mark.parametrize("rows", [2, 5, 8, 16])
def test_all_rows_on_different_experts(rows):
    """128 experts, eight a row, none twice up to 16 rows: as many active ones as there can be."""
    name, geometry = "many", TINY_MOE["many"]
    weights = biased(geometry, random_weights(geometry, FRESH), lambda token: [(8 * token + 37 * rank) % 8 + 8 * (token % 16) for rank in range(8)])
    steps = [random_step(geometry, LENGTHS[:rows], FRESH)]
    steps[0].input_ids.copy_(torch.arange(rows))
    runner = Runner(geometry, weights, (rows,), GRID)
    runs = [run(runner, step) for step in steps]
    report = moe_gate(geometry, weights, steps, runs)
    assert report.passed, f"{name} rows {rows} seed {FRESH}\n{report}"
    for choices in runs[0].choices:
        assert len(routing.place(choices.ids, 128).experts) == 8 * rows
        assert choices.ids.tolist() == [[(8 * row + 37 * rank) % 8 + 8 * (row % 16) for rank in range(8)] for row in range(rows)]


def test_equal_logits_fall_to_the_lower_id():
    """Experts with equal router rows: bits of the logits are equal, and of each pair the lower id is taken first."""
    geometry = TINY_MOE["few"]
    weights = random_weights(geometry, FRESH)
    for layer in weights.layers:
        layer.router[1::2] = layer.router[0::2]
    runner, steps, runs = check("few", 5, FRESH, weights=weights)
    for logits, choices in zip(runs[0].logits, runs[0].choices, strict=True):
        assert torch.equal(logits[:, 0::2], logits[:, 1::2])
        assert all(second == first + 1 and first % 2 == 0 for first, second in choices.ids.tolist())


@pytest.mark.parametrize("rows_per_request, prefixes", [(1, [64, 0, 2]), (3, [5, 64])])
def test_a_record_has_the_streams_that_enter_every_layer(rows_per_request, prefixes):
    """Those of a step that captures all layers, bit by bit; a launch that asks for none, before and behind, writes none."""
    geometry, rows = TINY_MOE["many"], rows_per_request * len(prefixes)
    weights = random_weights(geometry, FRESH, has_lm_head=True)
    inputs = random_step(geometry, prefixes, FRESH, rows_per_request=rows_per_request, lengths_are_prefix=True)
    kinds = {"rows_per_request": {rows: rows_per_request}}
    capturing = Runner(geometry, weights, (rows,), GRID, captured=range(geometry.num_layers), **kinds)
    expected = capturing.run(inputs).aux
    runner = Runner(geometry, weights, (rows,), GRID, emulation=EmulationOptions(check_order=True), **kinds)
    unasked = runner.run(inputs)
    params = runner.kernel._params[rows]
    assert (params.aux_out, params.aux_columns) == (0, 0)
    record = RoutingRecord.empty(geometry, rows, runner.device, with_streams=True)
    asked = runner.run(inputs, routing=record)
    assert runner.kernel.last_report.num_races == 0
    assert torch.equal(record.streams.transpose(0, 1), expected) and same_bits(asked, unasked)
    kept = record.streams.clone()
    runner.run(inputs, routing=RoutingRecord.empty(geometry, rows, runner.device))
    assert (params.aux_out, params.aux_columns) == (0, 0) and torch.equal(record.streams, kept)
    with pytest.raises(ValueError, match="routing.streams: the step hands out the streams of captured layers"):
        capturing.run(inputs, routing=record)


@pytest.mark.parametrize(("name", "rows_per_request", "prefixes"), [("few", 4, [14, 0]), ("many", 3, [65, 1, 300]), ("raw", 8, [17, 63]), ("most", 3, [2, 65])])
def test_verify_steps_and_captured_layers(name, rows_per_request, prefixes):
    """Rows of a request choose experts of their own; what enters a layer is handed out as in a dense step."""
    geometry, rows, captured = TINY_MOE[name], rows_per_request * len(prefixes), (0, 1)
    weights = random_weights(geometry, FRESH)
    inputs = random_step(geometry, prefixes, FRESH, rows_per_request=rows_per_request, lengths_are_prefix=True)
    runner = Runner(geometry, weights, (rows,), GRID, rows_per_request={rows: rows_per_request}, captured=captured)
    report = moe_gate(geometry, weights, [inputs], [run(runner, inputs)], captured=captured)
    assert report.passed and any(figure.output == "aux[1]" for figure in report.figures), f"seed {FRESH}\n{report}"


def test_a_row_of_nan_keeps_to_itself():
    """Its logits rank, its weights are NaN, and experts that it shares with other rows give those their own bits."""
    geometry = TINY_MOE["few"]
    weights = random_weights(geometry, FRESH)
    inputs = random_step(geometry, LENGTHS[:5], FRESH)
    inputs.input_ids.copy_(torch.arange(5))
    expected = Runner(geometry, weights, (5,), GRID).run(inputs)
    weights.embedding[3] = float("nan")
    ours = Runner(geometry, weights, (5,), GRID).run(inputs)
    others = [0, 1, 2, 4]
    assert bool(ours.hidden[3].isnan().all()) and torch.equal(ours.hidden[others], expected.hidden[others])


@pytest.mark.parametrize("name", TINY_MOE)
def test_padded_rows_are_harmless(name):
    """They choose no experts; everybody's numbers pass, and of the pool only padding slot 0 is written for them."""
    geometry = TINY_MOE[name]
    weights = random_weights(geometry, FRESH)
    inputs = random_step(geometry, [65, 1, 300], FRESH, num_padded=5)
    runner = Runner(geometry, weights, (8,), GRID)
    record, _ = recorded(runner, inputs)
    assert bool((record.ids[:, :3] >= 0).all()) and bool((record.ids[:, 3:] == -1).all())
    report = moe_gate(geometry, weights, [inputs], [run(runner, inputs)])
    assert report.passed, f"seed {FRESH}\n{report}"


def test_a_padded_request_of_a_verify_step_is_harmless():
    geometry = TINY_MOE["few"]
    weights = random_weights(geometry, FRESH)
    inputs = random_step(geometry, [65, 1], FRESH, num_padded=1, rows_per_request=3, lengths_are_prefix=True)
    runner = Runner(geometry, weights, (9,), GRID, rows_per_request={9: 3})
    record, _ = recorded(runner, inputs)
    assert bool((record.ids[:, :6] >= 0).all()) and bool((record.ids[:, 6:] == -1).all())
    report = moe_gate(geometry, weights, [inputs], [run(runner, inputs)], rows=6)  # the others have one slot, and see each other in it
    assert report.passed, f"seed {FRESH}\n{report}"


def test_a_step_of_padding_alone_reads_no_expert():
    """As graphs are captured. Experts of NaN would show."""
    geometry = TINY_MOE["few"]
    weights = random_weights(geometry, FRESH)
    for layer in weights.layers:
        layer.gate_up.fill_(float("nan"))
        layer.down.fill_(float("nan"))
    inputs = random_step(geometry, [], FRESH, num_padded=5)
    record, outputs = recorded(Runner(geometry, weights, (5,), GRID), inputs)
    assert bool((record.ids == -1).all()) and bool(outputs.hidden.isfinite().all())


def test_a_step_behind_one_of_padding_alone():
    """As a graph is captured and then replayed."""
    geometry = TINY_MOE["few"]
    weights, step = random_weights(geometry, FRESH), random_step(geometry, LENGTHS[:5], FRESH)
    runner = Runner(geometry, weights, (5,), GRID)
    runner.run(random_step(geometry, [], FRESH, num_padded=5))
    assert same_bits(runner.run(step), Runner(geometry, weights, (5,), GRID).run(step)), f"seed {FRESH}"


def test_padding_changes_no_bit_of_the_other_rows():
    geometry = TINY_MOE["many"]
    weights = random_weights(geometry, FRESH)
    record, alone = recorded(Runner(geometry, weights, (3,), GRID), random_step(geometry, [65, 1, 300], FRESH))
    padded_record, padded = recorded(Runner(geometry, weights, (8,), GRID), random_step(geometry, [65, 1, 300], FRESH, num_padded=5))
    same_experts = torch.equal(record.ids, padded_record.ids[:, :3])
    assert same_experts and torch.equal(alone.hidden, padded.hidden[:3]), f"seed {FRESH}"


def test_a_rows_bits_do_not_depend_on_the_other_rows():
    """A row's experts are added in the order of their ids, whoever else has chosen which: attention cut alike, all of it is repeatable."""
    geometry = TINY_MOE["many"]
    weights = random_weights(geometry, FRESH)
    inputs = random_step(geometry, LENGTHS[:8], FRESH)
    runner = Runner(geometry, weights, (8,), GRID)
    first, logits = runner.run(inputs), kernel_logits(runner, 8)
    inputs.input_ids[4:] = (inputs.input_ids[4:] + 1) % geometry.vocab
    second = runner.run(inputs)
    assert torch.equal(first.hidden[:4], second.hidden[:4]) and not torch.equal(first.hidden[4:], second.hidden[4:])
    assert torch.equal(logits[:, :4], kernel_logits(runner, 8)[:, :4])


def recorded(runner, inputs):
    """The step's RoutingRecord and hidden states."""
    record = RoutingRecord.empty(runner.geometry, inputs.rows, torch.device("cpu"))
    return record, runner.run(inputs, routing=record)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", TINY_MOE)
def test_the_record_is_what_was_ranked_and_chosen(name, rows):
    """The logits bit by bit, and the choices in the oracle's order."""
    geometry = TINY_MOE[name]
    weights = random_weights(geometry, FRESH)
    inputs = random_step(geometry, LENGTHS[:rows], FRESH)
    runner = Runner(geometry, weights, (rows,), GRID, emulation=EmulationOptions(check_order=True))
    record, outputs = recorded(runner, inputs)
    logits = kernel_logits(runner, rows)
    assert torch.equal(record.logits.view(torch.int16), logits.view(torch.int16)), f"seed {FRESH}"
    for layer in range(geometry.num_layers):
        assert record.ids[layer].tolist() == routing.choose(logits[layer], geometry.top_k, False).ids.tolist(), f"layer {layer}, seed {FRESH}"
    assert runner.kernel.last_report.num_races == 0 and same_bits(outputs, runner.run(inputs))


def test_a_router_of_zeros_takes_the_first_experts():
    geometry = TINY_MOE["many"]
    weights = random_weights(geometry, FRESH)
    for layer in weights.layers:
        layer.router.zero_()
    _, _, runs = check("many", 5, FRESH, weights=weights)
    for choices in runs[0].choices:
        assert choices.ids.tolist() == [list(range(8))] * 5 and torch.equal(choices.weights, torch.full((5, 8), 0.125, dtype=torch.float64))


def test_equal_rows_get_equal_bits():
    """Requests of one token, the same one: every expert that one row takes has all of them."""
    geometry = TINY_MOE["many"]
    inputs = random_step(geometry, [1] * 8, FRESH)
    inputs.input_ids.fill_(7)
    record, outputs = recorded(Runner(geometry, random_weights(geometry, FRESH), (8,), GRID), inputs)
    assert all(torch.equal(outputs.hidden[0], row) for row in outputs.hidden) and bool((record.ids == record.ids[:, :1]).all())


def test_an_expert_whose_logits_are_nan_is_taken_last():
    geometry = TINY_MOE["few"]
    weights = random_weights(geometry, FRESH)
    for layer in weights.layers:
        layer.router[3] = float("nan")
    record, _ = recorded(Runner(geometry, weights, (5,), GRID), random_step(geometry, LENGTHS[:5], FRESH))
    assert record.logits[0, :, 3].isnan().all() and not bool((record.ids[0] == 3).any())


def test_a_dense_step_records_no_routing():
    geometry = dataclasses.replace(TINY_MOE["few"], num_experts=0, top_k=0, moe_intermediate=0)
    inputs = random_step(geometry, [3], 1)
    with pytest.raises(ValueError, match="routing: the layers are dense"):
        Runner(geometry, random_weights(geometry, 1), (1,), GRID).run(inputs, routing=RoutingRecord.empty(geometry, 1, torch.device("cpu")))


def test_widths_share_one_workspace():
    geometry = TINY_MOE["raw"]
    weights = random_weights(geometry, FRESH)
    shared = Runner(geometry, weights, ROWS, GRID)
    for turn, rows in itertools.product(range(2), ROWS):
        inputs = random_step(geometry, [1 + 29 * rows] * rows, FRESH + turn)
        alone = Runner(geometry, weights, (rows,), GRID)
        assert same_bits(shared.run(inputs), alone.run(inputs)), f"rows {rows}, seed {FRESH + turn}"
    assert shared.kernel.executed() == {rows: 2 for rows in ROWS}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: setattr(p, "panel_pairs", 4), "panel_pairs 4 does not hold the 5 pairs that an expert may have"),
        (lambda p: setattr(p.geometry, "num_experts", 24), "num_experts 24 is not a multiple of 16 up to 384"),
        (lambda p: setattr(p.geometry, "top_k", 17), r"top_k 17 is outside 1\.\.16"),
        (lambda p: setattr(p.geometry, "top_k", 3), "moe is not moe_layout of rows, num_experts and top_k"),
        (lambda p: p.set_op(5, 256, 128, 1), "k_panel 128 is neither all of K nor a multiple of 512"),
        (lambda p: p.set_op(5, 256, 256, 2), r"ops\[5\].num_tiles 2 is not 1"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(change, message):
    geometry = TINY_MOE["few"]
    runner = Runner(geometry, random_weights(geometry, 1), (5,), GRID)
    change(runner.kernel._params[5])
    with pytest.raises(ValueError, match=message):
        runner.run(random_step(geometry, LENGTHS[:5], 1))
