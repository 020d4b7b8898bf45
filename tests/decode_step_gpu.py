"""Real geometries with few layers and a small vocabulary, and a Runner for them on the current GPU."""

import dataclasses
import functools
import gc

import torch
from decode_step_cases import Runner, same_bits
from tiny_geometries import FAMILIES

from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.presets import GEOMETRIES
from sgl_lowlatency.reference.inputs import random_weights
from sgl_lowlatency.reference.step import StepInputs


def _cut(name: str, num_layers: int) -> Geometry:
    return dataclasses.replace(GEOMETRIES[name], num_layers=num_layers, vocab=2048, max_position=8192)


CUT = {
    "qwen3-0.6b": _cut("qwen3-0.6b", 3),
    "qwen3-8b": _cut("qwen3-8b", 2),
    "qwen3-14b": _cut("qwen3-14b", 2),  # 5 query heads a kv head: two attention items share a kv head
    "qwen3-32b": _cut("qwen3-32b", 2),  # 8 query heads a kv head
    "llama-3.2-1b": _cut("llama-3.2-1b", 3),  # heads of 64, no q and k norm
    "qwen2.5-7b": _cut("qwen2.5-7b", 2),  # 7 query heads a kv head, a bias, no q and k norm
}


@functools.lru_cache(maxsize=1)
def weights_of(name: str, seed: int, weight_format: str = "bf16", head_vocab: int = 0):
    """Weights on the GPU, of one geometry at a time: two layers of 32B and their float64 copies are large. head_vocab: with an LM head of this
    vocabulary."""
    gc.collect()
    torch.cuda.empty_cache()
    kinds = {"weight_format": weight_format, "has_lm_head": head_vocab > 0, **FAMILIES[name.split("-")[0].split(".")[0]]}
    return random_weights(geometry_of(name, head_vocab), seed, "cuda", **kinds)


def geometry_of(name: str, head_vocab: int = 0) -> Geometry:
    return dataclasses.replace(CUT[name], vocab=head_vocab) if head_vocab else CUT[name]


def gpu_runner(name: str, seed: int, rows: tuple[int, ...], weight_format: str = "bf16", head_vocab: int = 0, **options) -> Runner:
    properties = torch.cuda.get_device_properties(0)
    return Runner(
        geometry_of(name, head_vocab), weights_of(name, seed, weight_format, head_vocab), rows, grid=properties.multi_processor_count,
        shared_memory_bytes=properties.shared_memory_per_block_optin, **options,
    )


def copy_into(static: StepInputs, new: StepInputs) -> None:
    """New values in the tensors that a graph holds; the KV pool too."""
    for name, value in vars(static).items():
        if not isinstance(value, (list, torch.Tensor)):
            assert value == getattr(new, name), f"{name} is part of the graph"
            continue
        for old, fresh in zip(value, getattr(new, name), strict=True) if isinstance(value, list) else [(value, getattr(new, name))]:
            old.copy_(fresh)


def require_replays_equal_eager(runner: Runner, steps: list[StepInputs]) -> int:
    """One captured step, replayed on the inputs of each of `steps` in turn, ten times, gives the bits of eager launches, logits included.
    Returns how many replays were compared."""
    eager = [runner.run(step) for step in steps]
    static = steps[0].clone()
    hidden, aux, logits = runner.poisoned_outputs(static.rows)
    runner.attach(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner.launch(static, hidden, aux, logits)
    compared = 0
    for _ in range(10):
        for idx, step in enumerate(steps):
            copy_into(static, step)
            for output in (hidden, aux, logits):
                if output is not None:
                    output.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(runner.outputs(static, hidden, aux, logits), eager[idx]), f"step {idx}"
            compared += 1
    return compared
