"""Steps of several rows a request on the GPU: real geometries, the numerics gate, the same bits again."""

import time

import pytest
from decode_step_cases import VERIFY_ROWS_PER_REQUEST, gate, same_bits, verify_batches
from decode_step_gpu import CUT, gpu_runner, require_replays_equal_eager

from sgl_lowlatency.reference.inputs import random_step

FRESH = time.time_ns() % 2**31  # inputs no earlier run has seen; failures print it
SEED = 43


def check(name, rows_per_request, batches, page_size=1):
    rows = len(batches[0]) * rows_per_request
    runner = gpu_runner(name, FRESH, (rows,), rows_per_request={rows: rows_per_request})
    for i, prefixes in enumerate(batches):
        inputs = random_step(CUT[name], prefixes, FRESH + i, "cuda", page_size=page_size, rows_per_request=rows_per_request, lengths_are_prefix=True)
        report = gate(CUT[name], runner.weights, [inputs], [runner.run(inputs)])
        assert report.passed, f"{name} prefixes {prefixes}, {rows_per_request} rows a request, seed {FRESH}\n{report}"
    assert runner.kernel.executed() == {rows: len(batches)}
    assert runner.kernel.fault() is None


@pytest.mark.parametrize("rows_per_request", VERIFY_ROWS_PER_REQUEST)
@pytest.mark.parametrize("name", CUT)
def test_gate(name, rows_per_request):
    check(name, rows_per_request, verify_batches(rows_per_request))


@pytest.mark.parametrize("rows_per_request", [4, 8])
@pytest.mark.parametrize("name", CUT)
def test_steps_of_32_rows(name, rows_per_request):
    check(name, rows_per_request, verify_batches(rows_per_request, 32))


@pytest.mark.parametrize("prefixes", [[0], [1], [4], [15], [17], [1000], [8000]], ids=str)
@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.2-1b"])
def test_a_chain_of_sixteen(name, prefixes):
    check(name, 16, [prefixes])


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen2.5-7b"])
def test_pages(name, page_size):
    check(name, 4, verify_batches(4), page_size=page_size)


@pytest.mark.parametrize("name", CUT)
def test_padded_requests_are_harmless(name):
    runner = gpu_runner(name, FRESH, (16,), rows_per_request={16: 4})
    inputs = random_step(CUT[name], [65, 0], FRESH, "cuda", num_padded=2, rows_per_request=4, lengths_are_prefix=True)
    report = gate(CUT[name], runner.weights, [inputs], [runner.run(inputs)], rows=8)
    assert report.passed, f"{name} seed {FRESH}\n{report}"


@pytest.mark.parametrize(("rows_per_request", "prefixes"), [(4, [1000, 0, 63, 300]), (8, [8000 - 8, 15]), (5, [65]), (4, [1000, 0, 63, 300, 15, 16, 17, 65])])
@pytest.mark.parametrize("name", CUT)
def test_the_same_bits_over_repeats(name, rows_per_request, prefixes):
    rows = len(prefixes) * rows_per_request
    runner = gpu_runner(name, SEED, (rows,), rows_per_request={rows: rows_per_request})
    inputs = random_step(CUT[name], prefixes, SEED, "cuda", rows_per_request=rows_per_request, lengths_are_prefix=True)
    first = runner.run(inputs)
    for repeat in range(1, 50):
        assert same_bits(runner.run(inputs), first), f"repeat {repeat}"


def test_graph_replay_gives_the_bits_of_eager():
    """One captured verify step replayed on other tokens, prefixes and pages."""
    name, prefixes = "qwen3-8b", [1000, 0, 63, 300]
    runner = gpu_runner(name, SEED, (16,), rows_per_request={16: 4})
    steps = [
        random_step(CUT[name], order, SEED + i, "cuda", rows_per_request=4, lengths_are_prefix=True)
        for i, order in enumerate((prefixes, prefixes[::-1], prefixes[2:] + prefixes[:2]))
    ]
    assert require_replays_equal_eager(runner, steps) == 10 * len(steps)
