"""What k1 and k2 refuse, in words, and the layouts that their launches share."""

import dataclasses

import pytest
import torch
from monokernel_cases import Group, tiny, tiny_moe

from sgl_lowlatency import _C
from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.monokernel import MonoInputs, Monokernels, mono_workspaces
from sgl_lowlatency.reference.inputs import random_step, random_weights

G = tiny(1, 64, 2, 1, 64, 64)
MOE = tiny_moe(1, 64, 2, 1, 64, 16, 2, 32)


@pytest.fixture(scope="module")
def weights():
    return random_weights(G, seed=0)


def make(weights, geometry=G, layers=None, **options):
    options = {"isa": "gfx950", "grid": 2, "widths": [(1, 1)], "deadline_s": 1.0} | options
    return Monokernels(geometry, weights.layers if layers is None else layers, weights.cos_sin, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"isa": "gfx90a"}, "isa 'gfx90a' is not one of gfx942, gfx950"),
        ({"grid": 257}, r"grid 257 is outside 1\.\.256, the compute units of gfx950"),
        ({"widths": [(17, 1)]}, r"widths \[\(17, 1\)\] are not steps of 1\.\.16 rows"),
        ({"widths": [(4, 3)]}, r"widths \[\(4, 3\)\] are not steps of 1\.\.16 rows"),
        ({"deadline_s": 0.0}, "deadline_s 0.0 is not positive"),
    ],
)
def test_options_that_do_not_fit_are_named(weights, options, message):
    with pytest.raises(ValueError, match=message):
        make(weights, **options)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("qkv", torch.zeros(256, 32, dtype=torch.bfloat16), r"layers\[0\]\.qkv: shape \(256, 32\) is not \(256, 64\)"),
        ("down", torch.zeros(64, 64), r"layers\[0\]\.down: dtype torch.float32 is not torch.bfloat16"),
        ("q_norm", None, r"layers\[0\]\.q_norm is missing"),
        ("qkv_bias", torch.zeros(256, dtype=torch.bfloat16), r"layers\[0\]\.qkv_bias: the kernels add none"),
    ],
)
def test_weights_that_do_not_fit_are_named(weights, field, value, message):
    with pytest.raises(ValueError, match=message):
        make(weights, layers=[dataclasses.replace(weights.layers[0], **{field: value})])


def test_a_step_of_no_width_is_refused(weights):
    step = random_step(G, [3, 4], seed=1)
    kernels = make(weights)
    kernels.attach_kv(step.k_buffers, step.v_buffers, step.req_to_token)
    inputs = MonoInputs(step.positions, step.out_cache_loc, step.seq_lens, step.req_pool_indices)
    with pytest.raises(ValueError, match=r"2 rows of 1 a request are not one of the widths \[\(1, 1\)\]"):
        kernels.params(weights.embedding[step.input_ids], inputs)


def test_a_width_may_have_several_rows_a_request(weights):
    """Six rows are six requests, or one of six tokens."""
    steps = [random_step(G, [3] * 6, seed=2), random_step(G, [9], seed=3, rows_per_request=6)]
    group = Group(G, weights, steps)
    assert group.ranks[0].widths == {(6, 1), (6, 6)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k1, k2: setattr(k1, "residual_out", k1.x), "residual and residual_out go together"),
        (lambda k1, k2: setattr(k1, "qkv", k1.qkv + 2), "the address of qkv is null or not a multiple of 16"),
        (lambda k1, k2: setattr(k2, "counted_tokens", 2), "counted_tokens is neither 0 nor rows_per_request"),
        (lambda k1, k2: setattr(k2, "router", k2.down), "a dense layer has no router"),
    ],
)
def test_parameters_that_do_not_fit_are_named(weights, change, message):
    step = random_step(G, [3], seed=4)
    kernels = make(weights)
    kernels.attach_kv(step.k_buffers, step.v_buffers, step.req_to_token)
    inputs = MonoInputs(step.positions, step.out_cache_loc, step.seq_lens, step.req_pool_indices)
    k1, k2 = kernels.params(weights.embedding[step.input_ids], inputs)
    change(k1, k2)
    with pytest.raises(ValueError, match=message):
        _C.monokernel_emulate([[k1, k2]])


@pytest.mark.parametrize("g", [G, MOE, tiny(1, 4096, 32, 8, 128, 12288)])
def test_k2s_words_lie_behind_every_steps_of_k1(g):
    """k1 of one step and k2 of another must not share a word: each is cleared by the other's launches."""
    struct = abi.geometry_struct(g)
    layouts = [_C.mono_handover(struct, rows, 16, 64, chain) for rows, chain in ((1, 1), (6, 6), (16, 1), (16, 4))]
    assert len({at.k2 for at in layouts}) == 1
    for at in layouts:
        assert at.qkv + at.qkv_bytes <= at.k2 <= at.attention_out < at.mid < at.activation < at.partial_out < at.partial_max_sum < at.total_bytes


def test_workspaces_have_room_for_both_sums():
    mapped = mono_workspaces(2, 16, 64, torch.device("cpu"))
    assert (mapped.layout.num_ranks, mapped.layout.max_rows, mapped.layout.hidden) == (2, 16, 128)
