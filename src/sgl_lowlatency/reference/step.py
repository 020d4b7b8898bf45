"""Inputs and outputs of one decode step, as the oracles and the kernel take and give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """One decode step's inputs, in SGLang's layout.

    input_ids, positions, seq_lens (new token included), req_pool_indices, out_cache_loc: int64 [rows].
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

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]

    def clone(self) -> StepInputs:
        """A copy whose KV pool a kernel may write."""
        fields = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            fields[field.name] = [t.clone() for t in value] if isinstance(value, list) else value.clone()
        return StepInputs(**fields)

    def old_slots(self, row: int) -> torch.Tensor:
        """KV slots of a row's tokens before the new one, int64 [length - 1]."""
        length = int(self.seq_lens[row])
        return self.req_to_token[self.req_pool_indices[row], : max(length - 1, 0)].long()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        attend_row: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Attention of every row over its old tokens' KV of `layer` and its new one; zeros for a row of length 0.

        q: [rows, q_heads, head_dim]; k, v: [rows, kv_heads, head_dim], the new tokens', in the dtype that the old ones take.
        attend_row(q, k, v): one row's, of q [q_heads, head_dim] and k, v [tokens, kv_heads, head_dim].
        """
        out = torch.zeros_like(q)
        for row in range(self.rows):
            if int(self.seq_lens[row]) == 0:
                continue
            slots = self.old_slots(row)
            keys = torch.cat((self.k_buffers[layer][slots].to(k.dtype), k[row : row + 1]))
            values = torch.cat((self.v_buffers[layer][slots].to(v.dtype), v[row : row + 1]))
            out[row] = attend_row(q[row], keys, values)
        return out


@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """hidden: [rows, hidden] after the final norm. k_rows, v_rows: [layers, rows, num_kv_heads, head_dim], the new tokens'
    KV rows. logits: [rows, vocab] when an LM head was given."""

    hidden: torch.Tensor
    k_rows: torch.Tensor
    v_rows: torch.Tensor
    logits: torch.Tensor | None = None


def read_kv_rows(inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows at out_cache_loc of every layer's K and V buffer, [layers, rows, num_kv_heads, head_dim]."""
    k = torch.stack([buffer[inputs.out_cache_loc] for buffer in inputs.k_buffers])
    v = torch.stack([buffer[inputs.out_cache_loc] for buffer in inputs.v_buffers])
    return k, v
