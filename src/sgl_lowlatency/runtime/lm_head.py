"""SGLang's logits processor over logits that decode_step has computed.

The processor (sglang 0.5.23, LogitsProcessor._compute_lm_head) asks `lm_head.quant_method.apply(lm_head, hidden_states, bias)` for the product
when the method is not one of its unquantised ones. What stands before and behind that stays its own: pruning, hidden states, softcap,
logprobs, hooks.
"""

from __future__ import annotations

from typing import Any

import torch


class ComputedLogits:
    """Stands for the model's LM head in one call of the processor, and for that head's quant_method.

    hidden: [rows, hidden] bf16, what the processor is called with. logits: [rows, vocab] fp32, of exactly these rows; of several ranks [rows, shard],
    which the processor gathers as bf16, as it does its own product: what they are rounded to.
    """

    def __init__(self, lm_head: Any, hidden: torch.Tensor, logits: torch.Tensor, is_shard: bool = False):
        self.weight, self.quant_method = lm_head.weight, self
        self._hidden, self._logits, self._is_shard = hidden, logits, is_shard

    def apply(self, layer: Any, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The step's logits; of other hidden states than the step's, or with a bias, SGLang's product."""
        if hidden is self._hidden and bias is None:
            return self._logits.to(hidden.dtype) if self._is_shard else self._logits
        return torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, bias)


def logits_for(forward_batch: Any, rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Where a step's logits go, [rows, vocab] fp32: SGLang's buffer of its graphs, so that nothing is copied after, else fresh memory."""
    buffer = forward_batch.next_token_logits_buffer
    is_usable = buffer is not None and tuple(buffer.shape) == (rows, vocab) and buffer.dtype == torch.float32 and buffer.is_contiguous()
    return buffer if is_usable else torch.empty((rows, vocab), dtype=torch.float32, device=device)


def computes_logits(model: Any, weight: torch.Tensor | None) -> bool:
    """Whether the logits of a step at hand are the kernel's: `weight` is its LM head (None: it has none), is still the model's, and
    nothing looks at the hidden states before the processor does."""
    if weight is None or model.logits_processor._forward_pre_hooks:
        return False
    theirs = model.lm_head.weight
    return theirs.data_ptr() == weight.data_ptr() and theirs.shape == weight.shape and not hasattr(model.lm_head, "set_lora")
