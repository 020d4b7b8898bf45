"""The tensors of SGLang's DeepseekV2MoE as fused_moe reads them: views, no copies."""

from __future__ import annotations

import math
from typing import Any

from sgl_lowlatency.kernels.fused_moe import FusedMoeWeights


def collect_moe(mlp: Any) -> FusedMoeWeights:
    """Of a layer that guard.fused_moe.layer_reasons has nothing against. mlp: after process_weights_after_loading on sm_90."""
    experts, shared = mlp.experts, mlp.shared_experts
    limit, bias_alt = shared.swiglu_limit, mlp.gate.e_score_correction_bias_vl
    return FusedMoeWeights(
        router=mlp.gate.weight.data, bias=mlp.gate.e_score_correction_bias.data,
        gate_up=experts.w13_weight.data, gate_up_scale=experts.w13_weight_scale_inv.data,
        down=experts.w2_weight.data, down_scale=experts.w2_weight_scale_inv.data,
        shared_gate_up=shared.gate_up_proj.weight.data, shared_gate_up_scale=shared.gate_up_proj.weight_scale_inv.data,
        shared_down=shared.down_proj.weight.data, shared_down_scale=shared.down_proj.weight_scale_inv.data,
        top_k=mlp.topk.topk_config.top_k, routed_scaling=mlp.routed_scaling_factor, swiglu_limit=math.inf if limit is None else float(limit),
        bias_alt=None if bias_alt is None else bias_alt.data, alt_token_id=-1 if bias_alt is None else int(mlp.config.image_token_id),
    )  # fmt: skip
