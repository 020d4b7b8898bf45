"""Refusals of tensor parallelism: which groups decode_step serves, and whether a rank has of the model what the kernel takes it to have.

What is served (read from sglang 0.5.23): plain tensor parallelism of one host. SGLang splits q, k, v, gate and up by output rows and o_proj, down by
input columns, and the embedding and the LM head by rows of the vocabulary; norms and the router are whole on every rank. Attention data parallelism,
sequence and context parallelism, expert and pipeline parallelism and several hosts are features that SGLang refuses for a spec which does not list
them, and the arguments below change who has what, or what a layer hands on.

Speculative decoding is served as on one GPU (guard/speculation.py), and asks one thing more: every rank must be given the same draft tokens. Ranks
with others than each other part, and the kernel sees that in some cases only (DESIGN-tp.md). Whose drafts the ranks verify (sglang 0.5.23,
tests/contract/test_verify_ranks.py):

- NGRAM: each rank's own, from a corpus of its own. It is a function of the requests, which all ranks have in the same order, and is waited for before
  it is asked. Corpora that arrive while the server runs are loaded by a thread a rank: a budget for their drafts is refused.
- STANDALONE, EAGLE, EAGLE3: each rank's own argmax over logits that are gathered, of a draft model that the ranks share. Nobody sends them, so they
  are equal where hidden states, sums and logits are the same bits on every rank, as decode_step's are. Drafts that are drawn (rejection sampling) are
  refused.
- DFLASH: the same; of shards of logits, the ranks' maxima are gathered. A draft with a selector of candidates draws where requests sample, with
  torch's generator of each rank, which SGLang seeds alike: no server argument tells of such drafts, so nothing here refuses them.
- DSPARK: rank 0's, broadcast token by token.
- What is accepted, of all of them: an argmax over gathered logits, and where it is drawn rank 0's, broadcast; of DFLASH and DSPARK rank 0's in either
  case. SGLANG_SPEC_TP_SYNC takes such broadcasts away one by one, for debugging: anything but "all" is refused with these two.

Auxiliary hidden states are the stream that each rank has whole, so they are handed over without a collective, as SGLang's are.
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
# What gives ranks other drafts than each other, for a while or for good.
DRAFTS: tuple[tuple[str, tuple, str], ...] = (
    ("speculative_ngram_external_sam_budget", (0, None), "a corpus that is added would reach the drafts of one rank before another's"),
    ("speculative_use_rejection_sampling", _OFF, "every rank would draw drafts of its own, which has not been tested"),
)
SERVER_ARGUMENTS = (*SPLITS, *DRAFTS)
SYNCHRONISED = ("DFLASH", "DSPARK")  # algorithms whose ranks follow rank 0


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


def synchronisation_reasons(cfg: Any, sites: str) -> list[str]:
    """Why ranks might part in a speculative server of the resolved server arguments `cfg`. sites: what SGLANG_SPEC_TP_SYNC says."""
    if cfg.tp_size == 1 or cfg.speculative_algorithm not in SYNCHRONISED or sites == "all":
        return []
    why = "ranks would not all follow rank 0, and could verify other drafts than each other"
    return [f"SGLANG_SPEC_TP_SYNC={sites!r} is not served with {cfg.speculative_algorithm} on several GPUs: {why}; unset it"]


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
