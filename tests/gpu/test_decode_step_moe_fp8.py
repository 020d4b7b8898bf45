"""decode_step of MoE layers with FP8 experts on the GPU: the numerics gate on the dequantised weights, verify, the same bits again."""

import dataclasses
import functools
import gc
import time

import pytest
import torch
from decode_step_cases import Runner, same_bits
from decode_step_gpu import require_replays_equal_eager
from moe_cases import TINY_MOE_FP8, moe_gate, run

from sgl_lowlatency.plan.presets import MOE_GEOMETRIES
from sgl_lowlatency.plan.tiles import grid_for
from sgl_lowlatency.reference.inputs import random_step, random_weights

FRESH = time.time_ns() % 2**31  # inputs no earlier run has seen; failures print it
SEED = 53
ROWS = (1, 2, 5, 8, 16)
LENGTHS = [65, 1, 300, 64, 2, 63, 100, 31, 1000, 33, 15, 16, 17, 1, 127, 128]


def _cut(name, num_layers):
    return dataclasses.replace(MOE_GEOMETRIES[name], num_layers=num_layers, vocab=2048, max_position=8192)


CUT = {"30b": _cut("qwen3-30b-a3b", 3), "235b": _cut("qwen3-235b-a22b", 1), "many": TINY_MOE_FP8["many"], "wide": TINY_MOE_FP8["wide"]}
NUM_REPEATS = 100


@functools.lru_cache(maxsize=1)
def weights_of(name, seed):
    gc.collect()
    torch.cuda.empty_cache()
    return random_weights(CUT[name], seed, "cuda", has_lm_head=True, weight_format="fp8_block")


def gpu_runner(name, seed, rows, **options):
    properties = torch.cuda.get_device_properties(0)
    grid = grid_for(CUT[name], properties.multi_processor_count)
    return Runner(CUT[name], weights_of(name, seed), rows, grid, properties.shared_memory_per_block_optin, **options)


def check(name, lengths, rows_per_request=1, **inputs):
    rows = len(lengths) * rows_per_request
    runner = gpu_runner(name, FRESH, (rows,), rows_per_request={rows: rows_per_request})
    num_steps = 4 if rows <= 3 else 1  # the error of few rows is their luck
    lengths = [length + rows_per_request for length in lengths]
    steps = [random_step(CUT[name], lengths, FRESH + i, "cuda", rows_per_request=rows_per_request, **inputs) for i in range(num_steps)]
    runs = [run(runner, step) for step in steps]
    report = moe_gate(CUT[name], runner.weights, steps, runs)
    assert report.passed, f"{name} lengths {lengths} seed {FRESH}\n{report}"
    assert runner.kernel.executed() == {rows: num_steps} and runner.kernel.fault() is None


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", CUT)
def test_gate(name, rows):
    check(name, LENGTHS[:rows])


@pytest.mark.parametrize("context", [1000, 8000])
@pytest.mark.parametrize("rows", [1, 8])
def test_contexts(rows, context):
    check("30b", [context] * rows)


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages(page_size):
    check("30b", LENGTHS[:5], page_size=page_size)


@pytest.mark.parametrize(("requests", "rows_per_request"), [(1, 4), (2, 4), (4, 4), (2, 6)])
def test_verify(requests, rows_per_request):
    check("30b", LENGTHS[:requests], rows_per_request)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("name", CUT)
def test_the_same_bits_again(name, rows):
    runner, inputs = gpu_runner(name, SEED, (rows,)), random_step(CUT[name], LENGTHS[:rows], SEED, "cuda")
    first = runner.run(inputs)
    for repeat in range(NUM_REPEATS):
        assert same_bits(runner.run(inputs), first), f"repeat {repeat}"


def test_graph_replay_gives_the_bits_of_eager():
    steps = [random_step(CUT["30b"], LENGTHS[:5], SEED + i, "cuda") for i in range(3)]
    assert require_replays_equal_eager(gpu_runner("30b", SEED, (5,)), steps) == 10 * len(steps)
