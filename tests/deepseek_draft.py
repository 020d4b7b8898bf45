"""DeepSeek-V4.1's DSpark draft in SGLang's own classes, without layers: a rank's part of it.

Exact: the rows of hidden states have a root mean square of 1, each row of the LM head has one column, and the Markov weights have few bits. So no
order of adding matters, and comparisons are of bits.
"""

from __future__ import annotations

import types

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from sglang.srt.models import deepseek_v4_dspark

HIDDEN, GAMMA, RANK = 64, 5, 256


class Head(torch.nn.Module):
    """What the draft reads of ParallelLMHead, of rank `rank`; padded as SGLang pads a vocabulary."""

    def __init__(self, weight: torch.Tensor, rank: int, num_ranks: int):
        super().__init__()
        vocab = weight.shape[0]
        padded = -(-vocab // 64) * 64
        part = padded // num_ranks
        begin, end = min(rank * part, vocab), min((rank + 1) * part, vocab)
        rows = torch.full((part, weight.shape[1]), float("nan"), dtype=torch.bfloat16)
        rows[: end - begin] = weight[begin:end]
        self.weight = torch.nn.Parameter(rows, requires_grad=False)
        self.tp_size, self.org_vocab_size = num_ranks, vocab
        self.num_embeddings_per_partition, self.num_embeddings_padded = part, padded
        self.shard_indices = types.SimpleNamespace(org_vocab_start_index=begin, org_vocab_end_index=end, num_added_elements_padded=0)
        self.quant_method = UnquantizedEmbeddingMethod()


def draft_model(monkeypatch, vocab: int = 1000, rank: int = 0, num_ranks: int = 1, gather=None, seed: int = 1, eps: float = 1e-20):
    """SGLang's DeepseekV4ForCausalLMDSpark of a rank. gather: VocabGather's, of several ranks. monkeypatch: setattr(object, name, value)."""
    generator = torch.Generator().manual_seed(seed)
    few_bits = lambda *shape: torch.randn(*shape, generator=generator).mul(4).round().clamp(-8, 8).div(16).bfloat16()  # noqa: E731
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        head = deepseek_v4_dspark.DSparkV4MarkovHead(vocab_size=vocab, markov_rank=RANK, is_dsv41=True)
        norm = RMSNorm(HIDDEN, eps=eps)
    finally:
        torch.set_default_dtype(before)
    head.markov_w1 = torch.nn.Embedding(vocab, RANK, dtype=torch.bfloat16)  # the same look-up, without a parallel group
    for weight in (head.markov_w1.weight, head.markov_w2.weight):
        weight.requires_grad_(False)
        weight.copy_(few_bits(vocab, RANK))
    norm.weight.data = (1 + torch.randint(0, 32, (HIDDEN,), generator=generator) / 32).bfloat16()
    rows = torch.zeros(vocab, HIDDEN)
    rows[torch.arange(vocab), torch.randint(0, HIDDEN, (vocab,), generator=generator)] = 2.0 ** torch.randint(-2, 3, (vocab,), generator=generator)
    model = deepseek_v4_dspark.DeepseekV4ForCausalLMDSpark.__new__(deepseek_v4_dspark.DeepseekV4ForCausalLMDSpark)
    torch.nn.Module.__init__(model)
    model.markov_head, model.confidence_head, model.lm_head = head, None, Head(rows.bfloat16(), rank, num_ranks)
    stage = torch.nn.Module()
    stage.norm = norm
    model.stages = torch.nn.ModuleList([torch.nn.Module(), stage])
    model.sample_from_anchor, model.hc_pre_from_prev_sublayer, model.hc_mult = True, True, 4
    model._use_fp32_lm_head, model._opt_markov_w2_tp_shard = False, True
    group = types.SimpleNamespace(world_size=num_ranks, rank=rank)
    monkeypatch.setattr(deepseek_v4_dspark, "get_parallel", lambda: types.SimpleNamespace(tp_group=group, attn_tp_group=group))
    monkeypatch.setattr(deepseek_v4_dspark, "make_vocab_gather", lambda group, **_: gather)
    head.configure_tp_shard(lm_head=model.lm_head)
    return model


def inputs(batch: int, vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden states [batch * GAMMA, HIDDEN] bf16, of which a quarter are 2 or -2, input ids [batch * GAMMA])."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch * GAMMA, HIDDEN, generator=generator).argsort(1)
    signs = torch.randint(0, 2, (batch * GAMMA, HIDDEN), generator=generator) * 2 - 1
    hidden = torch.where(order < HIDDEN // 4, 2.0 * signs, 0.0).bfloat16()
    return hidden, torch.randint(0, vocab, (batch * GAMMA,), generator=generator)
