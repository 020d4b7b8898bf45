"""A model built into a step as a server builds it, and the first decode step that it serves. Needs SGLang, and tests/unit/runtime on the path."""

from __future__ import annotations

import torch
from sglang.kernels.plugin_kernels.nvidia.spec import BuildContext, Step
from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context

from sgl_lowlatency.build.assemble import build_step
from sgl_lowlatency.reference.step import StepInputs

LENGTHS = [65, 1, 300]


def live_batch(serving):
    """A decode batch of LENGTHS over scattered slots of SGLang's pool."""
    batch, rows = serving.batch(len(LENGTHS)), torch.arange(1, 1 + len(LENGTHS))
    slots = (1 + torch.randperm(serving.kv.num_slots - 1, generator=torch.Generator().manual_seed(3)))[: sum(LENGTHS)].split(LENGTHS)
    for row, taken in zip(rows.tolist(), slots):
        serving.kv.req_to_token[row, : len(taken)] = taken.int()
    batch.input_ids, batch.req_pool_indices = torch.tensor([7, 200, 31]), rows
    batch.seq_lens = torch.tensor(LENGTHS)
    batch.seq_lens_cpu, batch.positions = batch.seq_lens, batch.seq_lens - 1
    batch.out_cache_loc = torch.stack([taken[-1] for taken in slots])
    return batch


def first_step(serving, hf_config, tolerances):
    """(the built step, the oracle's inputs of its first decode step, over the KV pool as it was before, that step's logits)."""
    previous = set_forward_context(ForwardContext(attn_backend=serving.backend))
    try:
        built = build_step(serving.model, hf_config, BuildContext(widths=(1, 3), tokens_per_request=1, deadline_s=30.0), tolerances=tolerances)
        batch = live_batch(serving)
        assert built.plan(batch.input_ids, batch) == Step(mode="decode", rows=3)
        kv = [[buffer.clone() for buffer in buffers] for buffers in (serving.kv.k, serving.kv.v)]
        step = Step(mode="decode", rows=3, view=serving.view)
        logits = built.forward(step, serving.standard, batch.input_ids, batch.positions, batch).next_token_logits
    finally:
        set_forward_context(previous)
    inputs = StepInputs(
        batch.input_ids, batch.positions, batch.seq_lens, batch.req_pool_indices, batch.out_cache_loc, serving.kv.req_to_token, *kv
    )
    return built, inputs, logits
