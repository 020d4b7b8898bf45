"""Steps of k1 and k2 on emulated ranks, and their checks: what the emulated tests of AMD's kernels share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from decode_step_cases import assert_pool_untouched

from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, LayerTensors
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.kernels.monokernel import MonoInputs, Monokernels, emulate, mono_workspaces
from sgl_lowlatency.reference import dense_decode, moe_step, routing, standard_path
from sgl_lowlatency.reference.gate import GateReport, compare, figure
from sgl_lowlatency.reference.step import StepInputs, StepOutputs, read_kv_rows


def tiny(num_layers: int, hidden: int, num_q_heads: int, num_kv_heads: int, head_dim: int, intermediate: int) -> Geometry:
    return Geometry(num_layers, hidden, num_q_heads, num_kv_heads, head_dim, intermediate, 512, 8192, 1e-6, False)


def tiny_moe(
    num_layers: int, hidden: int, num_q_heads: int, num_kv_heads: int, head_dim: int, num_experts: int, top_k: int, channels: int
) -> Geometry:
    return Geometry(num_layers, hidden, num_q_heads, num_kv_heads, head_dim, 0, 512, 8192, 1e-6, False, num_experts, top_k, channels, True)


def shard_geometry(g: Geometry, num_ranks: int) -> Geometry:
    """A rank's share, as tensor parallelism cuts it."""
    return dataclasses.replace(
        g, num_q_heads=g.num_q_heads // num_ranks, num_kv_heads=g.num_kv_heads // num_ranks, intermediate=g.intermediate // num_ranks,
        moe_intermediate=g.moe_intermediate // num_ranks,
    )


def shard_layer(g: Geometry, layer: LayerTensors, rank: int, num_ranks: int) -> LayerTensors:
    """Rank `rank`'s rows or columns of every matrix."""

    def rows(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.chunk(num_ranks, -2)[rank]

    q, k, v = layer.qkv.split([g.num_q_heads * g.head_dim, g.num_kv_heads * g.head_dim, g.num_kv_heads * g.head_dim])
    gate, up = layer.gate_up.chunk(2, -2)
    return dataclasses.replace(
        layer, qkv=torch.cat([rows(q), rows(k), rows(v)]).contiguous(), gate_up=torch.cat([rows(gate), rows(up)], -2).contiguous(),
        out_proj=layer.out_proj.chunk(num_ranks, -1)[rank].contiguous(), down=layer.down.chunk(num_ranks, -1)[rank].contiguous(),
    )


def shard_step(step: StepInputs, rank: int, num_ranks: int) -> StepInputs:
    """The step with a pool of its own: rank `rank`'s KV heads."""
    own = step.clone()
    heads = [[buffer.chunk(num_ranks, 1)[rank].contiguous() for buffer in buffers] for buffers in (own.k_buffers, own.v_buffers)]
    return dataclasses.replace(own, k_buffers=heads[0], v_buffers=heads[1])


class Group:
    """num_ranks emulated GPUs with one model, whose steps run one after the other in the same memory. grid: workgroups a rank."""

    def __init__(
        self, g: Geometry, weights: DecodeStepWeights, steps: Sequence[StepInputs], isa: str = "gfx950", grid: int = 3, num_ranks: int = 1,
        deadline_s: float = 1.0,
    ):
        self.g, self.weights, self.num_ranks = g, weights, num_ranks
        widths = sorted({(step.rows, step.rows_per_request) for step in steps})
        mapped = mono_workspaces(num_ranks, max(rows for rows, _ in widths), g.hidden, torch.device("cpu"))
        self.ranks = [
            Monokernels(
                shard_geometry(g, num_ranks), [shard_layer(g, layer, rank, num_ranks) for layer in weights.layers], weights.cos_sin, isa=isa,
                grid=grid, widths=widths, deadline_s=deadline_s, rank=rank, workspaces=mapped,
            )
            for rank in range(num_ranks)
        ]
        self.report = None

    def run(
        self, step: StepInputs, seed: int = 0, planted: int = 0, check_order: bool = True, live_ranks: int | None = None, slowness: Sequence[int] = ()
    ) -> StepOutputs:
        """One step; of every rank the same stream, bit by bit, and of the pools only the new tokens' rows changed."""
        embedding = self.weights.embedding[step.input_ids].contiguous()
        inputs = MonoInputs(
            step.positions, step.out_cache_loc, step.seq_lens, step.req_pool_indices, step.rows_per_request, step.lengths_are_prefix
        )
        before = [shard_step(step, rank, self.num_ranks) for rank in range(self.num_ranks)]
        used = [one.clone() for one in before]
        streams, regions = [], []
        for rank, own in zip(self.ranks, used, strict=True):
            rank.attach_kv(own.k_buffers, own.v_buffers, own.req_to_token)
            rank.x.fill_(float("nan"))
            streams.append(rank.params(embedding, inputs) if live_ranks is None or rank.rank < live_ranks else [])
            regions += rank.regions() if check_order else []
        self.report = emulate(self.ranks, streams, EmulationOptions(seed=seed, planted=planted), regions, slowness)
        for old, new in zip(before, used, strict=True):
            assert_pool_untouched(old, new)
        x, residual = (t[: step.rows] for t in (self.ranks[0].x, self.ranks[0].residuals[0]))
        for rank in self.ranks[1:]:
            same = torch.equal(rank.x[: step.rows], x) and torch.equal(rank.residuals[0][: step.rows], residual)
            assert same, f"rank {rank.rank} has another stream"
        hidden = dense_decode.rms_norm(x.float() + residual.float(), self.weights.final_norm, self.g.rms_eps).bfloat16()
        rows = [read_kv_rows(own) for own in used]
        return StepOutputs(hidden, *(torch.cat([of_rank[i] for of_rank in rows], 2) for i in range(2)))

    def logits(self, rows: int) -> torch.Tensor:
        """bf16 [layers, rows, num_experts]: what the newest step of a MoE model ranked."""
        return self.ranks[0].routed_logits[:, :rows].clone()

    def ids(self, rows: int) -> torch.Tensor:
        """int64 [layers, rows, top_k]: the experts that it chose."""
        return self.ranks[0].routed_ids[:, :rows].long()


def gate(g: Geometry, weights: DecodeStepWeights, step: StepInputs, ours: StepOutputs) -> GateReport:
    """Our outputs against the float64 oracle, with SGLang's bf16 rounding as the measure."""
    return compare(ours, standard_path.decode_step(g, weights, step), dense_decode.decode_step(g, weights, step, torch.float64))


def moe_gate(g: Geometry, weights: DecodeStepWeights, step: StepInputs, ours: StepOutputs, logits: torch.Tensor) -> GateReport:
    """Our outputs and router logits against the float64 oracle, on the choices that our logits make; SGLang's bf16 rounding is the measure."""
    choices = [routing.choose(of_layer, g.top_k, g.norm_topk_prob) for of_layer in logits]
    standard = moe_step.standard_step(g, weights, step, choices=choices)
    oracle = moe_step.decode_step(g, weights, step, torch.float64, choices=choices)
    of_layers = [
        figure(f"router_logits[{layer}]", logits[layer], standard.router_logits[layer], oracle.router_logits[layer]) for layer in range(g.num_layers)
    ]
    return GateReport((*compare(ours, standard.outputs, oracle.outputs).figures, *of_layers))
