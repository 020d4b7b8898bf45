"""The specs of Qwen3 and Qwen3-MoE on AMD: a decoder layer in two launches, k1 and k2, on MI300X (gfx942) and MI350X/MI355X (gfx950).

- attention_backends: k1 and k2 read and write req_to_token and the K and V arrays of MHATokenToKVPool themselves; the backends below use that pool
  in its plain [slots, heads, channels] layout. aiter is the default on ROCm, torch_native the one of a CPU.
- resident_blocks: one workgroup a CU of the whole GPU; SGLang refuses a partition of one.
- No load_tensor: weights are read where SGLang keeps them, and every load path will do.
- unread_metadata: a decode schedule of low-ratio indexers, which neither family has.
- features: SPECULATIVE_DECODING, which names no algorithm: guard/monokernel.py says which. Not EAGLE3_HIDDEN_STATES: inputs of layers stay inside.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from sglang.kernels.plugin_kernels.amd.spec import (
    MONOKERNEL_API_VERSION,
    BuildContext,
    BuiltMonokernels,
    DeviceLimits,
    Feature,
    MonoSpec,
    Numerics,
    NumericsKind,
    Requirements,
    StepMetadata,
)

from sgl_lowlatency import config
from sgl_lowlatency.guard import moe
from sgl_lowlatency.guard.family import Family
from sgl_lowlatency.guard.monokernel import WIDTHS, config_disable_reasons, model_disable_reasons, rank_geometry
from sgl_lowlatency.kernels import code_objects

TP_SIZES = (1, 2, 4, 8)
ATTENTION_BACKENDS = frozenset({"aiter", "triton", "torch_native"})
PAGE_SIZES = frozenset({1, 16, 32, 64, 128})
ENVIRONMENT = {"SGLANG_USE_HND_KVCACHE": False, "SGLANG_AITER_KV_CACHE_LAYOUT": "nhd", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": False}

DEVICES = {isa: DeviceLimits(widths=WIDTHS, tp_sizes=TP_SIZES, resident_blocks=units) for isa, units in code_objects.COMPUTE_UNITS.items()}


def _config_disable_reasons(cfg: Any, hf_config: Any) -> list[str]:
    from sglang.srt.environ import envs
    from sglang.srt.kernel_plugins.amd.binding import device_isa

    try:
        emulate = config.get().emulate
    except ValueError as error:
        return [str(error)]
    return config_disable_reasons(
        cfg,
        hf_config,
        emulate=emulate,
        isa=device_isa(),
        built=code_objects.installed(),
        use_aiter=bool(envs.SGLANG_USE_AITER.get()),
        attention_backends=ATTENTION_BACKENDS,
    )


def _model_disable_reasons(model: Any, hf_config: Any, copies: dict, *, family: Family) -> list[str]:
    from sgl_lowlatency.runtime import sglang_state

    if sglang_state.building_draft_model():
        return []  # it keeps SGLang's forward (runtime/draft_step.py)
    return model_disable_reasons(model, hf_config, family, sglang_state.tensor_parallel().num_ranks)


def _build(model: Any, hf_config: Any, context: BuildContext, *, bounds: Mapping[str, float]) -> BuiltMonokernels:
    from sgl_lowlatency.build.monokernel import build_step
    from sgl_lowlatency.runtime import sglang_state

    place = sglang_state.tensor_parallel()
    geometry, reasons = rank_geometry(hf_config, place.num_ranks)
    if geometry is None:
        raise ValueError("; ".join(reasons))  # _model_disable_reasons names them before
    return build_step(
        model, geometry, context, bounds=bounds, grid=DEVICES[context.isa].resident_blocks, tokens_per_request=sglang_state.tokens_per_request(),
        place=place,
    )  # fmt: skip


def family_spec(family: Family, bounds: Mapping[str, float]) -> MonoSpec:
    """The spec of a family. bounds: of its numerics."""
    return MonoSpec(
        name=f"sgl_lowlatency monokernel ({family.name})",
        devices=DEVICES,
        features=frozenset({Feature.SPECULATIVE_DECODING}),
        requires=Requirements(
            dtypes=frozenset({"bfloat16"}),
            attention_backends=ATTENTION_BACKENDS,
            server_args={
                "page_size": PAGE_SIZES,
                "kv_cache_dtype": frozenset({"auto", "bf16", "bfloat16"}),
                **({"moe_runner_backend": moe.RUNNER_BACKENDS} if family.is_moe else {}),
            },
            env={**ENVIRONMENT, **(moe.ENVIRONMENT if family.is_moe else {})},
        ),
        numerics=Numerics(NumericsKind.TOLERANCE, dict(bounds)),
        model_disable_reasons=functools.partial(_model_disable_reasons, family=family),
        build=functools.partial(_build, bounds=bounds),
        api_version=MONOKERNEL_API_VERSION,
        config_disable_reasons=_config_disable_reasons,
        unread_metadata=frozenset({StepMetadata.LOW_RATIO_DECODE_SCHEDULE}),
    )
