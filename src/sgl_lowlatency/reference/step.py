"""Inputs and outputs of one decode step, as the oracles and the kernel take and give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """One step's inputs, in SGLang's layout: decode, or with several rows a request a verify step.

    input_ids, positions, out_cache_loc: int64 [rows]. seq_lens, req_pool_indices: int64 [rows / rows_per_request]; row r is new
    token r % rows_per_request of request r // rows_per_request. seq_lens counts the new tokens, unless lengths_are_prefix.
    req_to_token: int32 [requests, context], KV slots. k_buffers, v_buffers: per layer bf16 [slots, num_kv_heads, head_dim].
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    req_to_token: torch.Tensor
    k_buffers: list[torch.Tensor]
    v_buffers: list[torch.Tensor]
    rows_per_request: int = 1
    lengths_are_prefix: bool = False

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return self.rows // self.rows_per_request

    def clone(self) -> StepInputs:
        """A copy whose KV pool a kernel may write."""
        fields = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            fields[field.name] = [t.clone() for t in value] if isinstance(value, list) else value.clone() if isinstance(value, torch.Tensor) else value
        return StepInputs(**fields)

    def lengths(self) -> list[int]:
        """Tokens of every request, all new ones included; 0 for a request shorter than the new tokens it should count."""
        uncounted = self.rows_per_request if self.lengths_are_prefix else 0
        return [n + uncounted if n + uncounted >= self.rows_per_request else 0 for n in self.seq_lens.tolist()]

    def old_slots(self, row: int) -> torch.Tensor:
        """KV slots of the tokens that a row's request had before this step, int64 [tokens]."""
        request = row // self.rows_per_request
        num_old = max(self.lengths()[request] - self.rows_per_request, 0)
        return self.req_to_token[self.req_pool_indices[request], :num_old].long()

    def new_rows(self, row: int) -> slice:
        """Rows whose new tokens a row sees: those of its request up to its own."""
        return slice(row // self.rows_per_request * self.rows_per_request, row + 1)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        attend_row: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Attention of every row over its request's old tokens' KV of `layer` and the new ones it sees; zeros for a request of length 0.

        q: [rows, q_heads, head_dim]; k, v: [rows, kv_heads, head_dim], the new tokens', in the dtype that the old ones take.
        attend_row(q, k, v): one row's, of q [q_heads, head_dim] and k, v [tokens, kv_heads, head_dim].
        """
        out = torch.zeros_like(q)
        lengths = self.lengths()
        for row in range(self.rows):
            if lengths[row // self.rows_per_request] == 0:
                continue
            slots, new = self.old_slots(row), self.new_rows(row)
            keys = torch.cat((self.k_buffers[layer][slots].to(k.dtype), k[new]))
            values = torch.cat((self.v_buffers[layer][slots].to(v.dtype), v[new]))
            out[row] = attend_row(q[row], keys, values)
        return out


@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """hidden: [rows, hidden] after the final norm. k_rows, v_rows: [layers, rows, num_kv_heads, head_dim], the new tokens'
    KV rows. logits: [rows, vocab] when an LM head was given. aux: [captured layers, rows, hidden], the stream that enters each, when
    layers were captured."""

    hidden: torch.Tensor
    k_rows: torch.Tensor
    v_rows: torch.Tensor
    logits: torch.Tensor | None = None
    aux: torch.Tensor | None = None


def stack_captured(entered: list[torch.Tensor], captured: Sequence[int]) -> torch.Tensor | None:
    """StepOutputs.aux of the captured layers. entered: of every layer, the stream [rows, hidden] that enters it."""
    return torch.stack([entered[layer] for layer in captured]) if captured else None


def read_kv_rows(inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows at out_cache_loc of every layer's K and V buffer, [layers, rows, num_kv_heads, head_dim]."""
    k = torch.stack([buffer[inputs.out_cache_loc] for buffer in inputs.k_buffers])
    v = torch.stack([buffer[inputs.out_cache_loc] for buffer in inputs.v_buffers])
    return k, v
