"""Why a DSpark draft keeps SGLang's proposal, in part or at all: no reason to refuse the server.

Duck-typed, as guard/model.py. Read from sglang 0.5.23, models/dspark.py: a dense draft's hidden states are normed already, its head is the target's,
its Markov bias a product with markov_w2. Gated and RNN heads, quantised ones and those of muP targets do more, and several ranks exchange logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_lowlatency.guard.linear import tensor_reasons
from sgl_lowlatency.guard.lm_head import plain_head_reasons
from sgl_lowlatency.kernels.draft_sampler import MARKOV_RANK, MAX_BATCH, MAX_GAMMA, MAX_ROWS

MODELS = ("sglang.srt.models.dspark.DSparkDraftModel", "sglang.srt.models.dspark.Qwen3DSparkModel")
MARKOV_HEAD = "sglang.srt.models.dspark.VanillaMarkov"


def _class_of(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _head_reasons(head: Any, vocab: int) -> Iterator[str]:
    if head is None:
        yield "the draft has no LM head yet"
        return
    yield from plain_head_reasons(head)
    if (ranks := int(getattr(head, "tp_size", 1))) != 1:
        yield f"lm_head is shared by {ranks} GPUs"
    if int(head.org_vocab_size) != vocab:
        yield f"lm_head has a vocabulary of {head.org_vocab_size}, the Markov head one of {vocab}"
    weight = getattr(head, "weight", None)
    hidden = weight.shape[1] if weight is not None and weight.dim() == 2 else 0
    yield from tensor_reasons("lm_head.weight", weight, (vocab, hidden), min_rows=True)
    if hidden % 64:
        yield f"lm_head.weight has {hidden} columns, no multiple of 64"


def draft_reasons(model: Any) -> list[str]:
    """Every reason why draft_sampler cannot make this draft's proposals; [] when it can. model: SGLang's, with the target's LM head attached."""
    if (name := _class_of(model)) not in MODELS:
        return [f"the draft is {name}, not one of {', '.join(MODELS)}"]
    markov = model.markov_head
    if (name := _class_of(markov)) != MARKOV_HEAD:
        return [f"the Markov head is {name}, not {MARKOV_HEAD}"]
    vocab, reasons = int(markov.vocab_size), []
    for matrix in ("markov_w1", "markov_w2"):
        reasons += tensor_reasons(f"{matrix}.weight", getattr(markov, matrix).weight, (vocab, MARKOV_RANK))
    if getattr(markov.markov_w2, "bias", None) is not None:
        reasons.append("markov_w2 has a bias")
    if markov.vocab_shard is not None:
        reasons.append("the Markov head is shared by several GPUs")
    if model.logits_mup_width_multiplier:
        reasons.append(f"logits are divided by {model.logits_mup_width_multiplier}")
    if vocab % 2:
        reasons.append(f"the vocabulary of {vocab} is odd")
    return reasons + list(_head_reasons(model.lm_head, vocab))


def most_requests(gamma: int, max_batch: int) -> int:
    """Requests of the largest launch; 0 when draft_sampler has none of this gamma."""
    return min(max_batch, MAX_BATCH, MAX_ROWS // gamma) if 1 <= gamma <= MAX_GAMMA else 0
