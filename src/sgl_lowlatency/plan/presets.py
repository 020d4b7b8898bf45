"""Geometries by name, for `sgl-lowlatency plan` and `bench`, tests and benchmarks. Values of their HF configs."""

from __future__ import annotations

import json
from pathlib import Path

from sgl_lowlatency.kernels.geometry import Geometry


def _qwen3(num_layers: int, hidden: int, num_q_heads: int, intermediate: int, tied_head: bool) -> Geometry:
    return Geometry(
        num_layers=num_layers,
        hidden=hidden,
        num_q_heads=num_q_heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate=intermediate,
        vocab=151936,
        max_position=40960,
        rms_eps=1e-6,
        tied_head=tied_head,
    )


GEOMETRIES: dict[str, Geometry] = {
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, False),
    "llama-3.2-1b": Geometry(16, 2048, 32, 8, 64, 8192, 128256, 131072, 1e-5, True),
    "llama-3.1-8b": Geometry(32, 4096, 32, 8, 128, 14336, 128256, 131072, 1e-5, False),
    "qwen2.5-7b": Geometry(28, 3584, 28, 4, 128, 18944, 152064, 32768, 1e-6, False),
}


def _qwen3_moe(num_layers: int, hidden: int, num_q_heads: int, moe_intermediate: int) -> Geometry:
    return Geometry(
        num_layers, hidden, num_q_heads, 4, 128, 0, 151936, 40960, 1e-6, False,
        num_experts=128, top_k=8, moe_intermediate=moe_intermediate, norm_topk_prob=True,
    )


MOE_GEOMETRIES: dict[str, Geometry] = {
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 1536),
}
NAMED = GEOMETRIES | MOE_GEOMETRIES  # what the commands offer


def read_config(name: str) -> tuple[Path, dict]:
    """(path, content) of the config.json at `name`, or in the folder `name`. Raises ValueError naming the presets, or what is wrong."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"{name} is neither one of {', '.join(NAMED)} nor a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object")
    return path, config
