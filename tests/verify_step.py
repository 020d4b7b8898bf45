"""Verify steps for tests: the reference, with what every draft token sees spelled out, and a kernel to drive.

A chain of drafts is as many decode steps one after another, each of which writes the KV row that the next one reads. That is how
`VerifyStep` runs the decode kernel where the kernel takes one row a request: the same arithmetic, one launch a draft.
"""

from __future__ import annotations

import inspect

import torch

from sgl_lowlatency.kernels.decode_step import DecodeStep
from sgl_lowlatency.plan import static_plan
from sgl_lowlatency.reference import standard_path
from sgl_lowlatency.reference.dense_decode import head_norm, rope

KERNEL_VERIFIES = "rows_per_request" in inspect.signature(static_plan.make_plan).parameters


def causal(prefix: int, draft: int) -> range:
    """The tokens of a request that its draft token number `draft` sees: the prefix, the drafts before it and itself."""
    return range(prefix + draft + 1)


def standard_verify(geometry, weights, kv, input_ids, positions, prefix_lens, request_rows, slots, lm_head, sees=causal):
    """SGLang's bf16 path of a verify step with plain causal attention, KV rows written as SGLang does. Returns (hidden, logits).

    kv: KvState, whose req_to_token holds the drafts' slots too. input_ids, positions, slots: [rows]; prefix_lens, request_rows:
    [requests]. sees: as `causal`, another one is a planted bug.
    """
    g, drafts = geometry, input_ids.shape[0] // prefix_lens.shape[0]
    cos_sin = weights.cos_sin[positions]
    x, residual = weights.embedding[input_ids], None
    for idx, layer in enumerate(weights.layers):
        normed, residual = standard_path.add_rms_norm(x, residual, layer.input_norm, g.rms_eps)
        y = torch.nn.functional.linear(normed, layer.qkv, layer.qkv_bias).view(len(input_ids), -1, g.head_dim)
        q, k, v = y.split([g.num_q_heads, g.num_kv_heads, g.num_kv_heads], dim=1)
        q = rope(head_norm(q.float(), layer.q_norm, g.rms_eps).bfloat16().float(), cos_sin).bfloat16()
        k = rope(head_norm(k.float(), layer.k_norm, g.rms_eps).bfloat16().float(), cos_sin).bfloat16()
        kv.k[idx][slots], kv.v[idx][slots] = k, v.contiguous()
        attended = []
        for row in range(len(input_ids)):
            request, draft = divmod(row, drafts)
            seen = kv.req_to_token[request_rows[request], list(sees(int(prefix_lens[request]), draft))].long()
            attended.append(standard_path.attend(q[row], kv.k[idx][seen], kv.v[idx][seen], g.head_dim**-0.5))
        attention = torch.stack(attended)
        normed, residual = standard_path.add_rms_norm(attention.flatten(1) @ layer.out_proj.T, residual, layer.post_norm, g.rms_eps)
        gate, up = (normed @ layer.gate_up.T).float().chunk(2, dim=-1)
        x = (torch.nn.functional.silu(gate) * up).bfloat16() @ layer.down.T
    hidden, _ = standard_path.add_rms_norm(x, residual, weights.final_norm, g.rms_eps)
    return hidden, (hidden @ lm_head.T).float()


def make_plan(geometry, rows, grid, shared_memory_bytes, rows_per_request=1):
    """static_plan.make_plan, or where that takes one row a request the plan of the launches that VerifyStep makes."""
    if KERNEL_VERIFIES:
        return static_plan.make_plan(geometry, rows, grid, shared_memory_bytes, rows_per_request=rows_per_request)
    return static_plan.make_plan(geometry, rows // rows_per_request, grid, shared_memory_bytes)


class ChainedDecodeStep:
    """DecodeStep's interface for verify on the decode kernel: draft after draft, all requests of a draft in one launch.

    plans: rows of the verify step -> plan of its launches.
    """

    def __init__(self, geometry, plans, weights, device, deadline_s, **kwargs):
        self.geometry, self._requests = geometry, {rows: plan.rows for rows, plan in plans.items()}
        by_requests = {plan.rows: plan for plan in plans.values()}
        self._step, self._executed = DecodeStep(geometry, by_requests, weights, device, deadline_s, **kwargs), dict.fromkeys(plans, 0)
        self.attach_kv, self.fault, self.acknowledge_fault = self._step.attach_kv, self._step.fault, self._step.acknowledge_fault

    def launch(
        self, rows, input_ids, positions, seq_lens, req_pool_indices, out_cache_loc, hidden_out, stream=0, *, lengths_are_prefix=False
    ):
        assert lengths_are_prefix, "SGLang's verify steps give the prefix"
        requests = self._requests[rows]
        assert input_ids.shape == positions.shape == out_cache_loc.shape == (rows,), (rows, input_ids.shape)
        assert seq_lens.shape == req_pool_indices.shape == (requests,), (requests, seq_lens.shape)
        drafts = rows // requests
        for draft in range(drafts):
            of_draft = [tensor.view(requests, drafts)[:, draft].contiguous() for tensor in (input_ids, positions, out_cache_loc)]
            hidden = torch.empty((requests, self.geometry.hidden), dtype=torch.bfloat16)
            self._step.launch(requests, of_draft[0], of_draft[1], seq_lens + draft + 1, req_pool_indices, of_draft[2], hidden)
            hidden_out.view(requests, drafts, -1)[:, draft] = hidden
        self._executed[rows] += 1

    def executed(self):
        """Completed launches by rows."""
        return {rows: count for rows, count in self._executed.items() if count}


VerifyStep = DecodeStep if KERNEL_VERIFIES else ChainedDecodeStep
