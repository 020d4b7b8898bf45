"""The LM head inside decode_step on the GPU: the gate over logits at whole vocabularies, repeatable, replayed, and left out."""

import time

import pytest
from decode_step_cases import MIXED, ROWS, gate, same_bits
from decode_step_gpu import CUT, geometry_of, gpu_runner, require_replays_equal_eager

from sgl_lowlatency.reference.inputs import random_step

FRESH = time.time_ns() % 2**31  # inputs no earlier run has seen; failures print it
SEED = 43
VOCABS = {"qwen3-0.6b": 151936, "qwen3-8b": 151936, "llama-3.2-1b": 128256}


def check(name, lengths, vocab, *, weight_format="bf16", rows_per_request=1):
    geometry, rows = geometry_of(name, vocab), len(lengths) * rows_per_request
    runner = gpu_runner(name, FRESH, (rows,), weight_format, head_vocab=vocab, rows_per_request={rows: rows_per_request})
    is_verify = rows_per_request > 1
    inputs = random_step(geometry, lengths, FRESH, "cuda", rows_per_request=rows_per_request, lengths_are_prefix=is_verify)
    report = gate(geometry, runner.weights, [inputs], [runner.run(inputs)])
    assert report.passed, f"{name} lengths {lengths} seed {FRESH}\n{report}"
    assert report.figures[-1].output == "logits" and report.top_token.num_rows == rows
    assert runner.kernel.executed() == {rows: 1} and runner.kernel.fault() is None
    return runner


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", VOCABS)
def test_gate_of_whole_vocabularies(name, rows):
    check(name, [1 + 61 * row for row in range(rows)], VOCABS[name])


@pytest.mark.parametrize("lengths", MIXED, ids=len)
@pytest.mark.parametrize("name", CUT)
def test_vocabularies_that_end_inside_a_tile(name, lengths):
    check(name, lengths, 2043)


def test_rows_whose_head_is_walked_in_several_goes():
    runner = check("qwen3-8b", [65] * 16, 151936)
    plan = runner.plans[16]
    assert plan.head.num_panels > 1 and plan.max_tiles_multi_panel < plan.head.max_tiles


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_channel"])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_bf16_head_behind_fp8_layers(weight_format, rows):
    check("qwen3-8b", [65] * rows, 151936, weight_format=weight_format)


@pytest.mark.parametrize("rows_per_request", [2, 4, 8])
def test_verify_steps(rows_per_request):
    check("qwen3-8b", [0, 65], 151936, rows_per_request=rows_per_request)


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_repeats_replays_and_launches_without_logits_give_the_same_bits(rows):
    name, vocab = "qwen3-8b", VOCABS["qwen3-8b"]
    runner = gpu_runner(name, SEED, (rows,), head_vocab=vocab)
    lengths = [1 + (61 * row + 40) % 500 for row in range(rows)]  # the same ones in each step, of other rows: a graph's tables keep their shape
    steps = [random_step(runner.geometry, lengths[i:] + lengths[:i], SEED + i, "cuda") for i in range(3)]
    first = runner.run(steps[0])
    for _ in range(20):
        assert same_bits(runner.run(steps[0]), first)
        assert same_bits(runner.run(steps[0], with_logits=False), first)
    assert require_replays_equal_eager(runner, steps) == 10 * len(steps)
