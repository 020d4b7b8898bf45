"""Why a model's LM head stays SGLang's: the step then ends at the final norm. No reason to refuse the server.

Duck-typed, as guard/model.py. SGLang (sglang 0.5.23, LogitsProcessor._compute_lm_head) multiplies bf16 by bf16, rounds to bf16, and turns
the first vocab columns into float32. What it does beside that, the kernel does not; what it does to logits afterwards (softcap, logprobs),
it also does to the kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_lowlatency.guard.linear import tensor_reasons
from sgl_lowlatency.guard.parallel import vocabulary_reasons
from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.geometry import Geometry

_METHODS = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")  # of a plain bf16 head; a tied one is an embedding


def plain_head_reasons(head: Any) -> Iterator[str]:
    """Why an LM head is more than a product with its bf16 weight."""
    method = type(getattr(head, "quant_method", None)).__name__
    if method not in _METHODS:
        yield f"lm_head runs {method}"
    if hasattr(head, "set_lora"):
        yield "lm_head has LoRA adapters"
    if getattr(head, "bias", None) is not None:
        yield "lm_head has a bias"
    if getattr(head, "use_intel_amx_backend", False):
        yield "lm_head is packed for AMX"


def _module_reasons(head: Any, geometry: Geometry, rank: int, num_ranks: int) -> Iterator[str]:
    yield from plain_head_reasons(head)
    if num_ranks > 1:
        yield from vocabulary_reasons("lm_head", head, geometry, rank)
    weight = getattr(head, "weight", None)
    yield from tensor_reasons("lm_head.weight", weight, (geometry.vocab, geometry.hidden), min_rows=True)
    if weight is not None and weight.shape[0] % abi.TILE_ROWS:
        yield f"lm_head.weight has {weight.shape[0]} rows, no multiple of {abi.TILE_ROWS}"


def _processor_reasons(processor: Any, vocab: int, num_ranks: int) -> Iterator[str]:
    if processor.use_fp32_lm_head or processor.use_fp32_lm_head_output:
        yield "logits are to be float32 products"
    if processor.logit_scale is not None:
        yield f"logits are scaled by {processor.logit_scale} before they are rounded"
    if bool(processor.do_tensor_parallel_all_gather) != (num_ranks > 1):
        yield f"logits are {'' if processor.do_tensor_parallel_all_gather else 'not '}gathered from several GPUs"
    elif num_ranks > 1 and (processor.do_tensor_parallel_all_gather_dp_attn or processor.use_attn_tp_group):
        yield "logits are gathered from other ranks than the tensor-parallel group's"
    if processor.vocab_size != vocab:
        yield f"the logits processor has a vocabulary of {processor.vocab_size}, config.vocab_size is {vocab}"


def lm_head_reasons(model: Any, hf_config: Any, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """Every reason; [] when the kernel computes the logits, of several ranks each its columns, which the processor gathers. model: SGLang's, after
    process_weights_after_loading, of rank `rank`."""
    whole = Geometry.from_hf_config(hf_config)
    head = _module_reasons(model.lm_head, whole.shard(num_ranks), rank, num_ranks)
    return [*head, *_processor_reasons(model.logits_processor, whole.vocab, num_ranks)]
