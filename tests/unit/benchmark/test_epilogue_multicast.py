"""The bench of epilogue_multicast without a GPU: both arms on emulated ranks, what it compares, and the row it writes."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from benchmark.kernels import epilogue_multicast  # noqa: E402
from sgl_lowlatency.bench.results import Results  # noqa: E402

CPU = torch.device("cpu")


def case(ranks=4, rows=3):
    one = epilogue_multicast.Case(ranks, rows, 128, 512, 2, CPU, 2)
    one.launch_ours()
    one.launch_standard()
    return one


def test_both_arms_agree_with_the_oracle():
    assert case().problems() == []
    assert case(ranks=2, rows=8).problems() == []


def test_differences_are_named():
    one = case()
    tensors = one.ours[1]
    tensors[2].sum[1, 7] += 1
    assert one.problems() == ["layer 1: rank 2 has other bits than rank 0"]
    one = case()
    for tensors in one.ours[0]:
        tensors.normed[0, 3] = float("nan")
    (first, *others) = one.problems()
    assert first.startswith("layer 0: MISS normed") and "1 elements not finite" in first
    assert others == [f"layer 0: rank {rank} has other bits than rank 0" for rank in (1, 2, 3)], "NaN is equal to nothing"


def test_a_rank_left_out_misses_the_gate():
    one = case()
    inputs = one.inputs.clone()
    inputs[3] = 0
    wanted = epilogue_multicast.oracle(inputs, one.weights[0], one.residual, one.norm)
    ours = [dataclasses.replace(one.ours[0][0], sum=wanted[0].bfloat16(), normed=wanted[1].bfloat16())]
    right = epilogue_multicast.oracle(one.inputs, one.weights[0], one.residual, one.norm)
    assert [what.split(":")[0] for what in epilogue_multicast.problems(ours, one.standard[0], right)] == ["MISS sum", "MISS normed"]


def test_a_row_has_what_a_results_file_needs():
    row = epilogue_multicast.row_of(4, 6, 4096, 4096, 36, [0.03, 0.031, 0.03], [0.015, 0.015, 0.0151], [0.01, 0.01, 0.01], [])
    results = Results(None, what="kernel", name="x", weights=epilogue_multicast.WEIGHTS, command=[], commit="0" * 40)
    added = results.add(**row)
    assert added["ratio"] == 2.0 and added["tp"] == 4
    text = epilogue_multicast.table(results.content)
    assert "    4    6    30.00    15.00      10.00   2.00" in text and text.endswith("  -")
