"""Runs a static plan in torch, block by block, tile by tile and panel by panel, on a workspace laid out as the plan says.

It rounds where the kernel rounds, so its buffers are the kernel's to within float32 summation order, and `stop_after` gives
the state after any op of any layer: bisecting a wrong kernel is a comparison of buffers. A tile nobody owns, a buffer too
small or two that overlap shows here as NaN or as wrong numbers, whatever the validator says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference.qwen3_decode import rms_norm, rope
from sgl_lowlatency.reference.step import StepInputs, StepOutputs

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "u32": torch.int32}
_HALF_TILE = 8  # gate_up: rows of gate, then as many of up


@dataclasses.dataclass(frozen=True)
class Item:
    """Query heads [head_begin, head_begin + num_heads) of one row over tokens [begin, end); split `split` of `num_splits`."""

    row: int
    kv_head: int
    head_begin: int
    num_heads: int
    begin: int
    end: int
    split: int
    num_splits: int
    first_slot: int
    slot_stride: int


def attention_items(geometry: Geometry, lengths: list[int], grid: int) -> Iterator[Item]:
    """The items of a step in index order, as the device cuts them; item i is block i % grid's."""
    subgroups = abi.head_subgroups(geometry.num_q_heads, geometry.num_kv_heads)
    units = geometry.num_kv_heads * subgroups
    group = geometry.num_q_heads // geometry.num_kv_heads
    share = -(-sum(max(length, 1) for length in lengths) * units // grid)
    chunk = max(abi.MIN_ITEM_TOKENS, share)
    first = 0
    for row, length in enumerate(lengths):
        num_splits = max(1, length // chunk)
        begins = [length * i // num_splits // abi.ITEM_TOKEN_MULTIPLE * abi.ITEM_TOKEN_MULTIPLE for i in range(num_splits)]
        for idx in range(num_splits * units):
            split, unit = divmod(idx, units)
            begin, end = begins[split], length if split + 1 == num_splits else begins[split + 1]
            kv_head, subgroup = divmod(unit, subgroups)
            head = subgroup * abi.MAX_HEADS_PER_ITEM
            yield Item(
                row, kv_head, kv_head * group + head, min(group - head, abi.MAX_HEADS_PER_ITEM), begin, end, split, num_splits,
                first + unit, units,
            )
        first += num_splits * units


class PlanInterpreter:
    """plan: a plan.static_plan.StaticPlan for inputs.rows rows. The KV pool of `inputs` is written, as the kernel does."""

    def __init__(self, plan, weights: DecodeStepWeights, inputs: StepInputs):
        if plan.rows != inputs.rows:
            raise ValueError(f"the plan is for {plan.rows} rows, the inputs have {inputs.rows}")
        self.plan, self.geometry, self.weights, self.inputs = plan, plan.geometry, weights, inputs
        device = inputs.input_ids.device
        self.workspace = torch.full((plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=device)  # NaN in bf16 and f32
        self.embedded = weights.embedding[inputs.input_ids]
        self.cos_sin = weights.cos_sin[inputs.positions]

    def buffer(self, name: str) -> torch.Tensor:
        """A workspace buffer as the kernel's tensor: a view, first `rows` rows where the buffer is by rows."""
        placed = self.plan.buffer(name)
        view = self.workspace[placed.offset : placed.offset + placed.bytes].view(_DTYPES[placed.dtype])
        return view.view(placed.shape)[: self.plan.rows] if placed.shape[0] == abi.MAX_ROWS else view.view(placed.shape)

    def run(self, stop_after: tuple[int, str] | None = None) -> StepOutputs | None:
        """The whole step; with stop_after = (layer, phase), ends there and returns None: read buffer()."""
        for layer in range(self.geometry.num_layers):
            for phase in ("qkv", "attention", "out_proj", "gate_up", "down"):
                getattr(self, phase)(layer)
                if stop_after == (layer, phase):
                    return None
        hidden = rms_norm(self.buffer("residual").float(), self.weights.final_norm, self.geometry.rms_eps).bfloat16()
        slots = self.inputs.out_cache_loc
        k_rows = torch.stack([buffer[slots] for buffer in self.inputs.k_buffers])
        v_rows = torch.stack([buffer[slots] for buffer in self.inputs.v_buffers])
        return StepOutputs(hidden, k_rows, v_rows)

    def tiles(self, name: str, weight: torch.Tensor, panel: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(tile, float32 [rows, 16]) of every tile, in the blocks' order, summed panel after panel. panel: bf16 [rows, K]."""
        op = self.plan.op(name)
        for begin, count in op.tiles:
            sums: dict[int, torch.Tensor] = {}
            for k0 in range(0, op.k_extent, op.k_panel):
                part = panel[:, k0 : k0 + op.k_panel].float()
                for tile in range(begin, begin + count):
                    product = part @ weight[self.tile_rows(name, tile), k0 : k0 + op.k_panel].float().T
                    sums[tile] = sums[tile] + product if tile in sums else product
            yield from sums.items()

    def tile_rows(self, name: str, tile: int) -> torch.Tensor:
        if name != "gate_up":
            return torch.arange(tile * abi.TILE_ROWS, (tile + 1) * abi.TILE_ROWS)
        gate = torch.arange(tile * _HALF_TILE, (tile + 1) * _HALF_TILE)
        return torch.cat((gate, gate + self.geometry.intermediate))

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel's norm: the panel x * weight in bf16, and 1 / rms(x) to scale the finished tiles with, [rows, 1]."""
        inverse_rms = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.geometry.rms_eps)
        return (x.float() * weight.float()).bfloat16(), inverse_rms

    def residual_in(self, layer: int) -> torch.Tensor:
        return self.embedded if layer == 0 else self.buffer("residual")

    def qkv(self, layer: int) -> None:
        panel, inverse_rms = self.normed(self.residual_in(layer), self.weights.layers[layer].input_norm)
        out = self.buffer("qkv")
        for tile, sums in self.tiles("qkv", self.weights.layers[layer].qkv, panel):
            out[:, tile * abi.TILE_ROWS : (tile + 1) * abi.TILE_ROWS] = sums * inverse_rms

    def attention(self, layer: int) -> None:
        g, tensors = self.geometry, self.weights.layers[layer]
        q, k, v = self.buffer("qkv").view(self.plan.rows, -1, g.head_dim).split([g.num_q_heads, g.num_kv_heads, g.num_kv_heads], dim=1)
        q = rope(rms_norm(q, tensors.q_norm, g.rms_eps), self.cos_sin).bfloat16()
        k = rope(rms_norm(k, tensors.k_norm, g.rms_eps), self.cos_sin).bfloat16()
        k_pool, v_pool = self.inputs.k_buffers[layer], self.inputs.v_buffers[layer]
        lengths = self.inputs.seq_lens.tolist()
        out, partial, max_sum = self.buffer("attention_out"), self.buffer("partial_out"), self.buffer("partial_max_sum")
        for item in attention_items(g, lengths, self.plan.grid):
            slots = self.inputs.old_slots(item.row)[item.begin : item.end]
            keys, values = k_pool[slots, item.kv_head], v_pool[slots, item.kv_head]
            if item.end == lengths[item.row] and item.end > 0:  # the newest token is this step's own
                new_slot = self.inputs.out_cache_loc[item.row]
                k_pool[new_slot, item.kv_head] = k[item.row, item.kv_head]
                v_pool[new_slot, item.kv_head] = v[item.row, item.kv_head].bfloat16()
                keys = torch.cat((keys, k[item.row, item.kv_head][None]))
                values = torch.cat((values, v[item.row, item.kv_head].bfloat16()[None]))
            heads = slice(item.head_begin, item.head_begin + item.num_heads)
            slot = item.first_slot + item.split * item.slot_stride
            if keys.shape[0] == 0:
                top, weights = torch.full((item.num_heads, 1), -1e30, device=q.device), torch.zeros(item.num_heads, 0, device=q.device)
            else:
                scores = q[item.row, heads].float() @ keys.float().T * g.head_dim**-0.5
                top = scores.max(-1, keepdim=True).values
                weights = (scores - top).exp()
            partial[slot, : item.num_heads] = weights.bfloat16().float() @ values.float()
            max_sum[slot, : item.num_heads] = torch.cat((top, weights.sum(-1, keepdim=True)), dim=-1)
            if item.split == item.num_splits - 1:  # the last to arrive combines all splits, in order
                of_unit = slice(item.first_slot, slot + 1, item.slot_stride)
                self.combine(out, partial[of_unit, : item.num_heads], max_sum[of_unit, : item.num_heads], item)

    def combine(self, out: torch.Tensor, partial: torch.Tensor, max_sum: torch.Tensor, item: Item) -> None:
        """partial [splits, heads, head_dim], max_sum [splits, heads, 2] -> the item's heads of attention_out."""
        scale = (max_sum[..., 0] - max_sum[..., 0].max(0).values).exp()
        total = (scale * max_sum[..., 1]).sum(0)[:, None]
        result = torch.where(total == 0.0, 0.0, (scale[..., None] * partial).sum(0) / total)
        columns = slice(item.head_begin * self.geometry.head_dim, (item.head_begin + item.num_heads) * self.geometry.head_dim)
        out[item.row, columns] = result.flatten().bfloat16()

    def add_to_residual(self, layer: int, name: str, weight: torch.Tensor, panel: torch.Tensor, before: torch.Tensor) -> None:
        out = self.buffer("residual")
        for tile, sums in self.tiles(name, weight, panel):
            columns = slice(tile * abi.TILE_ROWS, (tile + 1) * abi.TILE_ROWS)
            out[:, columns] = (before[:, columns].float() + sums).bfloat16()

    def out_proj(self, layer: int) -> None:
        weight = self.weights.layers[layer].out_proj
        self.add_to_residual(layer, "out_proj", weight, self.buffer("attention_out"), self.residual_in(layer))

    def gate_up(self, layer: int) -> None:
        panel, inverse_rms = self.normed(self.buffer("residual"), self.weights.layers[layer].post_norm)
        out = self.buffer("activation")
        for tile, sums in self.tiles("gate_up", self.weights.layers[layer].gate_up, panel):
            gate, up = (sums * inverse_rms).chunk(2, dim=-1)
            out[:, tile * _HALF_TILE : (tile + 1) * _HALF_TILE] = (torch.nn.functional.silu(gate) * up).bfloat16()

    def down(self, layer: int) -> None:
        weight = self.weights.layers[layer].down
        self.add_to_residual(layer, "down", weight, self.buffer("activation"), self.buffer("residual"))
