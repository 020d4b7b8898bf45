"""The KV pool and the inputs of a measured step."""

from __future__ import annotations

import dataclasses

import torch

from sgl_lowlatency.bench.shapes import Shape

SPARE_COLUMNS = 8  # of the request table, beyond a context


class Pool:
    """A KV pool of random K and V and the request table of up to `rows` requests of `context` tokens, slots scattered."""

    def __init__(self, shape: Shape, rows: int, context: int, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(7)
        slots, dims = rows * context + 1, (shape.num_kv_heads, shape.head_dim)
        make = lambda: torch.randn((slots, *dims), generator=generator, device=device, dtype=torch.bfloat16)  # noqa: E731
        self.k = [make() for _ in range(shape.num_layers)]
        self.v = [make() for _ in range(shape.num_layers)]
        order = torch.randperm(slots - 1, generator=generator, device=device).to(torch.int32) + 1  # slot 0 is padding
        self.req_to_token = torch.zeros((rows + 1, context + SPARE_COLUMNS), dtype=torch.int32, device=device)
        self.req_to_token[1:, :context] = order.view(rows, context)


@dataclasses.dataclass
class Inputs:
    """Device tensors of one step of `rows` requests that have `context` tokens with the new one."""

    tensors: tuple[torch.Tensor, ...]
    hidden: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, pool: Pool, rows: int, context: int, device: torch.device) -> Inputs:
        generator = torch.Generator(device=device).manual_seed(rows * 100003 + context)
        ids = torch.randint(10, shape.vocab, (rows,), generator=generator, device=device)
        lengths = torch.full((rows,), context, dtype=torch.int64, device=device)
        requests = torch.arange(1, rows + 1, dtype=torch.int64, device=device)
        slots = pool.req_to_token[1 : rows + 1, context - 1].to(torch.int64)
        hidden = torch.full((rows, shape.hidden), float("nan"), dtype=torch.bfloat16, device=device)
        return cls((ids, lengths - 1, lengths, requests, slots.contiguous()), hidden)
