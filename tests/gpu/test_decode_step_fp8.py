"""decode_step with FP8 weights on the GPU: the numerics gate on the dequantised weights, and the same bits again."""

import time

import pytest
import torch
from decode_step_cases import CONTEXTS, MIXED, ROWS, Runner, gate, join, same_bits, with_subnormal_codes
from decode_step_gpu import CUT, gpu_runner, weights_of

from sgl_lowlatency.reference import dense_decode, standard_path
from sgl_lowlatency.reference.gate import compare
from sgl_lowlatency.reference.inputs import random_step

FRESH = time.time_ns() % 2**31  # inputs no earlier run has seen; failures print it
FORMATS = ("fp8_block", "fp8_channel")
SEED = 43
NUM_REPEATS = 100


def check(name, lengths, weight_format, page_size=1, num_padded=0, **options):
    rows = len(lengths) + num_padded
    runner = gpu_runner(name, FRESH, (rows,), weight_format, **options)
    inputs = random_step(CUT[name], lengths, FRESH, "cuda", page_size=page_size, num_padded=num_padded)
    outputs = runner.run(inputs)
    report = gate(CUT[name], runner.weights, [inputs], [outputs])
    assert report.passed, f"{name} {weight_format} lengths {lengths} seed {FRESH}\n{report}"
    assert runner.kernel.executed() == {rows: 1}
    assert runner.kernel.fault() is None
    return runner, inputs, outputs


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_gate(weight_format, rows, context):
    check("qwen3-8b", [context] * rows, weight_format)


@pytest.mark.parametrize("lengths", MIXED, ids=len)
@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_mixed_lengths(weight_format, name, lengths):
    check(name, lengths, weight_format)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_pages(page_size):
    check("qwen3-8b", MIXED[1], "fp8_block", page_size=page_size)


@pytest.mark.parametrize("name", CUT)
def test_several_panels(name):
    runner, _, _ = check(name, [65] * 16, "fp8_block", panel_budget_bytes=36 * 1024)
    assert [op.num_panels for op in runner.plans[16].ops] == [-(-op.k_extent // 1024) for op in runner.plans[16].ops]


@pytest.mark.parametrize("name", CUT)
def test_padded_rows_are_harmless(name):
    check(name, [65, 1, 300], "fp8_block", num_padded=5)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_sglangs_own_error_is_several_times_ours(weight_format):
    runner, inputs, outputs = check("qwen3-8b", MIXED[1], weight_format)
    arguments = CUT["qwen3-8b"], runner.weights, inputs
    report = compare(join([outputs]), standard_path.decode_step(*arguments), dense_decode.decode_step(*arguments, torch.float64))
    for figure in report.figures:
        assert figure.ours_rel_l2 * 4 < figure.standard_rel_l2, str(figure)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_subnormal_codes_count(weight_format):
    """A GPU that took bf16 subnormals for zero would lose every weight."""
    name = "qwen3-0.6b"
    weights = with_subnormal_codes(weights_of(name, SEED, weight_format), SEED)
    properties = torch.cuda.get_device_properties(0)
    runner = Runner(
        CUT[name], weights, (3,), grid=properties.multi_processor_count, shared_memory_bytes=properties.shared_memory_per_block_optin
    )
    inputs = random_step(CUT[name], MIXED[0], FRESH, "cuda")
    report = gate(CUT[name], weights, [inputs], [runner.run(inputs)])
    assert report.passed, f"seed {FRESH}\n{report}"


@pytest.mark.parametrize("lengths", [[1], MIXED[1], MIXED[3]], ids=len)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_same_bits_over_repeats(weight_format, lengths):
    runner = gpu_runner("qwen3-8b", SEED, (len(lengths),), weight_format)
    inputs = random_step(CUT["qwen3-8b"], lengths, SEED, "cuda")
    first = runner.run(inputs)
    for repeat in range(1, NUM_REPEATS):
        assert same_bits(runner.run(inputs), first), f"repeat {repeat}"
    assert runner.kernel.executed() == {len(lengths): NUM_REPEATS}


def test_graph_replay_gives_the_bits_of_eager():
    lengths = MIXED[1]
    runner = gpu_runner("qwen3-8b", SEED, (len(lengths),), "fp8_block")
    inputs = random_step(CUT["qwen3-8b"], lengths, SEED, "cuda")
    eager = runner.run(inputs).hidden
    static = inputs.clone()
    hidden = torch.empty_like(eager)
    runner.attach(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner.launch(static, hidden)
    for _ in range(10):
        hidden.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(hidden.view(torch.int16), eager.view(torch.int16))
