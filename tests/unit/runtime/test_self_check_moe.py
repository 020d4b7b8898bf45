"""The self-check of MoE layers: it passes the kernel and near ties, fails wrong choices, routers and experts, and leaves the routers alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
from sgl_lowlatency.runtime.self_check import FIGURES, SelfCheck
from sgl_lowlatency.runtime.self_check_moe import (
    GAP, ROUTER_L2, ROUTING_FIGURES, WRONG_CHOICES, SglangRouters, distinct_experts, routing_errors,
)
from sgl_lowlatency.specs.nvidia.qwen3_moe import QWEN3_MOE_SPEC
from tiny_serving import MOE_GEOMETRY

TOLERANCES = dict(QWEN3_MOE_SPEC.numerics.tolerances)
PLANTED = {"unweighted expert": 24, "the next expert's matrix": 26, "skipped norm": 6, "mask off by one": 8}  # dialect::Planted
TIE_TO_HIGHER_ID = 15


def run(serving, ours, requests):
    check = SelfCheck(serving.model, serving.geometry, serving.weights, TOLERANCES)
    return check.run(serving.standard, ours, serving.batch(requests), serving.kv)


@pytest.mark.parametrize("rows, drafts", [(1, 1), (3, 1), (16, 1), (1, 4), (2, 5)])
def test_the_kernel_passes(make_serving, rows, drafts):
    serving = make_serving(num_slots=8192, drafts=drafts, geometry=MOE_GEOMETRY)
    report = run(serving, serving.kernel(rows=rows * drafts), rows)
    assert report.misses == [], str(report)
    assert set(report.figures) == {*FIGURES, *ROUTING_FIGURES}
    assert 0 < report.figures["first_layer_kv.relative_l2"] < report.figures["kv.relative_l2"] < 0.04
    assert 0 < report.figures[ROUTER_L2] < 0.04
    assert report.choices == serving.geometry.num_layers * len(report.lengths) * drafts
    assert f"{report.other_choices} of {report.choices} choices of experts are not SGLang's" in str(report)
    rows *= drafts
    assert report.experts_a_layer == 4 if rows == 1 else 4 < report.experts_a_layer <= min(32, 4 * rows)
    assert str(report).endswith(f"; {report.experts_a_layer:.1f} experts a layer)")


@pytest.mark.parametrize("bug", PLANTED)
def test_every_planted_bug_fails(make_serving, bug):
    serving = make_serving(geometry=MOE_GEOMETRY)
    report = run(serving, serving.kernel(PLANTED[bug], rows=3), 3)
    assert any(not report.figures[name] <= 2 * bound for name, bound in TOLERANCES.items() if bound), f"{bug} passed: {report}"


def twins(serving):
    """Experts 2 i and 2 i + 1 get the same router row, so that their logits tie; what they compute differs."""
    for layer, tensors in zip(serving.model.model.layers, serving.weights.layers, strict=True):
        assert layer.mlp.gate.weight.data_ptr() == tensors.router.data_ptr()
        tensors.router[1::2] = tensors.router[::2]
    return serving


def test_ties_are_the_lower_ids(make_serving):
    serving = twins(make_serving(geometry=dataclasses.replace(MOE_GEOMETRY, top_k=3)))
    assert run(serving, serving.kernel(rows=3), 3).misses == []
    report = run(serving, serving.kernel(TIE_TO_HIGHER_ID, rows=3), 3)
    assert report.figures[WRONG_CHOICES] == 1.0 and report.figures[GAP] == 0.0
    assert report.misses == [f"{WRONG_CHOICES} 1 is not within 0"]


def test_a_tie_that_sglang_decides_otherwise_is_compared_on_our_choice(make_serving):
    """top_k 3 takes one of the second pair of twins, SGLang's router here the other one: another expert speaks."""
    serving = twins(make_serving(geometry=dataclasses.replace(MOE_GEOMETRY, top_k=3)))
    for layer in serving.model.model.layers:
        layer.mlp.topk.flips = (0, 2)
    report = run(serving, serving.kernel(rows=3), 3)
    assert report.misses == [], str(report)
    assert report.other_choices == report.choices * 2 // 3 and report.figures[GAP] == 0.0

    record = RoutingRecord.empty(serving.geometry, 3, torch.device("cpu"))
    batch = serving.batch(3)
    ours = serving.kernel(rows=3)(batch.input_ids, batch.positions, batch, routing=record).next_token_logits
    theirs = serving.standard(batch.input_ids, batch.positions, batch).next_token_logits
    apart = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert apart[1] < TOLERANCES["logits.relative_l2"] < apart[[0, 2]].min(), "without our choice in its place, SGLang's forward is far off"


def test_an_expert_far_below_the_last_choice_fails(make_serving):
    serving = make_serving(geometry=MOE_GEOMETRY)
    kernel = serving.kernel(rows=3)

    def with_last_ids(input_ids, positions, forward_batch, routing):
        output = kernel(input_ids, positions, forward_batch, routing=routing)
        routing.ids[:, 2, -1] = routing.logits[:, 2].float().argmin(dim=-1).int()
        return output

    report = run(serving, with_last_ids, 3)
    assert report.figures[WRONG_CHOICES] == 1.0 and report.figures[GAP] > 2 * TOLERANCES[GAP], str(report)


def test_logits_that_are_not_the_routers_fail(make_serving):
    serving = make_serving(geometry=MOE_GEOMETRY)
    kernel = serving.kernel(rows=2)

    def scaled(input_ids, positions, forward_batch, routing):
        output = kernel(input_ids, positions, forward_batch, routing=routing)
        routing.logits[1, 1] *= 1.5
        return output

    report = run(serving, scaled, 2)
    assert [miss.split()[0] for miss in report.misses] == [ROUTER_L2], str(report)


def test_a_record_that_is_not_written_fails(make_serving):
    serving = make_serving(geometry=MOE_GEOMETRY)
    kernel = serving.kernel(rows=2)
    report = run(serving, lambda *batch, routing: kernel(*batch), 2)
    assert {WRONG_CHOICES, ROUTER_L2} <= {miss.split()[0] for miss in report.misses}, str(report)


def test_the_routers_are_put_back(make_serving):
    serving = make_serving(geometry=MOE_GEOMETRY)
    before = [dict(vars(layer.mlp.topk)) for layer in serving.model.model.layers]
    run(serving, serving.kernel(rows=2), 2)
    with pytest.raises(ValueError, match="of the forward"):
        check = SelfCheck(serving.model, serving.geometry, serving.weights, TOLERANCES)

        def breaks(*_):
            raise ValueError("of the forward")

        check.run(breaks, serving.kernel(rows=2), serving.batch(2), serving.kv)
    assert [dict(vars(layer.mlp.topk)) for layer in serving.model.model.layers] == before


def test_distinct_experts_by_hand():
    record = RoutingRecord(torch.tensor([[[0, 2], [1, 0]], [[3, 2], [2, 3]]], dtype=torch.int32), torch.zeros(2, 2, 4))
    assert distinct_experts(record) == 2.5


def test_figures_of_routing_by_hand():
    logits = torch.tensor([[[3.0, 1.0, 2.0, 0.0], [1.0, 1.0, 0.0, float("nan")]]]).bfloat16()
    record = RoutingRecord(torch.tensor([[[0, 2], [1, 0]]], dtype=torch.int32), logits)
    theirs = SglangRouters([torch.tensor([[3.0, 2.5, 2.0, 0.0], [1.0, 1.0, 0.0, -1.0]])], [torch.tensor([[0, 1], [0, 1]])])
    errors = routing_errors(record, theirs)
    assert errors[WRONG_CHOICES].tolist() == [[0.0, 1.0]]  # of equal logits the lower id comes first; NaN comes last
    assert errors[GAP][0].tolist() == pytest.approx([0.5 / ((9 + 6.25 + 4) / 4) ** 0.5, 0.0])
    assert errors[ROUTER_L2][0, 0] == pytest.approx(1.5 / (9 + 6.25 + 4) ** 0.5) and errors[ROUTER_L2][0, 1].isnan()
