"""The gate passes what rounding explains and nothing else."""

import dataclasses

import pytest
import torch

from sgl_lowlatency.reference.gate import compare, figure, top_token
from sgl_lowlatency.reference.step import StepOutputs

GENERATOR = torch.Generator().manual_seed(0)
ORACLE = torch.randn(4, 256, generator=GENERATOR, dtype=torch.float64)
STANDARD = ORACLE + 0.01 * torch.randn(4, 256, generator=GENERATOR, dtype=torch.float64)
NOISE = torch.randn(4, 256, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize(("scale", "passed"), [(0.0, True), (0.005, True), (0.01, True), (0.019, True), (0.021, False), (0.1, False)])
def test_factor_two_in_relative_l2(scale, passed):
    one = figure("x", ORACLE + scale * NOISE, STANDARD, ORACLE)
    assert one.passed is passed
    assert one.ours_rel_l2 == pytest.approx(scale * float(NOISE.norm() / ORACLE.norm()))


def test_one_wrong_element_is_seen_by_the_largest_difference():
    ours = STANDARD.clone()
    ours[2, 100] += 0.3
    one = figure("x", ours, STANDARD, ORACLE)
    assert one.ours_rel_l2 < 2 * one.standard_rel_l2
    assert not one.passed


@pytest.mark.parametrize(("error", "passed"), [(0.0624, True), (0.124, True), (0.126, False)])
def test_a_bf16_output_is_not_held_to_less_than_its_own_rounding(error, passed):
    """A channel much louder than the rest: its value of 20 may be 1/16 off in bf16, where the standard path was lucky."""
    oracle, standard = ORACLE.clone(), STANDARD.clone()
    oracle[1, 5] = standard[1, 5] = 20.0
    assert not figure("x", torch.where(oracle == 20.0, oracle + 0.2, standard), standard, oracle).passed
    one = figure("x", standard.bfloat16(), standard, oracle)
    assert one.rounding_abs == 1 / 16
    assert dataclasses.replace(one, ours_max_abs=error, standard_max_abs=0.001, standard_rms=0.0001).passed is passed


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_single_element_that_is_not_finite_never_passes(bad):
    ours = ORACLE.clone()
    ours[3, 7] = bad
    one = figure("x", ours, STANDARD, ORACLE)
    assert not one.passed
    assert one.num_not_finite == 1
    assert "1 elements not finite" in str(one)


def test_unwritten_poison_never_passes():
    assert not figure("x", torch.full_like(ORACLE, float("nan")), STANDARD, ORACLE).passed


def test_a_perfect_standard_path_tolerates_no_error():
    assert figure("x", ORACLE, ORACLE, ORACLE).passed
    assert not figure("x", ORACLE + 1e-9, ORACLE, ORACLE).passed


@pytest.mark.parametrize("arm", ["standard", "oracle"])
def test_nothing_is_compared_with_what_is_not_finite(arm):
    arms = {"ours": ORACLE, "standard": STANDARD, "oracle": ORACLE}
    arms[arm] = arms[arm].clone()
    arms[arm][0, 0] = float("nan")
    with pytest.raises(ValueError, match="is not finite, nothing can be compared"):
        figure("x", **arms)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"x: shapes \[4, 255\], \[4, 256\], \[4, 256\] differ"):
        figure("x", ORACLE[:, :255], STANDARD, ORACLE)


def step(hidden):
    rows = hidden.view(2, 4, 2, 64)
    return StepOutputs(hidden, rows, rows + 0, hidden @ hidden.T)


def test_every_output_is_judged_alone_and_named():
    oracle, standard = step(ORACLE), step(STANDARD)
    assert [f.output for f in compare(standard, standard, oracle).figures] == [
        "hidden", "k_rows[0]", "k_rows[1]", "v_rows[0]", "v_rows[1]", "logits",
    ]
    wrong = STANDARD.view(2, 4, 2, 64).clone()
    wrong[1, 0, 1] = wrong[1, 0, 0]  # layer 1, row 0: kv head 1 got head 0's values
    report = compare(dataclasses.replace(standard, v_rows=wrong), standard, oracle)
    assert not report.passed
    assert [f.output for f in report.misses] == ["v_rows[1]"]
    assert "MISS v_rows[1]" in str(report) and report.worst_ratio > 10


def test_the_top_token_counts_where_the_oracle_decides():
    """Margins of 1.0, 0.1 and 1.0 beside a standard path off by 0.2: two rows are decided, of which ours has one."""
    oracle = torch.tensor([[0.0, 2.0, 1.0], [1.0, 1.1, 0.0], [3.0, 2.0, 0.0]], dtype=torch.float64)
    standard = oracle.float() + 0.2
    ours = torch.tensor([[0.0, 2.0, 1.0], [1.2, 1.1, 0.0], [2.0, 2.5, 0.0]])
    found = top_token(ours, standard, oracle)
    assert (found.num_rows, found.num_decided, found.num_agreed, found.passed) == (3, 2, 1, False)
    assert str(found) == "MISS top token: 1 of 2 decided rows, of 3"
    assert top_token(oracle.float(), standard, oracle).passed
    assert not top_token(torch.full_like(ours, float("nan")), standard, oracle).passed


def test_a_wrong_top_token_alone_fails_the_gate():
    """Two logits swapped where the sums of squares hardly notice."""
    generator = torch.Generator().manual_seed(0)
    oracle = torch.randn(4, 4096, generator=generator, dtype=torch.float64)
    oracle[0, :2] = torch.tensor([6.0, 5.7])
    standard, ours = (oracle + 0.1 * (torch.rand(oracle.shape, generator=generator, dtype=torch.float64) - 0.5)).float(), oracle.float()
    ours[0, :2] = torch.tensor([5.8, 5.9])
    outputs = [StepOutputs(x[:, :8], x[None, :, :8], x[None, :, :8], x) for x in (ours, standard, oracle)]
    report = compare(*outputs)
    assert report.figures[-1].output == "logits" and report.figures[-1].passed
    assert not report.passed and not report.top_token.passed and "MISS top token" in str(report)
