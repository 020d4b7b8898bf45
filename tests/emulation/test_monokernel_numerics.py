"""k1 and k2 on emulated waves: whole layers, dense and MoE, decode and verify, on both parts.

Oracle: the float64 decoder (reference/), with SGLang's bf16 rounding as the measure (monokernel_cases.gate).
"""

import dataclasses

import pytest
import torch
from monokernel_cases import Group, gate, moe_gate, tiny, tiny_moe

from sgl_lowlatency.reference import routing
from sgl_lowlatency.reference.inputs import random_step, random_weights

LENGTHS = {  # by rows: lengths that meet batch, item and split edges beside one another
    1: [333],
    6: [1, 31, 32, 33, 64, 200],
    8: [65, 1, 128, 129, 2, 63, 96, 200],
    16: [65, 1, 130, 64, 2, 63, 3, 31, 32, 33, 15, 16, 17, 1, 7, 128],
}
DENSE = {
    "group1": tiny(2, 256, 2, 2, 64, 192),  # one query head a kv head
    "group4": tiny(2, 1088, 8, 2, 128, 1600),  # of many rows the operand is several panels
    "group16": tiny(2, 96, 16, 1, 64, 160),  # an item's columns are one row's; waves without columns of K
    "group5": tiny(1, 320, 5, 1, 128, 448),
}
MOE = {
    "few": tiny_moe(2, 256, 4, 2, 64, 16, 2, 64),
    "many": tiny_moe(2, 128, 4, 1, 64, 256, 8, 32),
    "wide": tiny_moe(1, 96, 2, 2, 64, 32, 4, 1088),  # an expert's activations of all rows are more than a panel
}


def check(group, step, seed=0):
    report = gate(group.g, group.weights, step, group.run(step, seed=seed))
    assert report.passed, str(report)
    assert group.report.num_races == 0


@pytest.mark.parametrize(
    ("name", "rows", "isa"),
    [
        ("group1", 1, "gfx942"), ("group1", 8, "gfx950"), ("group1", 16, "gfx942"), ("group4", 1, "gfx950"), ("group4", 6, "gfx942"),
        ("group4", 16, "gfx942"), ("group4", 16, "gfx950"), ("group16", 6, "gfx950"), ("group16", 8, "gfx942"),
        ("group5", 6, "gfx942"), ("group5", 16, "gfx950"),
    ],
)
def test_dense_decode(name, rows, isa):
    g = DENSE[name]
    step = random_step(g, LENGTHS[rows], seed=rows)
    check(Group(g, random_weights(g, seed=1), [step], isa=isa), step, seed=rows)


@pytest.mark.parametrize(
    ("name", "prefixes", "rows_per_request", "isa"),
    [
        ("group1", [0], 8, "gfx950"), ("group1", [33, 0, 64, 95, 1, 200, 31, 32], 2, "gfx942"), ("group5", [63, 1], 6, "gfx942"),
        ("group5", [15, 200, 64], 4, "gfx950"), ("group16", [63, 1], 6, "gfx950"),
    ],
)
def test_dense_verify(name, prefixes, rows_per_request, isa):
    g = DENSE[name]
    step = random_step(g, prefixes, seed=3, rows_per_request=rows_per_request, lengths_are_prefix=True)
    check(Group(g, random_weights(g, seed=2), [step], isa=isa), step, seed=rows_per_request)


@pytest.mark.parametrize("grid", [1, 7])
def test_other_grids(grid):
    """One workgroup has everything; more than there are tiles."""
    g = DENSE["group1"]
    step = random_step(g, [5, 700], seed=4)
    check(Group(g, random_weights(g, seed=3), [step], grid=grid), step)


def test_steps_of_any_rows_follow_one_another():
    """Each finds the words that it needs unwritten, whatever the step before had."""
    g = DENSE["group1"]
    steps = [random_step(g, LENGTHS[rows], seed=rows) for rows in (6, 16, 1, 1, 16)]
    steps.insert(3, random_step(g, [70, 9], seed=9, rows_per_request=6))
    group = Group(g, random_weights(g, seed=5), steps)
    for seed, step in enumerate(steps):
        check(group, step, seed)
    assert group.ranks[0].executed() == {1: 2, 6: 1, 12: 1, 16: 2}


def test_padded_rows_do_no_harm():
    """What graphs pad a step with: token 0, position 0, length 1, slot 0."""
    g = DENSE["group1"]
    step = random_step(g, [40, 3], seed=6, num_padded=2)
    group = Group(g, random_weights(g, seed=6), [step])
    report = gate(g, group.weights, step, group.run(step, check_order=False))
    assert report.passed, str(report)


def test_the_same_bits_under_every_schedule():
    g = DENSE["group1"]
    step = random_step(g, [5, 200, 64], seed=7)
    group = Group(g, random_weights(g, seed=7), [step])
    first = group.run(step, seed=0)
    for seed in range(1, 5):
        again = group.run(step, seed=seed)
        assert group.report.num_races == 0
        assert torch.equal(again.hidden, first.hidden) and torch.equal(again.k_rows, first.k_rows) and torch.equal(again.v_rows, first.v_rows)


@pytest.mark.parametrize(
    ("name", "rows", "isa"),
    [("few", 1, "gfx950"), ("few", 16, "gfx942"), ("many", 1, "gfx942"), ("many", 6, "gfx950"), ("wide", 6, "gfx950"), ("wide", 16, "gfx942")],
)
def test_moe_decode(name, rows, isa):
    g = MOE[name]
    step = random_step(g, LENGTHS[rows], seed=rows)
    group = Group(g, random_weights(g, seed=8), [step], isa=isa)
    ours = group.run(step, seed=rows)
    logits = group.logits(step.rows)
    report = moe_gate(g, group.weights, step, ours, logits)
    assert report.passed, str(report)
    assert group.report.num_races == 0
    chosen = torch.stack([routing.choose(of_layer, g.top_k, g.norm_topk_prob).ids for of_layer in logits])
    assert torch.equal(group.ids(step.rows), chosen)


def test_moe_verify():
    g = MOE["few"]
    step = random_step(g, [33, 64], seed=9, rows_per_request=6, lengths_are_prefix=True)
    group = Group(g, random_weights(g, seed=9), [step])
    ours = group.run(step)
    report = moe_gate(g, group.weights, step, ours, group.logits(step.rows))
    assert report.passed, str(report)


def test_weights_that_are_not_renormalised():
    g = dataclasses.replace(MOE["few"], norm_topk_prob=False)
    step = random_step(g, [20, 7], seed=10)
    group = Group(g, random_weights(g, seed=10), [step])
    ours = group.run(step)
    report = moe_gate(g, group.weights, step, ours, group.logits(step.rows))
    assert report.passed, str(report)
