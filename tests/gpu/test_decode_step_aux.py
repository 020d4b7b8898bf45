"""Auxiliary hidden states on the GPU: the stream that enters captured layers of real geometries, against the float64 oracle."""

import time

import pytest
import torch
from decode_step_cases import MIXED, gate, verify_batches
from decode_step_gpu import CUT, gpu_runner, require_replays_equal_eager

from sgl_lowlatency.reference.inputs import random_step

FRESH = time.time_ns() % 2**31  # inputs no earlier run has seen; failures print it
SEED = 47


def check(name, lengths, captured, rows_per_request=1, weight_format="bf16"):
    rows = len(lengths) * rows_per_request
    runner = gpu_runner(name, FRESH, (rows,), weight_format, rows_per_request={rows: rows_per_request}, captured=captured)
    kinds = {"rows_per_request": rows_per_request, "lengths_are_prefix": rows_per_request > 1}
    inputs = random_step(CUT[name], lengths, FRESH, "cuda", **kinds)
    outputs = runner.run(inputs)
    report = gate(CUT[name], runner.weights, [inputs], [outputs], captured=captured)
    assert report.passed, f"{name} lengths {lengths}, {rows_per_request} rows a request, seed {FRESH}\n{report}"
    assert sum(figure.output.startswith("aux[") for figure in report.figures) == len(captured)
    if captured[0] == 0:
        assert torch.equal(outputs.aux[0], runner.weights.embedding[inputs.input_ids])
    assert runner.kernel.fault() is None


@pytest.mark.parametrize("captured", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("lengths", [[1000], MIXED[1], MIXED[3]], ids=len)
@pytest.mark.parametrize("name", CUT)
def test_gate(name, lengths, captured):
    check(name, lengths, captured)


@pytest.mark.parametrize("rows_per_request", [4, 8, 16])
@pytest.mark.parametrize("name", CUT)
def test_verify_rows(name, rows_per_request):
    check(name, verify_batches(rows_per_request)[-1], [0, 1], rows_per_request)


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_channel"])
def test_fp8_weights(weight_format):
    check("qwen3-8b", MIXED[1], [0, 1], weight_format=weight_format)


def test_graph_replay_gives_the_bits_of_eager():
    """One captured verify step replayed on other tokens, prefixes and pages; aux_out is the graph's."""
    name, prefixes = "qwen3-8b", [1000, 0, 63, 300]
    runner = gpu_runner(name, SEED, (16,), rows_per_request={16: 4}, captured=[0, 1])
    steps = [
        random_step(CUT[name], order, SEED + i, "cuda", rows_per_request=4, lengths_are_prefix=True)
        for i, order in enumerate((prefixes, prefixes[::-1], prefixes[2:] + prefixes[:2]))
    ]
    assert require_replays_equal_eager(runner, steps) == 10 * len(steps)
