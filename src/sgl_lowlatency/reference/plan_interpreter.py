"""Runs a static plan in torch, block by block, tile by tile and panel by panel, on a workspace laid out as the plan says.

It rounds where the kernel rounds, so its buffers are the kernel's to within float32 summation order, and `stop_after` gives
the state after any phase of any layer: bisecting a wrong kernel is a comparison of buffers. A tile nobody owns, a buffer too
small, two that overlap or too few generations show here as NaN or as wrong numbers, whatever the validator says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference import moe_step, routing
from sgl_lowlatency.reference.dense_decode import head_norm, rope
from sgl_lowlatency.reference.step import StepInputs, StepOutputs

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
_HALF_TILE = 8  # gate_up: rows of gate, then as many of up
_PHASES = ("qkv", "attention", "combine", "out_proj", "gate_up", "down")
_MOE_PHASES = ("qkv", "attention", "combine", "out_proj", "router", "routing", "expert_gate_up", "expert_down")
_LOWEST_SCORE = -3.4028235e38  # of an item without tokens
_LOG2_E = 1.4426950408889634


def merge_order(head_dim: int) -> torch.Tensor:
    """Element of a head at each position of partial_out: position 16 i + 2 g + j holds g * head_dim/8 + 2 i + j."""
    i, g, j = torch.meshgrid(torch.arange(head_dim // 16), torch.arange(8), torch.arange(2), indexing="ij")
    return (g * (head_dim // 8) + 2 * i + j).flatten()


@dataclasses.dataclass(frozen=True)
class Item:
    """Query heads [head_begin, head_begin + num_heads) of rows [row, row + num_rows) of one request over tokens [begin, end), of which
    in the last split each row sees one more than the row before it; split `split` of `num_splits`."""

    row: int
    num_rows: int
    kv_head: int
    head_begin: int
    num_heads: int
    begin: int
    end: int
    split: int
    num_splits: int
    first_slot: int
    slot_stride: int


def attention_items(geometry: Geometry, lengths: list[int], grid: int, rows_per_request: int = 1) -> Iterator[Item]:
    """The items of a step in index order, as the device cuts them; item i is block i % grid's. lengths: of the requests, all new
    tokens included."""
    subgroups = abi.head_subgroups(geometry.num_q_heads, geometry.num_kv_heads)
    units, item_rows = abi.request_units(geometry, rows_per_request), abi.item_rows(geometry, rows_per_request)
    row_groups = units // (geometry.num_kv_heads * subgroups)
    group = geometry.num_q_heads // geometry.num_kv_heads
    share = -(-sum(max(length, 1) for length in lengths) * units // grid)
    chunk = max(abi.MIN_ITEM_TOKENS, share)
    first = 0
    for request, length in enumerate(lengths):
        num_splits = max(1, length // chunk)
        begins = [length * i // num_splits // abi.ITEM_TOKEN_MULTIPLE * abi.ITEM_TOKEN_MULTIPLE for i in range(num_splits)]
        for idx in range(num_splits * units):
            split, unit = divmod(idx, units)
            heads, row_group = divmod(unit, row_groups)
            kv_head, subgroup = divmod(heads, subgroups)
            head, first_row = subgroup * abi.MAX_HEADS_PER_ITEM, row_group * item_rows
            num_rows = min(item_rows, rows_per_request - first_row)
            num_unseen = rows_per_request - first_row - num_rows if length else 0
            begin, end = begins[split], length - num_unseen if split + 1 == num_splits else begins[split + 1]
            yield Item(
                request * rows_per_request + first_row, num_rows, kv_head, kv_head * group + head, min(group - head, abi.MAX_HEADS_PER_ITEM), begin, end, split, num_splits,
                first + unit, units,
            )
        first += num_splits * units


class PlanInterpreter:
    """plan: a plan.static_plan.StaticPlan for inputs.rows rows. The KV pool of `inputs` is written, as the kernel does. captured: layers
    whose inputs become aux."""

    def __init__(self, plan, weights: DecodeStepWeights, inputs: StepInputs, captured: Sequence[int] = ()):
        for what in ("rows", "rows_per_request"):
            if getattr(plan, what) != getattr(inputs, what):
                raise ValueError(f"the plan is for {getattr(plan, what)} {what}, the inputs have {getattr(inputs, what)}")
        self.plan, self.geometry, self.weights, self.inputs = plan, plan.geometry, weights, inputs
        device = inputs.input_ids.device
        self.workspace = torch.full((plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=device)  # NaN in bf16 and f32
        self.cos_sin = weights.cos_sin[inputs.positions]
        self.captured = tuple(captured)
        # NaN where no tile writes
        shape = (len(self.captured), plan.rows, plan.geometry.hidden)
        self.aux = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device) if captured else None
        self.items = list(attention_items(self.geometry, inputs.lengths(), plan.grid, plan.rows_per_request))
        self.merge_order = merge_order(self.geometry.head_dim).to(device)

    def generation(self, layer: int) -> torch.Tensor:
        """Layer -1 is the embedding's."""
        begin = (layer + 1) % self.plan.generations * self.plan.generation_bytes
        return self.workspace[begin : begin + self.plan.generation_bytes]

    def buffer(self, name: str, layer: int) -> torch.Tensor:
        """A layer's hand-over buffer, as the kernel's tensor: a view. Another layer has it after `generations` layers."""
        placed = self.plan.buffer(name)
        data = self.generation(layer)[placed.offset : placed.offset + placed.bytes]
        return data.view(_DTYPES[placed.dtype]).view(placed.shape)

    def run(self, stop_after: tuple[int, str] | None = None) -> StepOutputs | None:
        """The whole step; with stop_after = (layer, phase), ends there and returns None: read buffer()."""
        self.embedding()
        for layer in range(self.geometry.num_layers):
            for phase in _MOE_PHASES if self.geometry.is_moe else _PHASES:
                getattr(self, phase)(layer)
                if phase == ("routing" if self.geometry.is_moe else "gate_up"):
                    self.generation(layer + self.plan.clear_ahead).fill_(0xFF)
                if stop_after == (layer, phase):
                    return None
        last = self.geometry.num_layers - 1
        x = self.buffer("end_x", last).float()
        hidden = (x * self.inverse_rms("end", last) * self.weights.final_norm.float()).bfloat16()
        logits = None if self.plan.head is None else self.head(last)
        slots = self.inputs.out_cache_loc
        k_rows = torch.stack([buffer[slots] for buffer in self.inputs.k_buffers])
        v_rows = torch.stack([buffer[slots] for buffer in self.inputs.v_buffers])
        return StepOutputs(hidden, k_rows, v_rows, logits, self.aux)

    def tiles(self, name: str, weight: torch.Tensor, panel: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(tile, float32 [rows, 16]) of every tile, in the blocks' order, summed panel after panel. weight: float32 [N, K]; panel: bf16
        [rows, K]."""
        op = self.plan.op(name)
        for begin, count in op.tiles:
            sums: dict[int, torch.Tensor] = {}
            for k0 in range(0, op.k_extent, op.k_panel):
                part = panel[:, k0 : k0 + op.k_panel].float()
                for tile in range(begin, begin + count):
                    product = part @ weight[self.tile_rows(name, tile), k0 : k0 + op.k_panel].T
                    sums[tile] = sums[tile] + product if tile in sums else product
            yield from sums.items()

    def tile_rows(self, name: str, tile: int) -> torch.Tensor:
        if name != "gate_up":
            return torch.arange(tile * abi.TILE_ROWS, (tile + 1) * abi.TILE_ROWS)
        gate = torch.arange(tile * _HALF_TILE, (tile + 1) * _HALF_TILE)
        return torch.cat((gate, gate + self.geometry.mlp_channels))

    def hand_over(self, prefix: str, layer: int, tile: int, x: torch.Tensor, norm_weight: torch.Tensor) -> None:
        """One tile of the residual stream, x bf16 [rows, 16]: itself, scaled for the norm that follows, and its squares."""
        columns = slice(tile * abi.TILE_ROWS, (tile + 1) * abi.TILE_ROWS)
        self.buffer(f"{prefix}_x", layer)[:, columns] = x
        self.buffer(f"{prefix}_scaled", layer)[:, columns] = (x.float() * norm_weight[columns].float()).bfloat16()
        self.buffer(f"{prefix}_squares", layer)[:, tile] = x.float().pow(2).sum(-1)
        if prefix == "end" and layer + 1 in self.captured:
            self.aux[self.captured.index(layer + 1), :, columns] = x

    def inverse_rms(self, prefix: str, layer: int) -> torch.Tensor:
        """1 / rms(x) of a layer's stream, [rows, 1]: a factor of the tiles that are computed from x scaled."""
        mean = self.buffer(f"{prefix}_squares", layer).sum(-1, keepdim=True) / self.geometry.hidden
        return torch.rsqrt(mean + self.geometry.rms_eps)

    def embedding(self) -> None:
        embedded, norm_weight = self.weights.embedding[self.inputs.input_ids], self.weights.layers[0].input_norm
        for begin, count in self.plan.op("down").tiles:
            for tile in range(begin, begin + count):
                self.hand_over("end", -1, tile, embedded[:, tile * abi.TILE_ROWS : (tile + 1) * abi.TILE_ROWS], norm_weight)

    def qkv(self, layer: int) -> None:
        out, inverse_rms, bias = self.buffer("qkv", layer), self.inverse_rms("end", layer - 1), self.weights.layers[layer].qkv_bias
        for tile, sums in self.tiles("qkv", self.weights.layers[layer].dequantized("qkv", torch.float32), self.buffer("end_scaled", layer - 1)):
            columns = slice(tile * abi.TILE_ROWS, (tile + 1) * abi.TILE_ROWS)
            out[:, columns] = sums * inverse_rms + (0.0 if bias is None else bias[columns].float())

    def attention(self, layer: int) -> None:
        g, tensors = self.geometry, self.weights.layers[layer]
        qkv = self.buffer("qkv", layer).view(self.plan.rows, -1, g.head_dim)
        q, k, v = qkv.split([g.num_q_heads, g.num_kv_heads, g.num_kv_heads], dim=1)
        q = rope(head_norm(q, tensors.q_norm, g.rms_eps), self.cos_sin).bfloat16()
        k = rope(head_norm(k, tensors.k_norm, g.rms_eps), self.cos_sin).bfloat16()
        v = v.bfloat16()
        k_pool, v_pool = self.inputs.k_buffers[layer], self.inputs.v_buffers[layer]
        partial, max_sum = self.buffer("partial_out", layer), self.buffer("partial_max_sum", layer)
        for item in self.items:
            outs, tops_and_sums = [], []
            for row in range(item.row, item.row + item.num_rows):
                out, top_and_sum = self.attend(item, row, q, k, v, k_pool, v_pool)
                outs.append(out)
                tops_and_sums.append(top_and_sum)
            out, top_and_sum = torch.cat(outs), torch.cat(tops_and_sums)
            if item.num_splits == 1:
                self.publish_attention(layer, item, out[None], top_and_sum[None])
                continue
            slot = item.first_slot + item.split * item.slot_stride
            partial[slot, : out.shape[0]] = out[:, self.merge_order]
            max_sum[slot, : out.shape[0]] = top_and_sum

    def attend(
        self, item: Item, row: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One row of an item: un-normalised outputs float32 [heads, head_dim], maxima and sums [heads, 2]. Of the new tokens it sees,
        its own is written to the pool; none is read there."""
        slots = self.inputs.old_slots(row)[item.begin : item.end]
        keys, values = k_pool[slots, item.kv_head], v_pool[slots, item.kv_head]
        if item.split + 1 == item.num_splits and item.end > 0:
            new, new_slot = self.inputs.new_rows(row), self.inputs.out_cache_loc[row]
            k_pool[new_slot, item.kv_head] = k[row, item.kv_head]
            v_pool[new_slot, item.kv_head] = v[row, item.kv_head]
            keys = torch.cat((keys, k[new, item.kv_head]))
            values = torch.cat((values, v[new, item.kv_head]))
        heads = slice(item.head_begin, item.head_begin + item.num_heads)
        if keys.shape[0] == 0:
            top, weights = torch.full((item.num_heads,), _LOWEST_SCORE, device=q.device), torch.zeros(item.num_heads, 0, device=q.device)
        else:
            scores = q[row, heads].float() @ keys.float().T * (self.geometry.head_dim**-0.5 * _LOG2_E)
            top = scores.max(-1).values
            weights = (scores - top[:, None]).exp2()
        return weights.bfloat16().float() @ values.float(), torch.stack((top, weights.sum(-1)), dim=-1)

    def combine(self, layer: int) -> None:
        """The splits of a request, in order. In the kernel each split's block does so for its share of the elements."""
        partial, max_sum = self.buffer("partial_out", layer), self.buffer("partial_max_sum", layer)
        for item in self.items:
            if item.num_splits > 1 and item.split == 0:
                splits = slice(item.first_slot, item.first_slot + item.num_splits * item.slot_stride, item.slot_stride)
                columns = item.num_rows * item.num_heads
                parts = torch.empty_like(partial[splits, :columns])
                parts[..., self.merge_order] = partial[splits, :columns]
                self.publish_attention(layer, item, parts, max_sum[splits, :columns])

    def publish_attention(self, layer: int, item: Item, parts: torch.Tensor, max_sum: torch.Tensor) -> None:
        """parts [splits, columns, head_dim], max_sum [splits, columns, 2] -> the heads of the item's rows of attention_out."""
        scale = (max_sum[..., 0] - max_sum[..., 0].max(0).values).exp2()
        total = (scale * max_sum[..., 1]).sum(0)[:, None]
        result = torch.where(total == 0.0, 0.0, (scale[..., None] * parts).sum(0) / total)
        columns = slice(item.head_begin * self.geometry.head_dim, (item.head_begin + item.num_heads) * self.geometry.head_dim)
        rows = slice(item.row, item.row + item.num_rows)
        self.buffer("attention_out", layer)[rows, columns] = result.view(item.num_rows, -1).bfloat16()

    def add_to_stream(self, layer: int, name: str, weight: torch.Tensor, panel: torch.Tensor, before: torch.Tensor, norm_weight: torch.Tensor) -> None:
        for tile, sums in self.tiles(name, weight, panel):
            x = (before[:, tile * abi.TILE_ROWS : (tile + 1) * abi.TILE_ROWS].float() + sums).bfloat16()
            self.hand_over("mid" if name == "out_proj" else "end", layer, tile, x, norm_weight)

    def out_proj(self, layer: int) -> None:
        tensors = self.weights.layers[layer]
        before = self.buffer("end_x", layer - 1)
        self.add_to_stream(layer, "out_proj", tensors.dequantized("out_proj", torch.float32), self.buffer("attention_out", layer), before, tensors.post_norm)

    def gate_up(self, layer: int) -> None:
        out, inverse_rms = self.buffer("activation", layer), self.inverse_rms("mid", layer)
        for tile, sums in self.tiles("gate_up", self.weights.layers[layer].dequantized("gate_up", torch.float32), self.buffer("mid_scaled", layer)):
            gate, up = (sums * inverse_rms).chunk(2, dim=-1)
            out[:, tile * _HALF_TILE : (tile + 1) * _HALF_TILE] = (torch.nn.functional.silu(gate) * up).bfloat16()

    def down(self, layer: int) -> None:
        is_last = layer + 1 == self.geometry.num_layers
        norm_weight = self.weights.final_norm if is_last else self.weights.layers[layer + 1].input_norm
        weight = self.weights.layers[layer].dequantized("down", torch.float32)
        self.add_to_stream(layer, "down", weight, self.buffer("activation", layer), self.buffer("mid_x", layer), norm_weight)

    def router(self, layer: int) -> None:
        out, inverse_rms = self.buffer("router_logits", layer), self.inverse_rms("mid", layer)
        for tile, sums in self.tiles("router", self.weights.layers[layer].router.float(), self.buffer("mid_scaled", layer)):
            out[:, tile * abi.TILE_ROWS : (tile + 1) * abi.TILE_ROWS] = (sums * inverse_rms).bfloat16()

    def routing(self, layer: int) -> None:
        """pairs: by place (expert, its rows, its first pair)."""
        g = self.geometry
        self.choices = routing.choose(self.buffer("router_logits", layer), g.top_k, g.norm_topk_prob)
        places, first, self.pairs = routing.place(self.choices.ids, g.num_experts), 0, []
        for expert in places.experts:
            rows = [row for row in range(self.plan.rows) if places.row_bits[expert] >> row & 1]
            self.pairs.append((expert, rows, first))
            first += len(rows)

    @functools.lru_cache(maxsize=64)
    def expert_weight(self, name: str, layer: int, expert: int) -> torch.Tensor:
        return moe_step.tensors(self.weights.layers[layer]).weight(name, expert, torch.float32)

    def expert_gate_up(self, layer: int) -> None:
        out, inverse_rms, scaled = self.buffer("activation", layer), self.inverse_rms("mid", layer), self.buffer("mid_scaled", layer).float()
        tiles = self.plan.op("gate_up").num_tiles
        for block in range(self.plan.grid):
            begin, count = abi.even_share(len(self.pairs) * tiles, block, self.plan.grid)
            for i in range(begin, begin + count):
                expert, rows, first = self.pairs[i // tiles]
                weight = self.expert_weight("w13", layer, expert)[self.tile_rows("gate_up", i % tiles)]
                gate, up = (scaled[rows] @ weight.T * inverse_rms[rows]).chunk(2, dim=-1)
                columns = slice(i % tiles * _HALF_TILE, (i % tiles + 1) * _HALF_TILE)
                out[first : first + len(rows), columns] = (torch.nn.functional.silu(gate) * up).bfloat16()

    def expert_down(self, layer: int) -> None:
        is_last = layer + 1 == self.geometry.num_layers
        norm_weight = self.weights.final_norm if is_last else self.weights.layers[layer + 1].input_norm
        activation, before = self.buffer("activation", layer).float(), self.buffer("mid_x", layer)
        for begin, count in self.plan.op("down").tiles:
            for tile in range(begin, begin + count):
                columns = slice(tile * abi.TILE_ROWS, (tile + 1) * abi.TILE_ROWS)
                total = torch.zeros(self.plan.rows, abi.TILE_ROWS, device=before.device)
                for expert, rows, first in self.pairs:
                    product = activation[first : first + len(rows)] @ self.expert_weight("w2", layer, expert)[columns].T
                    for row, part in zip(rows, product, strict=True):
                        rank = self.choices.ids[row].tolist().index(expert)
                        total[row] += self.choices.weights[row, rank].float() * part
                self.hand_over("end", layer, tile, (before[:, columns].float() + total).bfloat16(), norm_weight)

    def head(self, last: int) -> torch.Tensor:
        """The LM head behind layer `last`: float32 [rows, vocab], rounded to bf16; NaN where no tile is."""
        vocab, inverse_rms = self.geometry.vocab, self.inverse_rms("end", last)
        out = torch.full((self.plan.rows, self.plan.head.num_tiles * abi.TILE_ROWS), float("nan"), device=inverse_rms.device)
        for tile, sums in self.tiles("head", self.weights.lm_head.float(), self.buffer("end_scaled", last)):
            out[:, tile * abi.TILE_ROWS : (tile + 1) * abi.TILE_ROWS] = (sums * inverse_rms).bfloat16().float()
        return out[:, :vocab]
