"""The self-check of MoE layers: it passes the kernel and near ties at any depth, fails wrong choices, routers, experts and streams, in one late
layer too, and leaves SGLang's modules alone."""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import pytest
import torch
from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
from sgl_lowlatency.runtime import self_check
from sgl_lowlatency.runtime.self_check import FIGURES, SGLANG_FP8_FIGURE, SelfCheck
from sgl_lowlatency.runtime.self_check_moe import (
    GAP, MOE_FIGURES, ROUTER_L2, WRONG_CHOICES, SglangRouters, distinct_experts, routing_errors,
)
from sgl_lowlatency.runtime.self_check_streams import ADDED_L2, STREAM_FIGURES, STREAM_L2
from sgl_lowlatency.specs.nvidia.qwen3_moe import QWEN3_MOE_SPEC
from tiny_serving import MOE_FP8_GEOMETRY, MOE_GEOMETRY

TOLERANCES = dict(QWEN3_MOE_SPEC.numerics.tolerances)
PLANTED = {  # dialect::Planted
    "unweighted expert": 24, "the next expert's matrix": 26, "off-by-one page": 4, "wrong kv head": 5, "skipped norm": 6, "wrong rope": 7,
    "mask off by one": 8,
}
TIE_TO_HIGHER_ID, CAPTURES_OUTPUT = 15, 20
DEEP = 24


def run(serving, ours, requests):
    check = SelfCheck(serving.model, serving.geometry, serving.weights, TOLERANCES)
    return check.run(serving.standard, ours, serving.batch(requests), serving.kv)


@pytest.mark.parametrize("rows, drafts", [(1, 1), (3, 1), (16, 1), (1, 4), (2, 5)])
def test_the_kernel_passes(make_serving, rows, drafts):
    serving = make_serving(num_slots=8192, drafts=drafts, geometry=MOE_GEOMETRY)
    report = run(serving, serving.kernel(rows=rows * drafts), rows)
    assert report.misses == [], str(report)
    assert set(report.figures) == {*FIGURES, *STREAM_FIGURES, *MOE_FIGURES}
    assert 0 < report.figures["first_layer_kv.relative_l2"] <= report.figures["kv.relative_l2"]
    assert all(report.figures[name] > 0 for name in (STREAM_L2, ROUTER_L2, "logits.relative_l2"))
    require_well_inside(report)
    assert report.choices == serving.geometry.num_layers * len(report.lengths) * drafts
    assert f"{report.other_choices} of {report.choices} choices of experts are not SGLang's" in str(report)
    rows *= drafts
    assert report.experts_a_layer == 4 if rows == 1 else 4 < report.experts_a_layer <= min(32, 4 * rows)
    assert str(report).endswith(f"; {report.experts_a_layer:.1f} experts a layer)")


@pytest.mark.parametrize("rows", [1, 3])
def test_the_kernel_passes_with_fp8_experts(make_serving, rows):
    """Ours and SGLang's exact products are a rounding apart; SGLang's own forward, which rounds what it multiplies to FP8, is further off."""
    serving = make_serving(num_slots=8192, geometry=MOE_FP8_GEOMETRY, weight_format="fp8_block")
    report = run(serving, serving.kernel(rows=rows), rows)
    assert report.misses == [], str(report)
    assert set(report.figures) == {*FIGURES, *STREAM_FIGURES, *MOE_FIGURES, SGLANG_FP8_FIGURE}
    require_well_inside(report)
    assert report.sglang_fp8["logits.relative_l2"] > 3 * report.figures["logits.relative_l2"]
    assert all("forward" not in vars(layer.mlp.experts) for layer in serving.model.model.layers)


@pytest.mark.parametrize("planted", [13, 14], ids=["wrong scale block", "gate's scale for up"])
def test_a_wrong_scale_of_an_expert_fails(make_serving, planted):
    serving = make_serving(num_slots=8192, geometry=MOE_FP8_GEOMETRY, weight_format="fp8_block")
    report = run(serving, serving.kernel(planted, rows=3), 3)
    assert missed_by(report), str(report)


def require_well_inside(report):
    """All of a right kernel's figures within two thirds of their bounds."""
    assert all(report.figures[name] <= bound / 1.5 for name, bound in TOLERANCES.items() if name in report.figures), str(report)


def missed_by(report, factor=2.0):
    """The figures that exceed their bounds by `factor`, so that a verdict does not hang on a rounding."""
    return {name for name, bound in TOLERANCES.items() if name in report.figures and bound and not report.figures[name] <= factor * bound}


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("bug", PLANTED)
def test_every_planted_bug_fails(make_serving, bug, drafts):
    serving = make_serving(geometry=MOE_GEOMETRY, drafts=drafts)
    report = run(serving, serving.kernel(PLANTED[bug], rows=3 * drafts), 3)
    assert missed_by(report), f"{bug} passed: {report}"


def test_weights_that_are_not_normalised_fail(make_serving):
    serving = make_serving(geometry=MOE_GEOMETRY)
    wrong = copy.copy(serving)
    wrong.geometry = dataclasses.replace(serving.geometry, norm_topk_prob=False)
    report = run(serving, wrong.kernel(rows=3), 3)
    assert {STREAM_L2, ADDED_L2} <= missed_by(report) and WRONG_CHOICES not in missed_by(report), str(report)


def test_depth_adds_nothing_to_what_right_kernels_are_apart(make_serving, monkeypatch):
    """Each figure of 24 layers is well inside its bound, where the same forwards from end to end leave several bounds."""
    serving = make_serving(geometry=MOE_GEOMETRY, num_layers=DEEP)
    kernel = serving.kernel(rows=3)
    require_well_inside(run(serving, kernel, 3))

    @contextlib.contextmanager
    def free_running(model, record):
        yield [layer.float() for layer in record.streams.transpose(0, 1)]

    monkeypatch.setattr(self_check, "streamed_as", free_running)
    free = run(serving, kernel, 3)
    assert {"kv.relative_l2", ROUTER_L2} <= {miss.split()[0] for miss in free.misses}, str(free)


def swapping_two_experts(serving, layer, rows):
    """A kernel in whose `layer`, alone, an expert that the first row of every batch takes has the weights of another one."""
    seen, right = [], serving.kernel(rows=rows)

    def noting(*batch, routing):
        output = right(*batch, routing=routing)
        seen.append(int(routing.ids[layer, 0, 0]))
        return output

    run(serving, noting, rows)
    wrong, tensors = copy.copy(serving), serving.weights.layers[layer]
    gate_up, down = tensors.gate_up.clone(), tensors.down.clone()
    for first in set(seen):
        gate_up[first], down[first] = tensors.gate_up[first - 1], tensors.down[first - 1]
    layers = list(serving.weights.layers)
    layers[layer] = dataclasses.replace(tensors, gate_up=gate_up, down=down)
    wrong.weights = dataclasses.replace(serving.weights, layers=layers)
    return wrong.kernel(rows=rows)


@pytest.mark.parametrize("layer, figures", [(DEEP // 2, {STREAM_L2, ADDED_L2}), (DEEP - 2, {ADDED_L2}), (DEEP - 1, {"logits.relative_l2"})])
def test_an_expert_that_is_another_in_one_late_layer_fails(make_serving, layer, figures):
    serving = make_serving(geometry=MOE_GEOMETRY, num_layers=DEEP)
    report = run(serving, swapping_two_experts(serving, layer, 3), 3)
    assert figures <= missed_by(report) <= {STREAM_L2, ADDED_L2, "logits.relative_l2"}, str(report)


def test_the_stream_that_leaves_a_layer_is_not_the_one_that_enters_it(make_serving):
    serving = make_serving(geometry=MOE_GEOMETRY)
    report = run(serving, serving.kernel(CAPTURES_OUTPUT, rows=3), 3)
    assert {STREAM_L2, ADDED_L2} <= missed_by(report), str(report)


def test_one_channel_of_one_stream_that_is_not_written_fails_and_reaches_nothing_of_sglangs(make_serving):
    serving = make_serving(geometry=MOE_GEOMETRY)
    kernel = serving.kernel(rows=3)

    def with_a_hole(input_ids, positions, forward_batch, routing):
        output = kernel(input_ids, positions, forward_batch, routing=routing)
        routing.streams[2, 1, 5] = float("nan")
        return output

    report = run(serving, with_a_hole, 3)
    assert {miss.split()[0] for miss in report.misses} == {STREAM_L2, ADDED_L2}, str(report)


def test_layers_that_are_not_called_are_named(make_serving):
    serving = make_serving(geometry=MOE_GEOMETRY)
    serving._enters = lambda positions, forward_batch: lambda layer, x, residual: (x, residual)
    with pytest.raises(RuntimeError, match="SGLang's forward called 0 of 2 layers"):
        run(serving, serving.kernel(rows=2), 2)


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
    batch.out_cache_loc = torch.arange(1, 4)  # no padding, whose rows choose no experts
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
    assert {STREAM_L2, ADDED_L2, WRONG_CHOICES, ROUTER_L2} <= {miss.split()[0] for miss in report.misses}, str(report)


def break_the_forward(serving):
    def breaks(*_):
        raise ValueError("on purpose")

    serving.standard = breaks


def break_a_layer(serving):
    def breaks(*_):
        raise ValueError("on purpose")

    serving.model.model.layers[1].forward = breaks


def break_a_router(serving):
    def breaks(*_):
        raise ValueError("on purpose")

    serving.model.model.layers[1].mlp.topk.forward = breaks


def lose_a_router(serving):
    del serving.model.model.layers[1].mlp.topk


@pytest.mark.parametrize("breaks, error", [
    (lambda serving: None, None), (break_the_forward, ValueError), (break_a_layer, ValueError), (break_a_router, ValueError),
    (lose_a_router, AttributeError),
])
def test_sglangs_modules_are_put_back(make_serving, breaks, error):
    serving = make_serving(geometry=MOE_GEOMETRY)
    breaks(serving)
    layers = serving.model.model.layers
    modules = [module for layer in layers for module in (layer, getattr(layer.mlp, "topk", None)) if module is not None]
    before, seen = [dict(vars(module)) for module in modules], []
    standard = serving.standard

    def watched(*batch):
        seen.append([dict(vars(module)) for module in modules])
        return standard(*batch)

    serving.standard = watched
    with pytest.raises(error, match="on purpose|topk") if error else contextlib.nullcontext():
        run(serving, serving.kernel(rows=2), 2)
    assert [dict(vars(module)) for module in modules] == before
    assert all("forward" in of_module for of_modules in seen for of_module in of_modules) and bool(seen) == (error is not AttributeError)


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
