"""Real-scale random weights and steps: activations of order one, scattered pages, unequal lengths, poison where nothing
may be read."""

from __future__ import annotations

import dataclasses

import torch

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, LayerTensors
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference.quantized import quantize_layer
from sgl_lowlatency.reference.step import StepInputs

ROPE_THETA = 1_000_000.0
QK_NORM_MEAN = 1.5  # spreads attention scores by about 2: softmax then depends on which tokens it saw, as in a real model
ROUTER_STD = 2.0  # of router logits
SINK_SCALE = 2.5  # the first token's keys are this much longer: some heads attend to it strongly, as in a real model


def cos_sin_table(max_position: int, head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [max_position, head_dim], cos half | sin half, as SGLang's rotary_emb.cos_sin_cache."""
    inverse = 1.0 / ROPE_THETA ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def random_weights(
    geometry: Geometry,
    seed: int,
    device: torch.device | str = "cpu",
    has_qk_norm: bool = True,
    has_qkv_bias: bool = False,
    weight_format: str = "bf16",
    has_lm_head: bool = False,
) -> DecodeStepWeights:
    """Weights whose products keep activations of order one: std 1/sqrt(K), norm weights spread around their mean.

    has_qk_norm: as Qwen3 has it; without (Llama, Qwen2) the q and k projections give what the norms would. has_qkv_bias: Qwen2.
    weight_format: of the layers' matrices, in abi.WEIGHT_FORMATS; everything else is bf16. has_lm_head: the embedding where geometry
    ties it, else a matrix of its own; either way with rows of zeros up to a whole number of tiles, as SGLang pads it.
    """
    g = geometry
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, mean: float = 0.0, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).mul_(std).add_(mean).bfloat16()

    def matrix(*shape: int) -> torch.Tensor:
        return normal(*shape, std=shape[-1] ** -0.5)

    q_size, experts = g.num_q_heads * g.head_dim, (g.num_experts,) if g.is_moe else ()
    layers = [
        LayerTensors(
            input_norm=normal(g.hidden, mean=1.0, std=0.2),
            qkv=matrix(q_size + 2 * g.num_kv_heads * g.head_dim, g.hidden),
            q_norm=normal(g.head_dim, mean=QK_NORM_MEAN, std=0.2) if has_qk_norm else None,
            k_norm=normal(g.head_dim, mean=QK_NORM_MEAN, std=0.2) if has_qk_norm else None,
            qkv_bias=normal(q_size + 2 * g.num_kv_heads * g.head_dim, std=0.5) if has_qkv_bias else None,
            out_proj=matrix(g.hidden, q_size),
            post_norm=normal(g.hidden, mean=1.0, std=0.2),
            gate_up=matrix(*experts, 2 * g.mlp_channels, g.hidden),
            down=matrix(*experts, g.hidden, g.mlp_channels),
            router=normal(g.num_experts, g.hidden, std=ROUTER_STD * g.hidden**-0.5) if g.is_moe else None,
        )
        for _ in range(g.num_layers)
    ]
    if weight_format != "bf16":
        layers = [quantize_layer(layer, weight_format, generator) for layer in layers]
    weights = DecodeStepWeights(
        embedding=normal(g.vocab, g.hidden, std=1.0),
        final_norm=normal(g.hidden, mean=1.0, std=0.2),
        cos_sin=cos_sin_table(g.max_position, g.head_dim, device),
        layers=layers,
    )
    if not has_lm_head:
        return weights
    head = weights.embedding if g.tied_head else matrix(g.vocab, g.hidden)
    if g.vocab % abi.TILE_ROWS:
        head = torch.cat((head, torch.zeros(-g.vocab % abi.TILE_ROWS, g.hidden, dtype=torch.bfloat16, device=device)))
    embedding = head[: g.vocab] if g.tied_head else weights.embedding
    return dataclasses.replace(weights, embedding=embedding, lm_head=head)


def random_step(
    geometry: Geometry,
    lengths: list[int],
    seed: int,
    device: torch.device | str = "cpu",
    page_size: int = 1,
    num_padded: int = 0,
    rows_per_request: int = 1,
    lengths_are_prefix: bool = False,
) -> StepInputs:
    """A step of requests with these lengths, then `num_padded` requests as graphs pad them.

    A request has rows_per_request new tokens, a row each. lengths: as seq_lens, new tokens included (at least all of them), or with
    lengths_are_prefix without them.
    Pages are scattered over the pool and request rows over req_to_token. Every slot that holds no old token is NaN: unused
    pages, the rest of a last page, the new tokens' own slots. What req_to_token holds beyond a length names such a slot.
    Padded requests: tokens 0, positions 0, length 1, request row 0, slots 0 (the padding slot, zeros).
    """
    g, num_new = geometry, rows_per_request
    seq_lens, lengths = lengths, [length + num_new * lengths_are_prefix for length in lengths]
    if any(length < num_new for length in lengths):
        raise ValueError(f"lengths {seq_lens} do not all count the {num_new} new tokens of a request")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    pages_of = [-(-length // page_size) for length in lengths]
    num_pages = 1 + sum(pages_of) + 2  # page 0 is padding; two stay unused
    scattered = 1 + torch.randperm(num_pages - 1, generator=generator)
    unused_slot = int(scattered[-1]) * page_size
    num_requests = 2 * len(lengths) + 1
    requests = 1 + torch.randperm(num_requests - 1, generator=generator)[: len(lengths)]
    req_to_token = torch.full((num_requests, max(lengths, default=1) + 8), unused_slot, dtype=torch.int32)
    req_to_token[0] = 0
    first_page, old_slots, first_slots, new_slots = 0, [], [], []
    for row, length in enumerate(lengths):
        pages = scattered[first_page : first_page + pages_of[row]]
        first_page += pages_of[row]
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        req_to_token[requests[row], :length] = slots.int()
        old_slots.append(slots[: length - num_new])
        new_slots.append(slots[length - num_new :])
        first_slots.append(old_slots[-1][:1])
    padding, padded_rows = torch.zeros(num_padded, dtype=torch.int64), torch.zeros(num_padded * num_new, dtype=torch.int64)
    positions = torch.tensor([[length - num_new + t for t in range(num_new)] for length in lengths], dtype=torch.int64).flatten()
    k_buffers, v_buffers = _random_pool(
        g, num_pages * page_size, torch.cat([torch.zeros(1, dtype=torch.int64), *old_slots]),
        torch.cat([torch.zeros(0, dtype=torch.int64), *first_slots]), seed, device,
    )
    ids = torch.randint(0, g.vocab, (len(lengths) * num_new,), generator=generator)
    return StepInputs(
        input_ids=torch.cat((ids, padded_rows)).to(device),
        positions=torch.cat((positions, padded_rows)).to(device),
        seq_lens=torch.cat((torch.tensor(seq_lens, dtype=torch.int64), padding + 1)).to(device),
        req_pool_indices=torch.cat((requests, padding)).to(device),
        out_cache_loc=torch.cat((*new_slots, padded_rows)).to(device),
        req_to_token=req_to_token.to(device),
        k_buffers=k_buffers,
        v_buffers=v_buffers,
        rows_per_request=num_new,
        lengths_are_prefix=lengths_are_prefix,
    )


def _random_pool(
    g: Geometry, num_slots: int, filled: torch.Tensor, sinks: torch.Tensor, seed: int, device: torch.device | str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V of every layer: normed keys as long as k_norm makes them and values of order one in `filled`, else NaN."""
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    shape = (filled.numel(), g.num_kv_heads, g.head_dim)
    k_buffers, v_buffers = [], []
    for _ in range(g.num_layers):
        for buffers, scale in ((k_buffers, QK_NORM_MEAN), (v_buffers, 1.0)):
            pool = torch.full((num_slots, g.num_kv_heads, g.head_dim), float("nan"), dtype=torch.bfloat16, device=device)
            pool[filled.to(device)] = (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()
            pool[0] = 0.0
            buffers.append(pool)
        k_buffers[-1][sinks.to(device)] *= SINK_SCALE
    return k_buffers, v_buffers
