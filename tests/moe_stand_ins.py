"""A DeepSeek-V4.1 layer's MoE with SGLang's attributes, as it is after load on sm_90: what the tests of guard and runtime take for it."""

from types import SimpleNamespace

import torch
from fused_moe_cases import random_weights

from sgl_lowlatency.reference import fused_moe as oracle


class Mxfp4FlashinferCutlassMoEMethod:
    pass


def linear(weight, scale):
    return SimpleNamespace(weight=weight, weight_scale_inv=scale, quant_method=SimpleNamespace(weight_block_size=[32, 32]))


class DeepseekV2MoE(torch.nn.Module):
    """forward: SGLang's sums, rounded as it rounds, without FP8 activations."""

    def __init__(self, hidden=128, intermediate=128, num_experts=32, top_k=2, seed=0):
        super().__init__()
        self.w = w = random_weights(hidden, intermediate, num_experts, top_k, seed=seed, alt=True)
        self.is_hash, self.tp_size, self.moe_ep_size, self._shared_expert_tp1, self._enable_a2a_moe = False, 1, 1, False, False
        self.routed_scaling_factor, self.routed_scaling_factor_fused_in_topk = 1.5, True
        self.config = SimpleNamespace(image_token_id=w.alt_token_id)
        self.gate = Gate(w)
        topk = SimpleNamespace(
            scoring_func="sqrtsoftplus", sqrtsoftplus_log1p=True, renormalize=True, use_grouped_topk=False, custom_routing_function=None,
            num_shared_topk_slots=0, top_k=top_k, routed_scaling_factor=1.5,
        )  # fmt: skip
        self.topk = SimpleNamespace(topk_config=topk, routing_inputs=lambda: (self.bound, None))
        self.bound = None
        runner = SimpleNamespace(activation="silu", is_gated=True, apply_router_weight_on_input=False, gemm1_alpha=None, gemm1_clamp_limit=None,
                                 swiglu_limit=10.0)  # fmt: skip
        self.experts = SimpleNamespace(
            quant_method=Mxfp4FlashinferCutlassMoEMethod(), _dsv4_mxfp4_backend="flashinfer_cutlass_sm90", moe_runner_config=runner,
            w13_weight=w.gate_up, w13_weight_scale_inv=w.gate_up_scale, w2_weight=w.down, w2_weight_scale_inv=w.down_scale,
        )  # fmt: skip
        self.shared_experts = SimpleNamespace(
            swiglu_limit=10.0, gate_up_proj=linear(w.shared_gate_up, w.shared_gate_up_scale), down_proj=linear(w.shared_down, w.shared_down_scale)
        )
        self.calls = 0

    def forward(self, hidden_states, forward_batch=None, input_ids=None, input_ids_global=None, skip_shared_experts=False, return_moe_output=False,
                leave_output_sum=False):  # fmt: skip
        self.calls += 1
        live = None if self.bound is None else int(self.bound)
        ids, factors, _ = oracle.route(self.w, self.gate(hidden_states), input_ids_global, live)
        return oracle.outputs(self.w, hidden_states, ids, factors)[1]


class Gate(torch.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.weight, self.e_score_correction_bias, self.e_score_correction_bias_vl = w.router, w.bias, w.bias_alt

    def forward(self, x):
        return oracle.standard_logits(SimpleNamespace(router=self.weight), x)
