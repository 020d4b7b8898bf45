"""The numerics gate of decode_step on the GPU: real geometries, every width, contexts on both sides of every edge."""

import time

import pytest
from decode_step_cases import CONTEXTS, MIXED, ROWS, gate
from decode_step_gpu import CUT, gpu_runner

from sgl_lowlatency.reference.inputs import random_step

FRESH = time.time_ns() % 2**31  # inputs no earlier run has seen; failures print it
THREE = ("qwen3-0.6b", "qwen3-8b", "qwen3-32b")


def check(name, lengths, page_size=1, num_padded=0, **options):
    rows = len(lengths) + num_padded
    runner = gpu_runner(name, FRESH, (rows,), **options)
    inputs = random_step(CUT[name], lengths, FRESH, "cuda", page_size=page_size, num_padded=num_padded)
    report = gate(CUT[name], runner.weights, [inputs], [runner.run(inputs)])
    assert report.passed, f"{name} lengths {lengths} seed {FRESH}\n{report}"
    assert runner.kernel.executed() == {rows: 1}
    assert runner.kernel.fault() is None
    return runner


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", THREE)
def test_gate(name, rows, context):
    check(name, [context] * rows)


@pytest.mark.parametrize("lengths", MIXED, ids=len)
@pytest.mark.parametrize("name", CUT)
def test_mixed_lengths(name, lengths):
    check(name, lengths)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("name", THREE)
def test_pages(name, page_size):
    check(name, MIXED[1], page_size=page_size)


@pytest.mark.parametrize("name", CUT)
def test_several_panels(name):
    runner = check(name, [65] * 16, panel_budget_bytes=20 * 1024)
    assert min(op.num_panels for op in runner.plans[16].ops) > 1


@pytest.mark.parametrize("name", CUT)
def test_padded_rows_are_harmless(name):
    check(name, [65, 1, 300], num_padded=5)
