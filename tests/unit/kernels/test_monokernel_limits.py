"""The geometries that k1 and k2 run. Oracle: the constants that the kernels were compiled with."""

import dataclasses

import pytest
from monokernel_cases import tiny, tiny_moe

from sgl_lowlatency import _C
from sgl_lowlatency.guard.monokernel import WIDTHS
from sgl_lowlatency.kernels import monokernel_limits as limits

G = tiny(1, 64, 2, 1, 64, 64)
MOE = tiny_moe(1, 64, 2, 1, 64, 16, 2, 32)


def test_limits_are_those_of_the_kernels():
    assert (limits.CHANNEL_MULTIPLE, limits.MAX_GROUP, limits.TILE_ROWS) == (_C.abi.kMfmaK, _C.abi.kItemColumns, _C.abi.kTileRows)
    assert (limits.MAX_EXPERTS, limits.MAX_TOP_K, max(WIDTHS)) == (_C.abi.kMaxMonoExperts, _C.abi.kMaxMonoTopK, _C.abi.kMaxMonoRows)


@pytest.mark.parametrize("g", [G, MOE])
def test_geometries_that_fit_have_no_reasons(g):
    assert limits.reasons(g) == []


@pytest.mark.parametrize(
    ("g", "changes", "expected"),
    [
        (G, {"head_dim": 96}, "config.head_dim 96 is not one of 64, 128"),
        (G, {"num_kv_heads": 0}, "config.num_key_value_heads is 0 a rank, not positive"),
        (G, {"num_q_heads": 3, "num_kv_heads": 2}, "config.num_attention_heads is 3 a rank, no multiple of 2 KV heads"),
        (G, {"num_q_heads": 17}, "a KV head has 17 query heads, more than 16"),
        (G, {"hidden": 80}, "config.hidden_size 80 is not a multiple of 32"),
        (G, {"intermediate": 48}, "config.intermediate_size is 48 a rank, no multiple of 32"),
        (MOE, {"moe_intermediate": 48}, "config.moe_intermediate_size is 48 a rank, no multiple of 32"),
        (MOE, {"num_experts": 24}, "config.num_experts 24 is not a multiple of 16 up to 256"),
        (MOE, {"num_experts": 272}, "config.num_experts 272 is not a multiple of 16 up to 256"),
        (MOE, {"top_k": 17}, "config.num_experts_per_tok 17 is outside 1..16"),
    ],
)
def test_a_geometry_that_does_not_fit_is_named(g, changes, expected):
    assert limits.reasons(dataclasses.replace(g, **changes)) == [expected]
