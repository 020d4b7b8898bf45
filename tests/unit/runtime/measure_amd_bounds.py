"""Prints how far right kernels are from SGLang's bf16 path by each figure of AMD's self-check: what the bounds of specs/amd are chosen by.

`python tests/unit/runtime/measure_amd_bounds.py [--deepest N]`, on the CPU. The emulated k1 and k2 against reference/standard_path.py on the
self-check's inputs: random weights of two seeds, hidden 128 and 256, 2 to 24 layers (MoE: to 12), decode and verify, in three minutes. A line a
model, then the largest of each figure beside its bound; ends with 1 where one is beyond.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context  # noqa: E402
from tiny_serving import GEOMETRY, MOE_GEOMETRY, TinyServing  # noqa: E402

from sgl_lowlatency.kernels.monokernel import MonoInputs, Monokernels  # noqa: E402
from sgl_lowlatency.reference.dense_decode import rms_norm  # noqa: E402
from sgl_lowlatency.runtime.amd_step import FIGURES  # noqa: E402
from sgl_lowlatency.runtime.self_check import SelfCheck  # noqa: E402
from sgl_lowlatency.specs.amd import qwen3, qwen3_moe  # noqa: E402

DEPTHS = {"dense": (2, 6, 12, 24), "moe": (2, 6, 12)}
SHAPES = {"decode of 3": (3, 1), "decode of 6": (6, 1), "verify of 4": (1, 4)}  # requests, tokens a request
MODELS = {"dense": (GEOMETRY, qwen3.BOUNDS), "moe": (MOE_GEOMETRY, qwen3_moe.BOUNDS)}


def figures(geometry, depth: int, seed: int, requests: int, tokens: int) -> dict[str, float]:
    """SelfCheckReport.figures of right kernels."""
    serving = TinyServing(geometry=geometry, num_layers=depth, drafts=tokens, has_head=False, num_slots=8192, seed=seed)
    set_forward_context(ForwardContext(attn_backend=serving.backend))
    g, weights, rows = serving.geometry, serving.weights, requests * tokens
    kernels = Monokernels(g, weights.layers, weights.cos_sin, isa="gfx950", grid=2, widths=[(rows, tokens)], deadline_s=600.0)
    kernels.attach_kv(serving.kv.k, serving.kv.v, serving.kv.req_to_token)

    def ours(input_ids, positions, batch, routing):
        inputs = MonoInputs(positions, batch.out_cache_loc, batch.seq_lens, batch.req_pool_indices, tokens, lengths_are_prefix=tokens > 1)
        kernels.poison()
        x, residual = kernels.launch(weights.embedding[input_ids], inputs, routing=routing)
        hidden = rms_norm((x.float() + residual.float()).bfloat16().float(), weights.final_norm, g.rms_eps).bfloat16()
        return serving.model.logits_processor(input_ids, hidden, serving.model.lm_head, batch, None)

    return SelfCheck(serving.model, g, weights, {}, by_layer=True).run(serving.standard, ours, serving.batch(requests), serving.kv).figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deepest", type=int, default=24, help="leave out models of more layers")
    deepest, is_beyond = parser.parse_args().deepest, False
    for name, (geometry, bounds) in MODELS.items():
        worst: dict[str, float] = {}
        for depth in (depth for depth in DEPTHS[name] if depth <= deepest):
            for hidden in (128, 256):
                of_hidden = dataclasses.replace(geometry, hidden=hidden, intermediate=hidden)
                for seed in (0, 1):
                    for shape, (requests, tokens) in SHAPES.items():
                        found = figures(of_hidden, depth, seed, requests, tokens)
                        print(f"{name}, {depth} layers of {hidden}, seed {seed}, {shape}:", *(f"{k} {v:.4f}" for k, v in found.items()), flush=True)
                        worst = {figure: max(value, worst.get(figure, 0.0)) for figure, value in found.items()}
        for bound_name, bound in bounds.items():
            value = worst[FIGURES[bound_name]]
            is_beyond |= value > bound
            print(f"{name}: {bound_name} at most {value:.4f}, bound {bound}: " + (f"{bound / value:.2f} times" if value else "exact"), flush=True)
    return int(is_beyond)


if __name__ == "__main__":
    sys.exit(main())
