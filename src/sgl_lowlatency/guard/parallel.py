"""Refusals of tensor parallelism: which groups decode_step serves, and whether a rank has of the model what the kernel takes it to have.

What is served (read from sglang 0.5.23): plain tensor parallelism of one host. SGLang splits q, k, v, gate and up by output rows and o_proj, down by
input columns, and the embedding and the LM head by rows of the vocabulary; norms and the router are whole on every rank. Attention data parallelism,
sequence and context parallelism, expert and pipeline parallelism and several hosts are features that SGLang refuses for a spec which does not list
them, and the arguments below change who has what, or what a layer hands on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_lowlatency.kernels.geometry import Geometry

TP_SIZES = (1, 2, 4, 8)
CUDA_HEAD_DIM = 128  # launch/parallel_step.cu

_OFF = (None, False, "", 0)
_SPLIT = "weights or activations would be split otherwise than the kernel takes them to be"
# (server argument, values that are served, why the others are not), as in guard/config.py; looked at where there are several ranks.
SPLITS: tuple[tuple[str, tuple, str], ...] = (
    ("enable_layernorm_sp", _OFF, _SPLIT),
    ("enable_attn_tp_input_scattered", _OFF, _SPLIT),
    ("moe_dense_tp_size", (None,), _SPLIT),
    ("enable_dp_lm_head", _OFF, _SPLIT),
    ("enable_tp_lm_head_all_to_all", _OFF, _SPLIT),
    ("dwdp_size", (1, None), _SPLIT),
)
SPECULATION: tuple[tuple[str, tuple, str], ...] = (("speculative_algorithm", (None,), "on several GPUs it has not been tested"),)
SERVER_ARGUMENTS = (*SPLITS, *SPECULATION)


def parallel_config_reasons(cfg: Any, hf_config: Any, element_bytes: int, *, emulate: bool) -> list[str]:
    """Why the model of this HF config cannot be split over cfg.tp_size ranks, beside SERVER_ARGUMENTS and what guard/config.py says of the whole
    model."""
    if cfg.tp_size == 1 or cfg.tp_size not in TP_SIZES:
        return []  # SGLang refuses the others: the specs name TP_SIZES
    try:
        whole = Geometry.from_hf_config(hf_config)
    except ValueError:
        return []
    if whole.reasons(element_bytes):
        return []
    try:
        geometry = whole.shard(cfg.tp_size)
    except ValueError as error:
        return str(error).split("; ")
    reasons = [f"of each of {cfg.tp_size} ranks: {reason}" for reason in geometry.reasons(element_bytes)]
    if not emulate and geometry.head_dim != CUDA_HEAD_DIM:
        reasons.append(f"config.head_dim {geometry.head_dim} on several GPUs is not {CUDA_HEAD_DIM}, the one that the CUDA kernels have")
    return reasons


def vocabulary_reasons(name: str, embedding: Any, geometry: Geometry, rank: int) -> Iterator[str]:
    """Whether a VocabParallelEmbedding has the rows of the vocabulary that rank `rank` is taken to have. geometry: the rank's."""
    shard = embedding.shard_indices
    if shard.padded_org_vocab_start_index != rank * geometry.vocab or shard.num_elements_padded != geometry.vocab:
        yield (
            f"{name} of rank {rank} has {shard.num_elements_padded} rows of the vocabulary from {shard.padded_org_vocab_start_index} on, "
            f"not {geometry.vocab} from {rank * geometry.vocab} on"
        )
    if shard.num_added_elements_padded:
        yield f"{name} has {shard.num_added_elements_padded} rows of an added vocabulary"
