"""Why a DSpark draft keeps SGLang's proposal, in part or at all: no reason to refuse the server.

Duck-typed, as guard/model.py. Read from sglang 0.5.23. models/dspark.py: a dense draft's hidden states are normed already, its head is the target's,
its Markov bias a product with markov_w2. models/deepseek_v4_dspark.py: the proposal norms them, step logits are fp32 sums. Of several ranks each has
rows of the LM head, and all of markov_w2. Gated and RNN heads, quantised ones and those of muP targets do more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_lowlatency.guard.linear import tensor_reasons
from sgl_lowlatency.guard.lm_head import plain_head_reasons
from sgl_lowlatency.guard.parallel import TP_SIZES
from sgl_lowlatency.kernels.draft_sampler import MARKOV_RANK, MAX_BATCH, MAX_GAMMA, MAX_ROWS

DENSE_MODELS = ("sglang.srt.models.dspark.DSparkDraftModel", "sglang.srt.models.dspark.Qwen3DSparkModel")
DENSE_HEAD = "sglang.srt.models.dspark.VanillaMarkov"
DEEPSEEK_V4_MODEL = "sglang.srt.models.deepseek_v4_dspark.DeepseekV4ForCausalLMDSpark"
DEEPSEEK_V4_HEAD = "sglang.srt.models.deepseek_v4_dspark.DSparkV4MarkovHead"

_OFF = (None, False, "", 0)
# (server argument, values that are served, why the others are not), as in guard/config.py: of a server whose draft alone is ours.
SERVER_ARGUMENTS: tuple[tuple[str, tuple, str], ...] = (
    ("dp_size", (1, None), "servers that share their requests have not been tested"),
    ("enable_pdmux", _OFF, "decode then has a part of the SMs, and the kernel needs one block on each"),
    ("startup_weight_load_mode", ("serial",), "weights would still be loading when the kernel is checked"),
    ("decoupled_spec_role", (*_OFF, "null"), "drafts that come from another server have not been tested"),
)
# SGLang's switches that the kernel's proposals need: the proposal inside the draft's graphs, base logits of bf16 weights.
ENVIRONMENT = {"SGLANG_DSPARK_FOLDED_PROPOSAL": True, "SGLANG_DSPARK_FP32_LM_HEAD": False}


def _class_of(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _shard_reasons(head: Any, num_ranks: int) -> Iterator[str]:
    """Whether the rank's rows of the LM head are the columns that the kernel can have. head: of a vocabulary that is split."""
    shard = head.shard_indices
    begin, end = int(shard.org_vocab_start_index), int(shard.org_vocab_end_index)
    if getattr(head, "use_attn_tp_group", False):
        yield "lm_head is split over the attention group"
    if num_ranks not in TP_SIZES:
        yield f"{num_ranks} GPUs are not one of {', '.join(map(str, TP_SIZES))}"
    if begin % 4 or (end - begin) % 2 or end <= begin:
        yield f"the rank has token ids {begin}..{end - 1}, which do not begin at a multiple of 4, are an odd number or none"
    if head.weight.shape[0] < end - begin:
        yield f"lm_head.weight has {head.weight.shape[0]} rows for {end - begin} token ids"
    if shard.num_added_elements_padded:
        yield f"lm_head has {shard.num_added_elements_padded} rows of an added vocabulary"


def _head_reasons(head: Any, vocab: int, num_ranks: int) -> Iterator[str]:
    if head is None:
        yield "the draft has no LM head yet"
        return
    yield from plain_head_reasons(head)
    ranks = int(getattr(head, "tp_size", 1))
    if ranks != num_ranks:
        yield f"lm_head is shared by {ranks} GPUs, the model by {num_ranks}"
    if int(head.org_vocab_size) != vocab:
        yield f"lm_head has a vocabulary of {head.org_vocab_size}, the Markov head one of {vocab}"
    weight = getattr(head, "weight", None)
    hidden = weight.shape[1] if weight is not None and weight.dim() == 2 else 0
    yield from tensor_reasons("lm_head.weight", weight, (vocab if ranks == 1 else 1, hidden), min_rows=True)
    if hidden % 64:
        yield f"lm_head.weight has {hidden} columns, no multiple of 64"
    if ranks == num_ranks > 1 and hidden:
        yield from _shard_reasons(head, num_ranks)


def _draft_reasons(model: Any, num_ranks: int, models: tuple[str, ...], markov_head: str) -> list[str]:
    """What both kinds of drafts have alike; a first reason alone where the rest cannot be looked at."""
    if (name := _class_of(model)) not in models:
        return [f"the draft is {name}, not one of {', '.join(models)}"]
    markov = model.markov_head
    if (name := _class_of(markov)) != markov_head:
        return [f"the Markov head is {name}, not {markov_head}"]
    vocab, reasons = int(markov.vocab_size), []
    reasons += tensor_reasons("markov_w1.weight", markov.markov_w1.weight, (vocab, MARKOV_RANK), min_rows=True)
    reasons += tensor_reasons("markov_w2.weight", markov.markov_w2.weight, (vocab, MARKOV_RANK))
    if getattr(markov.markov_w2, "bias", None) is not None:
        reasons.append("markov_w2 has a bias")
    if vocab % 2:
        reasons.append(f"the vocabulary of {vocab} is odd")
    return reasons + list(_head_reasons(model.lm_head, vocab, num_ranks))


def dense_reasons(model: Any, num_ranks: int = 1) -> list[str]:
    """Every reason why draft_sampler cannot make this dense draft's proposals; [] when it can. model: SGLang's, with the target's LM head attached.
    num_ranks: that share it."""
    reasons = _draft_reasons(model, num_ranks, DENSE_MODELS, DENSE_HEAD)
    if _class_of(model) in DENSE_MODELS and model.logits_mup_width_multiplier:
        reasons.append(f"logits are divided by {model.logits_mup_width_multiplier}")
    return reasons


def _norm_reasons(norm: Any, hidden: int) -> Iterator[str]:
    """Why a final norm is another one than x * rsqrt(mean(x^2) + eps) * weight, rounded once."""
    if type(norm).__name__ != "RMSNorm":
        yield f"the last stage's norm is {type(norm).__name__}, not RMSNorm"
        return
    yield from tensor_reasons("the last stage's norm.weight", norm.weight, (hidden,))
    if norm.cast_x_before_out_mul:
        yield "the last stage's norm rounds before it multiplies by its weight"
    if norm.variance_size_override is not None:
        yield f"the last stage's norm takes the variance of {norm.variance_size_override} columns"


def deepseek_v4_config_reasons(hf_config: Any) -> list[str]:
    """Why a server of this HF config would have no draft that the kernel knows."""
    text = getattr(hf_config, "text_config", None) or hf_config
    if getattr(text, "hc_pre_from_prev_sublayer", False):
        return []
    return ["config.hc_pre_from_prev_sublayer is not true: a draft of DeepSeek-V4, not V4.1, whose head mixes several streams"]


def deepseek_v4_reasons(model: Any, num_ranks: int = 1) -> list[str]:
    """The same of DeepSeek-V4.1's draft."""
    reasons = _draft_reasons(model, num_ranks, (DEEPSEEK_V4_MODEL,), DEEPSEEK_V4_HEAD)
    if _class_of(model) != DEEPSEEK_V4_MODEL or model.lm_head is None:
        return reasons
    if not model.hc_pre_from_prev_sublayer:
        reasons.append(f"hidden states leave the draft as {model.hc_mult} streams, which its head mixes: DeepSeek-V4, not V4.1")
    if model._use_fp32_lm_head:
        reasons.append("SGLANG_DSPARK_FP32_LM_HEAD asks for float32 base logits")
    return reasons + list(_norm_reasons(model.stages[-1].norm, model.lm_head.weight.shape[-1]))


def most_requests(gamma: int, max_batch: int) -> int:
    """Requests of the largest launch; 0 when draft_sampler has none of this gamma."""
    return min(max_batch, MAX_BATCH, MAX_ROWS // gamma) if 1 <= gamma <= MAX_GAMMA else 0
