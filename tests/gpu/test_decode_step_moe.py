"""decode_step of MoE layers on the GPU: Qwen3-MoE's sizes with few layers, the numerics gate, choices exactly, the same bits again, refusals."""

import dataclasses
import functools
import gc
import time

import pytest
import torch
from decode_step_cases import Runner, same_bits
from decode_step_gpu import require_replays_equal_eager
from moe_cases import TINY_MOE, TINY_MOE_FP8, biased, moe_gate, run

from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
from sgl_lowlatency.plan.presets import MOE_GEOMETRIES
from sgl_lowlatency.plan.tiles import grid_for
from sgl_lowlatency.reference import routing
from sgl_lowlatency.reference.inputs import random_step, random_weights

FRESH = time.time_ns() % 2**31  # inputs no earlier run has seen; failures print it
SEED = 47
ROWS = (1, 2, 3, 5, 8, 16)
LENGTHS = [65, 1, 300, 64, 2, 63, 100, 31, 1000, 33, 15, 16, 17, 1, 127, 128]


def _cut(name, num_layers):
    return dataclasses.replace(MOE_GEOMETRIES[name], num_layers=num_layers, vocab=2048, max_position=8192)


CUT = {
    "30b": _cut("qwen3-30b-a3b", 3),
    "235b": _cut("qwen3-235b-a22b", 1),
    "many": TINY_MOE["many"],
    "unnormalised": dataclasses.replace(TINY_MOE["many"], norm_topk_prob=False, num_experts=32, top_k=5),
    "few": TINY_MOE["few"],  # heads of 64
    "160": dataclasses.replace(TINY_MOE["many"], num_experts=160),
    "most": TINY_MOE["most"],  # heads of 64, 384 experts
    "deep": dataclasses.replace(TINY_MOE["many"], num_layers=20),  # every generation of the hand-over buffers comes twice
}


@functools.lru_cache(maxsize=1)
def weights_of(name, seed):
    gc.collect()
    torch.cuda.empty_cache()
    return random_weights(CUT[name], seed, "cuda", has_lm_head=True)


def gpu_runner(name, seed, rows, weights=None, **options):
    properties = torch.cuda.get_device_properties(0)
    grid = grid_for(CUT[name], properties.multi_processor_count)
    return Runner(CUT[name], weights or weights_of(name, seed), rows, grid, properties.shared_memory_per_block_optin, **options)


def check(name, lengths, weights=None, num_padded=0, page_size=1):
    rows = len(lengths) + num_padded
    runner = gpu_runner(name, FRESH, (rows,), weights)
    num_steps = 4 if rows <= 3 else 1  # the error of few rows is their luck
    steps = [random_step(CUT[name], lengths, FRESH + i, "cuda", num_padded=num_padded, page_size=page_size) for i in range(num_steps)]
    runs = [run(runner, step) for step in steps]
    report = moe_gate(CUT[name], runner.weights, steps, runs)
    assert report.passed, f"{name} lengths {lengths} seed {FRESH}\n{report}"
    assert runner.kernel.executed() == {rows: num_steps} and runner.kernel.fault() is None
    return runs[0]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", CUT)
def test_gate(name, rows):
    check(name, LENGTHS[:rows])


@pytest.mark.parametrize("context", [1, 64, 1000, 8000])
@pytest.mark.parametrize("rows", [1, 8])
def test_contexts(rows, context):
    check("30b", [context] * rows)


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages(page_size):
    check("30b", LENGTHS[:5], page_size=page_size)


@pytest.mark.parametrize("name", ["30b", "many"])
def test_padded_rows_are_harmless(name):
    check(name, [65, 1, 300], num_padded=5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["30b", "many", "unnormalised", "160", "most", "deep"])
def test_choices_are_the_oracles_on_the_same_logits(name, rows):
    """Ids and their order exactly, in every layer."""
    geometry, runner = CUT[name], gpu_runner(name, FRESH, (rows,))
    record = RoutingRecord.empty(geometry, rows, runner.device)
    runner.run(random_step(geometry, LENGTHS[:rows], FRESH, "cuda"), routing=record)
    for layer in range(geometry.num_layers):
        expected = routing.choose(record.logits[layer].cpu(), geometry.top_k, False).ids
        assert record.ids[layer].tolist() == expected.tolist(), f"layer {layer}, seed {FRESH}"


@pytest.mark.parametrize("rows", [2, 5, 8, 16])
@pytest.mark.parametrize("name", ["30b", "many"])
def test_all_rows_on_the_same_experts(name, rows):
    geometry = CUT[name]
    wanted = [geometry.num_experts - 1 - rank for rank in range(geometry.top_k)]
    weights = biased(geometry, random_weights(geometry, FRESH, "cuda", has_lm_head=True), lambda token: wanted)
    for choices in check(name, LENGTHS[:rows], weights).choices:
        assert choices.ids.tolist() == [wanted] * rows


@pytest.mark.parametrize("rows", [8, 16])
def test_all_rows_on_different_experts(rows):
    """128 experts, eight a row, none twice: the most active ones that there can be."""
    geometry = CUT["30b"]
    weights = random_weights(geometry, FRESH, "cuda", has_lm_head=True)
    weights = biased(geometry, weights, lambda token: [(8 * token + 37 * rank) % 8 + 8 * (token % 16) for rank in range(8)])
    inputs = random_step(geometry, LENGTHS[:rows], FRESH, "cuda")
    inputs.input_ids.copy_(torch.arange(rows))
    ours = run(gpu_runner("30b", FRESH, (rows,), weights), inputs)
    report = moe_gate(geometry, weights, [inputs], [ours])
    assert report.passed, f"rows {rows} seed {FRESH}\n{report}"
    assert all(len(routing.place(choices.ids, 128).experts) == 8 * rows for choices in ours.choices)


def test_equal_logits_fall_to_the_lower_id():
    geometry = CUT["30b"]
    weights = random_weights(geometry, FRESH, "cuda", has_lm_head=True)
    for layer in weights.layers:
        layer.router[1::2] = layer.router[::2].clone()
    for choices in check("30b", LENGTHS[:5], weights).choices:
        assert all(ids[1::2] == [first + 1 for first in ids[::2]] and all(first % 2 == 0 for first in ids[::2]) for ids in choices.ids.tolist())


@pytest.mark.parametrize(("rows_per_request", "prefixes"), [(4, [14, 0, 1000, 63]), (3, [65, 1, 300]), (8, [17, 63]), (16, [1000]), (2, [0] * 4)])
@pytest.mark.parametrize("name", ["30b", "many", "few", "160", "most"])
def test_verify_steps(name, rows_per_request, prefixes):
    geometry, rows = CUT[name], rows_per_request * len(prefixes)
    runner = gpu_runner(name, FRESH, (rows,), rows_per_request={rows: rows_per_request})
    inputs = random_step(geometry, prefixes, FRESH, "cuda", rows_per_request=rows_per_request, lengths_are_prefix=True)
    report = moe_gate(geometry, runner.weights, [inputs], [run(runner, inputs)])
    assert report.passed, f"{name} prefixes {prefixes}, {rows_per_request} rows a request, seed {FRESH}\n{report}"


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", ["30b", "most"])
def test_a_step_behind_one_of_padding_alone(name, rows):
    """As a graph is captured and then replayed."""
    step = random_step(CUT[name], LENGTHS[:rows], SEED, "cuda")
    runner = gpu_runner(name, SEED, (rows,))
    assert bool(runner.run(random_step(CUT[name], [], SEED, "cuda", num_padded=rows)).hidden.isfinite().all())
    assert same_bits(runner.run(step), gpu_runner(name, SEED, (rows,)).run(step))


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("name", ["30b", "deep"])
def test_the_same_bits_over_repeats(name, rows):
    runner = gpu_runner(name, SEED, (rows,))
    inputs = random_step(CUT[name], LENGTHS[:rows], SEED, "cuda")
    first = runner.run(inputs)
    for repeat in range(1, 100):
        assert same_bits(runner.run(inputs), first), f"repeat {repeat}"


@pytest.mark.parametrize("name", ["30b", "deep"])
def test_graph_replay_gives_the_bits_of_eager(name):
    """Other tokens choose other experts; the graph stays."""
    runner = gpu_runner(name, SEED, (5,))
    steps = [random_step(CUT[name], LENGTHS[:5], SEED + i, "cuda") for i in range(3)]
    assert require_replays_equal_eager(runner, steps) == 10 * len(steps)


def test_widths_share_one_workspace():
    shared = gpu_runner("30b", SEED, ROWS)
    for turn in range(2):
        for rows in ROWS:
            inputs = random_step(CUT["30b"], [1 + 97 * rows] * rows, SEED + turn, "cuda")
            assert same_bits(shared.run(inputs), gpu_runner("30b", SEED, (rows,)).run(inputs)), f"rows {rows}"


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({"head_dim": 64}, 1, "head_dim 64 of MoE layers in FP8 is not 128 on CUDA"),
        ({"num_experts": 144}, 1, "num_experts 144 of MoE layers in FP8 is not up to 128 on CUDA"),
        ({}, 32, r"rows 32 of MoE layers is not 1\.\.16 on CUDA"),
    ],
)
def test_what_has_no_instance_is_refused(changes, rows, message):
    is_fp8 = bool(changes)
    geometry = dataclasses.replace((TINY_MOE_FP8 if is_fp8 else CUT)["many"], **changes)
    runner = Runner(geometry, random_weights(geometry, 1, "cuda", weight_format="fp8_block" if is_fp8 else "bf16"), (rows,), 8)
    with pytest.raises(ValueError, match=message):
        runner.run(random_step(geometry, [3] * rows, 1, "cuda"))
