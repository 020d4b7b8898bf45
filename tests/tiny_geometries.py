"""Small decoders that meet what real ones meet: every group size class, both head sizes, K beyond and off stage edges."""

from sgl_lowlatency.kernels.geometry import Geometry


def _tiny(num_layers: int, hidden: int, num_q_heads: int, num_kv_heads: int, head_dim: int, intermediate: int) -> Geometry:
    return Geometry(num_layers, hidden, num_q_heads, num_kv_heads, head_dim, intermediate, 512, 8192, 1e-6, False)


TINY = {
    "group1": _tiny(2, 256, 2, 2, 64, 192),  # one query head a kv head
    "group2": _tiny(3, 256, 4, 2, 64, 384),
    "group4": _tiny(2, 1088, 8, 2, 128, 1600),  # K of two and four stages, the last of 64 elements
    "group5": _tiny(2, 640, 5, 1, 64, 1152),
    "group8": _tiny(2, 192, 8, 1, 128, 320),  # a full item a kv head
    "group12": _tiny(2, 320, 12, 1, 64, 448),  # two items share the only kv head, of eight heads and of four
}


# K a multiple of 128, as FP8 weights need it: one chunk, one stage, beyond and off stage edges.
TINY_FP8 = {
    "group2": TINY["group2"],
    "group4": _tiny(2, 1152, 8, 2, 128, 2176),  # K of one, two and three stages: 1024, 1152 and 2176 columns
    "group8": _tiny(2, 128, 8, 1, 128, 256),
    "group12": _tiny(2, 384, 12, 1, 64, 640),  # v begins inside a block of the scales
}


# What a model family has beside its geometry, as random_weights takes it.
FAMILIES = {"qwen3": {}, "llama": {"has_qk_norm": False}, "qwen2": {"has_qk_norm": False, "has_qkv_bias": True}}


def deep(num_layers: int) -> Geometry:
    """As many layers as it takes for the generations of the hand-over buffers to go round, as small as they come."""
    return _tiny(num_layers, 128, 2, 1, 64, 128)
