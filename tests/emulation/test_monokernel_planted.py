"""Bugs planted in k1 and k2: each turns the gate red, or ends the launch with what is missing.

Oracle: as test_monokernel_numerics.py.
"""

import dataclasses

import pytest
import torch
from monokernel_cases import Group, gate, moe_gate, tiny, tiny_moe

from sgl_lowlatency.kernels.fault import MonokernelFault
from sgl_lowlatency.reference import routing
from sgl_lowlatency.reference.inputs import random_step, random_weights

G = tiny(2, 128, 4, 2, 64, 192)
MOE = tiny_moe(2, 128, 4, 2, 64, 16, 4, 64)
WITHHELD, RING_NO_WAIT = 3, 9  # dialect::Planted


@pytest.mark.parametrize(
    "planted", [2, 4, 5, 6, 7, 8], ids=["missing await", "slot of the next token", "wrong kv head", "skipped norm", "wrong rope", "mask off by one"]
)
def test_dense_bugs_turn_the_gate_red(planted):
    step = random_step(G, [5, 70, 33], seed=planted)
    group = Group(G, random_weights(G, seed=planted), [step])
    assert not gate(G, group.weights, step, group.run(step, planted=planted)).passed


def test_a_row_that_sees_the_token_behind_its_own_turns_the_gate_red():
    step = random_step(G, [40, 7], seed=1, rows_per_request=4, lengths_are_prefix=True)
    group = Group(G, random_weights(G, seed=1), [step])
    assert gate(G, group.weights, step, group.run(step)).passed
    assert not gate(G, group.weights, step, group.run(step, planted=10)).passed


def test_weights_taken_before_they_land_are_found():
    step = random_step(G, [5, 70], seed=2)
    group = Group(G, random_weights(G, seed=2), [step])
    with pytest.raises(RuntimeError, match="copy_async_16 that it has not waited for"):
        group.run(step, planted=RING_NO_WAIT)


def test_a_withheld_word_ends_in_a_record_that_names_it():
    step = random_step(G, [5, 70], seed=3)
    group = Group(G, random_weights(G, seed=3), [step], deadline_s=0.02)
    with pytest.raises(MonokernelFault, match=r"monokernel stopped: rank 0, SM \d, block \d waited 0\.0\d s for word \d+ of edge 'qkv' of layer 0"):
        group.run(step, planted=WITHHELD)


@pytest.mark.parametrize("planted", [24, 26], ids=["unweighted expert", "next expert"])
def test_moe_bugs_turn_the_gate_red(planted):
    step = random_step(MOE, [5, 70, 33], seed=planted)
    group = Group(MOE, random_weights(MOE, seed=planted), [step])
    ours = group.run(step, planted=planted)
    assert not moe_gate(MOE, group.weights, step, ours, group.logits(step.rows)).passed


@pytest.mark.parametrize("planted", [0, 15], ids=["right", "tie to the higher id"])
def test_ties_go_to_the_lower_id(planted):
    """Every router row twice: all logits are ties."""
    weights = random_weights(MOE, seed=4)
    layers = [dataclasses.replace(layer, router=layer.router[:8].repeat_interleave(2, 0).contiguous()) for layer in weights.layers]
    step = random_step(MOE, [5, 70, 33], seed=4)
    group = Group(MOE, dataclasses.replace(weights, layers=layers), [step])
    group.run(step, planted=planted)
    logits = group.logits(step.rows)
    chosen = torch.stack([routing.choose(of_layer, MOE.top_k, True).ids for of_layer in logits])
    assert torch.equal(group.ids(step.rows), chosen) == (planted == 0)


def test_logits_that_are_cut_instead_of_rounded_are_found():
    step = random_step(MOE, [5, 70, 33], seed=5)
    group = Group(MOE, random_weights(MOE, seed=5), [step])
    group.run(step)
    right = group.logits(step.rows)[0]
    group.run(step, planted=25)
    assert not torch.equal(group.logits(step.rows)[0], right)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("positions", 8192, "row 1 has position 8192, outside 0..8191"),
        ("out_cache_loc", -3, "row 1 has KV slot -3, outside 0.."),
        ("seq_lens", 10**6, "row 1 has sequence length 1000000"),
        ("req_pool_indices", 99, "row 1 has request row 99"),
    ],
)
def test_inputs_out_of_range_end_the_launch(field, value, text):
    step = random_step(G, [5, 70], seed=6)
    tensor = getattr(step, field).clone()
    tensor[1] = value
    bad = dataclasses.replace(step, **{field: tensor})
    group = Group(G, random_weights(G, seed=6), [step])
    with pytest.raises(MonokernelFault, match=text), pytest.MonkeyPatch.context() as patch:
        patch.setattr("monokernel_cases.assert_pool_untouched", lambda before, after: None)
        group.run(bad)
