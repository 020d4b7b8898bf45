"""Refusals of DeepSeek-V4.1's MoE before and after load, on stand-ins with SGLang's attributes; each defect planted in one place."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from moe_stand_ins import DeepseekV2MoE  # noqa: E402

from sgl_lowlatency.guard import fused_moe  # noqa: E402

CONFIG = {"hidden_size": 5120, "moe_intermediate_size": 2304, "n_routed_experts": 384, "num_experts_per_tok": 6, "n_shared_experts": 1,
          "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "hidden_act": "silu", "topk_method": "noaux_tc"}  # fmt: skip


def test_what_is_served_has_no_reason():
    assert fused_moe.config_reasons(SimpleNamespace(**CONFIG)) == []
    assert list(fused_moe.layer_reasons(DeepseekV2MoE())) == []


@pytest.mark.parametrize(("fields", "reason"), [
    ({"moe_intermediate_size": 576}, "config.moe_intermediate_size 576 is not a multiple of 128 up to 2560"),
    ({"n_routed_experts": 400}, "config.n_routed_experts 400 is not a multiple of 16 up to 384"),
    ({"num_experts_per_tok": 9}, "config.num_experts_per_tok 9 is outside 1..8"),
    ({"hidden_size": 7168}, "config.hidden_size 7168 is not a multiple of 128 up to 5120"),
    ({"n_shared_experts": 2}, "config.n_shared_experts 2 is not 1"),
    ({"scoring_func": "softmax"}, "config.scoring_func 'softmax' is not 'sqrtsoftplus'"),
    ({"num_hash_layers": 3}, "config.num_hash_layers 3: the kernel does not route by hash"),
])  # fmt: skip
def test_configs(fields, reason):
    assert fused_moe.config_reasons(SimpleNamespace(**{**CONFIG, **fields})) == [reason]


@pytest.mark.parametrize(("path", "value", "reason"), [
    ("shared_experts", None, "mlp.shared_experts is None: the shared expert is fused into the experts, or there is none"),
    ("is_hash", True, "mlp routes by hash"),
    ("tp_size", 2, "mlp is spread over 2 x 1 GPUs: the kernel has all experts on one GPU and adds the shared expert itself"),
    ("_shared_expert_tp1", True, "mlp has its shared expert replicated (SGLANG_SHARED_EXPERT_TP1): the kernel has all experts on one GPU and adds "
                                 "the shared expert itself"),
    ("_enable_a2a_moe", True, "mlp dispatches its rows to other GPUs"),
    ("routed_scaling_factor_fused_in_topk", False, "mlp scales its experts' sum behind them: the kernel scales the weights of choices"),
    ("gate.e_score_correction_bias", None, "gate.e_score_correction_bias is missing"),
    ("topk.topk_config.sqrtsoftplus_log1p", False, "topk scores by sqrtsoftplus, sqrtsoftplus_log1p False, not by sqrtsoftplus through log1p"),
    ("topk.topk_config.renormalize", False, "topk does not normalise its weights"),
    ("topk.topk_config.use_grouped_topk", True, "topk.use_grouped_topk is set"),
    ("topk.topk_config.routed_scaling_factor", 2.5, "topk scales by 2.5, mlp.routed_scaling_factor is 1.5"),
    ("experts._dsv4_mxfp4_backend", "flashinfer_cutlass_sm120", "experts are laid out for flashinfer_cutlass_sm120, not flashinfer_cutlass_sm90"),
    ("experts.moe_runner_config.gemm1_clamp_limit", 7.0, "experts have gemm1_clamp_limit 7.0"),
    ("experts.moe_runner_config.activation", "situ", "experts have the activation situ, not a gated silu"),
    ("shared_experts.swiglu_limit", None, "shared_experts has swiglu_limit None, experts 10.0"),
    ("shared_experts.down_proj.quant_method.weight_block_size", [128, 128], "shared_experts.down_proj has no scale a block of [32, 32]"),
    ("experts.w2_weight", torch.zeros(32, 128, 32, dtype=torch.uint8), "experts.w2_weight has shape [32, 128, 32], not [32, 128, 64]"),
])  # fmt: skip
def test_layers(path, value, reason):
    mlp = DeepseekV2MoE()
    *names, last = path.split(".")
    owner = mlp
    for name in names:
        owner = getattr(owner, name)
    if isinstance(owner, torch.nn.Module):
        owner.__dict__[last] = value
    else:
        setattr(owner, last, value)
    assert list(fused_moe.layer_reasons(mlp)) == [reason]


def test_the_limits_are_the_kernels():
    from sgl_lowlatency.kernels import fused_moe as kernel

    assert (fused_moe.MAX_HIDDEN, fused_moe.MAX_INTERMEDIATE, fused_moe.MAX_TOP_K) == (kernel.MAX_HIDDEN, kernel.MAX_INTERMEDIATE, kernel.MAX_TOP_K)


def test_another_module():
    assert list(fused_moe.layer_reasons(torch.nn.Linear(2, 2))) == ["mlp is a Linear, not a DeepseekV2MoE"]
