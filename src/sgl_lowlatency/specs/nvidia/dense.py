"""The specs of the dense families on NVIDIA: every geometry, TP 1 to 8, bf16 or FP8 weights, decode or verify steps of 1 to MAX_ROWS rows.

What it accepts and why (read from sglang 0.5.23):
- attention_backend: the kernel reads req_to_token and the K and V arrays of MHATokenToKVPool itself. Every backend below
  uses that pool in its plain [slots, heads, channels] layout; a backend in no list has not been looked at.
- page_size: req_to_token holds slot ids, not page ids, for any page size, and a slot's row does not depend on the page
  size. The listed sizes are the ones the backends offer and the tests run.
- kv_cache_dtype: "auto" is the model's dtype, bf16, unless a quantized checkpoint says otherwise (refused).
- LM head: the kernel's, with logits rounded as SGLang's bf16 product is, unless guard/lm_head.py says why not.
- quantization: FP8 weights as SGLang keeps them on Hopper (guard/quantization.py, guard/linear.py); activations stay bf16.
- tp_sizes: plain tensor parallelism of one host (guard/parallel.py); the ranks add their sums inside the kernel.
- features: SPECULATIVE_DECODING, which names no algorithm: guard/speculation.py says which, guard/parallel.py what several GPUs add. Not
  RAGGED_VERIFY, DSPARK's verify under another SGLANG_RAGGED_VERIFY_MODE than static: every request of a verify step has as many draft tokens. Nothing
  else: the kernel is repeatable but not batch-invariant (DETERMINISTIC_INFERENCE) and applies no LoRA; steps it does not cover run SGLang's forward,
  but KV that arrives or leaves beside a step (PD_DISAGGREGATION, KV_OFFLOAD, MEMORY_RELEASE, CPU_OFFLOAD) and torch-compiled decode have not been
  tested under it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from sglang.kernels.plugin_kernels.nvidia.spec import (
    MEGAKERNEL_API_VERSION,
    BuildContext,
    BuiltMegakernel,
    Feature,
    MegakernelSpec,
    Numerics,
    NumericsKind,
    Requirements,
)

from sgl_lowlatency import config
from sgl_lowlatency.guard.config import config_disable_reasons
from sgl_lowlatency.guard.device import installation_reasons
from sgl_lowlatency.guard.family import LLAMA, QWEN2, QWEN3, Family
from sgl_lowlatency.guard.lm_head import lm_head_reasons
from sgl_lowlatency.guard.model import model_disable_reasons
from sgl_lowlatency.guard.parallel import TP_SIZES, synchronisation_reasons
from sgl_lowlatency.guard.quantization import isa_reasons
from sgl_lowlatency.guard.speculation import speculation_reasons

MAX_ROWS = 16  # of a step: requests, or requests times their draft tokens in verify. The kernel takes 32, and loses time above 16 (log, 12)
ATTENTION_BACKENDS = frozenset({"fa3", "fa4", "flashinfer", "triton", "trtllm_mha", "torch_native"})
PAGE_SIZES = frozenset({1, 16, 32, 64, 128})

# Largest ||ours - SGLang's|| / ||SGLang's|| of any row that the self-check lets a step serve with. Both paths round to bf16
# at every operation and differ in the order of sums. Measured on the self-check's inputs with random weights: logits and KV
# rows 0.01 apart after 2 layers, 0.03 after 12, 0.06 after 36; the first layer's KV rows 0.005. A wrong page, mask, head,
# norm or rope angle moves logits or KV rows by 0.25 and more.
LOGITS_RELATIVE_L2 = 0.12  # over next_token_logits
KV_RELATIVE_L2 = 0.12  # over the K and V rows that the step wrote, any layer
FIRST_LAYER_KV_RELATIVE_L2 = 0.012  # over those of the first layer
AUX_RELATIVE_L2 = 0.12  # over the stream that enters a captured layer, any of them
AUX_LAYER_RATIO = 1.0  # of the distances to SGLang's stream at that layer and at the nearer neighbour (runtime/self_check_aux.py)
# Of FP8 weights the same holds against SGLang's forward with exact products (runtime/exact_linears.py). Its own, which rounds
# activations to FP8, was 0.05 to 0.11 from that over the K and V rows of the first two layers, random weights (in the models of
# SGLang's layers that tests have; never measured on a GPU), and 0.4 after 36 layers. The bound finds weights that we misread, not roundings.
SGLANG_FP8_RELATIVE_L2 = 0.3
TOLERANCES = {
    "logits.relative_l2": LOGITS_RELATIVE_L2,
    "kv.relative_l2": KV_RELATIVE_L2,
    "first_layer_kv.relative_l2": FIRST_LAYER_KV_RELATIVE_L2,
    "aux.relative_l2": AUX_RELATIVE_L2,
    "aux.layer_ratio": AUX_LAYER_RATIO,
    "sglang_fp8.first_layers_kv.relative_l2": SGLANG_FP8_RELATIVE_L2,
}


def _config_disable_reasons(cfg: Any, hf_config: Any) -> list[str]:
    from sglang.srt.environ import envs
    from sglang.srt.kernel_plugins.nvidia.binding import device_isa

    try:
        emulate = config.get().emulate
    except ValueError as error:
        return [str(error)]
    isa = device_isa()
    reasons = config_disable_reasons(cfg, hf_config, emulate=emulate) + speculation_reasons(cfg, max_rows=MAX_ROWS)
    reasons += synchronisation_reasons(cfg, envs.SGLANG_SPEC_TP_SYNC.get())
    return reasons + installation_reasons(isa, emulate=emulate) + isa_reasons(cfg, hf_config, isa)


def _model_disable_reasons(model: Any, hf_config: Any, *, family: Family) -> list[str]:
    from sgl_lowlatency.runtime import sglang_state

    if sglang_state.building_draft_model():
        return []  # it keeps SGLang's forward (runtime/draft_step.py)
    place = sglang_state.tensor_parallel()
    return model_disable_reasons(model, hf_config, family, place.rank, place.num_ranks)


def _build(model: Any, hf_config: Any, context: BuildContext, *, tolerances: Mapping[str, float]) -> BuiltMegakernel:
    from sgl_lowlatency.build.assemble import build_step
    from sgl_lowlatency.runtime import sglang_state

    place = sglang_state.tensor_parallel()
    is_draft = sglang_state.building_draft_model()
    head_reasons = [] if is_draft else lm_head_reasons(model, hf_config, place.rank, place.num_ranks)
    return build_step(model, hf_config, context, tolerances=tolerances, head_reasons=head_reasons, place=place)


def family_spec(
    family: Family,
    *,
    isas: frozenset[str] = frozenset({"sm_90", "sm_100", "sm_103"}),
    server_args: Mapping[str, frozenset] = {},
    env: Mapping[str, Any] = {},
    tolerances: Mapping[str, float] = TOLERANCES,
) -> MegakernelSpec:
    """The spec of a family. server_args, env: required beside what every family requires. tolerances: of its self-check."""
    return MegakernelSpec(
        name=f"sgl_lowlatency decode_step ({family.name})",
        requires=Requirements(
            isas=isas,
            tp_sizes=frozenset(TP_SIZES),
            dtypes=frozenset({"bfloat16"}),
            decode_graph_backends=frozenset({"full", "disabled"}),
            server_args={
                "attention_backend": ATTENTION_BACKENDS,
                "page_size": PAGE_SIZES,
                "kv_cache_dtype": frozenset({"auto", "bf16", "bfloat16"}),
                **server_args,
            },
            # HND interleaves the pool's heads and pages; post-capture sizing leaves the pool unbacked during the self-check.
            env={"SGLANG_USE_HND_KVCACHE": False, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": False, **env},
        ),
        features=frozenset({Feature.SPECULATIVE_DECODING}),
        numerics=Numerics(NumericsKind.TOLERANCE, dict(tolerances)),
        max_rows=MAX_ROWS,
        build=functools.partial(_build, tolerances=tolerances),
        api_version=MEGAKERNEL_API_VERSION,
        model_disable_reasons=functools.partial(_model_disable_reasons, family=family),
        config_disable_reasons=_config_disable_reasons,
    )


QWEN3_SPEC, LLAMA_SPEC, QWEN2_SPEC = (family_spec(family) for family in (QWEN3, LLAMA, QWEN2))
