"""The rope types the guard accepts: SGLang's classes for them differ from plain rope in the table alone.

Oracle: SGLang's own native forward of each class, against the plain neox rotation over its cos_sin_cache.
"""

import pytest
import torch
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.factory import get_rope

from sgl_lowlatency.guard.config import ROPE_TYPES
from sgl_lowlatency.guard.model import ROPE_CLASSES

PARAMETERS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
}


@pytest.fixture
def rope(monkeypatch):
    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.base._is_cpu", True)  # no vllm import on a CPU machine

    def make(rope_type, head_dim):
        scaling = {"rope_type": rope_type, **PARAMETERS[rope_type]}
        return get_rope(head_dim, rotary_dim=head_dim, max_position=512, base=10000, rope_scaling=scaling, dtype=torch.float32)

    return make


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_the_rotation_is_neox_over_the_table(rope, rope_type, head_dim):
    module = rope(rope_type, head_dim)
    assert type(module).__name__ in ROPE_CLASSES and module.is_neox_style
    assert type(module).forward_native is RotaryEmbedding.forward_native
    assert type(module).forward_cuda is RotaryEmbedding.forward_cuda
    torch.manual_seed(0)
    query, key = torch.randn(3, 4 * head_dim), torch.randn(3, 2 * head_dim)
    positions = torch.tensor([0, 63, 500])
    got = module.forward_native(positions, query.clone(), key.clone())
    cos, sin = module.cos_sin_cache.float()[positions].chunk(2, dim=-1)
    for vector, rotated in zip((query, key), got, strict=True):
        low, high = vector.view(3, -1, head_dim).chunk(2, dim=-1)
        cos_, sin_ = cos[:, None], sin[:, None]
        expected = torch.cat((low * cos_ - high * sin_, high * cos_ + low * sin_), dim=-1)
        torch.testing.assert_close(rotated.view(3, -1, head_dim), expected, rtol=1e-6, atol=1e-6)
