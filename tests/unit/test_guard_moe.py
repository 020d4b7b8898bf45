"""Refusals of MoE models before and after load, on stand-ins with SGLang's attributes; each defect planted in one place."""

from types import SimpleNamespace

import pytest
from guard_cases import hf_config, server

torch = pytest.importorskip("torch")

from sgl_lowlatency.guard import moe, parallel  # noqa: E402
from sgl_lowlatency.guard.config import config_disable_reasons  # noqa: E402
from sgl_lowlatency.kernels.geometry import Geometry  # noqa: E402

GEOMETRY = Geometry(1, 128, 2, 1, 64, 0, 512, 64, 1e-6, False, num_experts=16, top_k=2, moe_intermediate=64, norm_topk_prob=True)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FP8_BLOCKS = {**FP8, "weight_block_size": [128, 128]}
FP8_GEOMETRY = Geometry(1, 128, 2, 1, 128, 0, 512, 64, 1e-6, False, num_experts=16, top_k=2, moe_intermediate=256, norm_topk_prob=True)
MOE_CONFIG = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}


def moe_server(**fields):
    return server(**{**{name: values[0] for name, values, _ in moe.SERVER_ARGUMENTS}, "speculative_algorithm": None, **fields})


def reasons(emulate=False, cfg=None, **fields):
    device = "cpu" if emulate else "cuda"
    return config_disable_reasons(cfg or moe_server(device=device), hf_config(**{**MOE_CONFIG, **fields}), emulate=emulate)


def test_a_served_configuration_has_no_reason():
    assert reasons() == reasons(emulate=True) == reasons(quantization_config=FP8_BLOCKS) == []


@pytest.mark.parametrize("name", [row[0] for row in moe.SERVER_ARGUMENTS])
def test_each_guarded_argument_refuses_an_unserved_value(name):
    (reason,) = reasons(cfg=moe_server(**{name: "something-else"}))
    assert reason.startswith(f"--{name.replace('_', '-')} 'something-else' is not served: ")


def test_dense_models_are_not_asked_about_experts():
    assert config_disable_reasons(server(), hf_config(), emulate=False) == []
    assert config_disable_reasons(moe_server(kt_weight_path="w"), hf_config(), emulate=False) == []


@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH", "DSPARK"])
def test_drafts_that_read_inputs_of_layers(algorithm):
    (reason,) = reasons(cfg=moe_server(speculative_algorithm=algorithm))
    why = "its drafts read inputs of layers, which has not been tested"
    assert reason == f"--speculative-algorithm {algorithm} is not served with a MoE model: {why}"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_experts": 160}, "config.num_experts 160 is above 128, the most in FP8"),
        ({"head_dim": 64}, "config.head_dim 64 of a MoE model in FP8 is not 128"),
        ({"head_dim": None}, "config.head_dim 64 of a MoE model in FP8 is not 128"),  # 1024 / 16
    ],
)
def test_what_only_bf16_has(fields, reason):
    assert reasons(**fields) == reasons(emulate=True, **fields) == [] and reasons(quantization_config=FP8_BLOCKS, **fields) == [reason]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_experts": 40}, "config.num_experts 40 is not a multiple of 16 up to 384"),
        ({"num_experts_per_tok": 33}, "config.num_experts_per_tok 33 is outside 1..32"),
        ({"moe_intermediate_size": 100}, "config.moe_intermediate_size 100 is not a multiple of 64"),
        ({"num_experts_per_tok": None}, "config.num_experts_per_tok is None, not a positive integer"),
        (
            {"quantization_config": FP8},
            "FP8 weights of a MoE model without blocks: the kernel reads FP8 experts of a checkpoint whose weight_block_size is [128, 128], "
            "SGLang would give each one scale",
        ),
        ({"quantization_config": FP8_BLOCKS, "moe_intermediate_size": 192}, "config.moe_intermediate_size 192 is not a multiple of 128"),
    ],
)
def test_an_unserved_model_field_is_one_reason(fields, reason):
    assert reasons(**fields) == [reason]


def test_fp8_experts_and_many_draft_tokens():
    assert reasons(cfg=moe_server(speculative_num_draft_tokens=8), quantization_config=FP8_BLOCKS) == []
    (reason,) = reasons(cfg=moe_server(speculative_num_draft_tokens=9), quantization_config=FP8_BLOCKS)
    why = "every step would have more than 8 rows, which were not compared with SGLang's"
    assert reason == f"--speculative-num-draft-tokens 9 is not served with a MoE model in FP8: {why}"
    assert reasons(cfg=moe_server(speculative_num_draft_tokens=9)) == []


def test_fp8_experts_on_several_gpus():
    of_ranks = {name: values[0] for name, values, _ in parallel.SERVER_ARGUMENTS}
    assert reasons(cfg=moe_server(tp_size=2, **of_ranks)) == []
    (reason,) = reasons(cfg=moe_server(tp_size=2, **of_ranks), quantization_config=FP8_BLOCKS)
    assert reason == "--tp-size 2 is not served with a MoE model in FP8: that has no kernel yet"


@pytest.mark.parametrize("emulate", [False, True])
def test_ranks_have_128_experts_at_most(emulate):
    of_ranks = {name: values[0] for name, values, _ in parallel.SERVER_ARGUMENTS}
    cfg = moe_server(tp_size=2, device="cpu" if emulate else "cuda", **of_ranks)
    assert reasons(emulate, cfg=cfg, num_experts=128) == []
    assert reasons(emulate, cfg=cfg, num_experts=160) == ["config.num_experts 160 is above 128, the most on several GPUs"]


class UnquantizedLinearMethod:
    pass


class UnquantizedFusedMoEMethod:
    w13_swiglu_interleaved = load_up_proj_weight_first = False
    runner = "triton"

    def get_moe_runner_backend(self, layer):
        return None if self.runner is None else SimpleNamespace(value=self.runner)


class Qwen3MoeSparseMoeBlock:
    def __init__(self):
        gate = torch.zeros(16, 128, dtype=torch.bfloat16)
        self.gate = SimpleNamespace(weight=gate, bias=None, quant_method=UnquantizedLinearMethod())
        self.topk = SimpleNamespace(topk_config=SimpleNamespace(
            top_k=2, renormalize=True, scoring_func="softmax", use_grouped_topk=False, custom_routing_function=None, correction_bias=None,
            num_shared_topk_slots=0, routed_scaling_factor=None, output_format=SimpleNamespace(name="STANDARD"),
        ))
        self.experts = SimpleNamespace(
            moe_ep_size=1, moe_tp_size=1, quant_method=UnquantizedFusedMoEMethod(), with_bias=False,
            w13_weight=torch.zeros(16, 128, 128, dtype=torch.bfloat16), w2_weight=torch.zeros(16, 128, 64, dtype=torch.bfloat16),
            moe_runner_config=SimpleNamespace(
                activation="silu", is_gated=True, apply_router_weight_on_input=False, no_combine=False, num_fused_shared_experts=0,
                gemm1_alpha=None, gemm1_clamp_limit=None, swiglu_limit=None, routed_scaling_factor=None,
            ),
        )


def test_the_expected_block_has_no_reason():
    assert list(moe.moe_reasons(Qwen3MoeSparseMoeBlock(), GEOMETRY)) == []


def test_another_block_is_named():
    assert list(moe.moe_reasons(SimpleNamespace(), GEOMETRY)) == ["mlp is a SimpleNamespace, not a Qwen3MoeSparseMoeBlock"]


def transposed(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2)


# attribute of the block, value, reason
DEFECTS = [
    ("gate.weight", torch.zeros(16, 128), "gate.weight is float32, not bfloat16"),
    ("gate.quant_method", object(), "gate runs object, not UnquantizedLinearMethod"),
    ("gate.use_intel_amx_backend", True, "gate.weight is packed for Intel AMX"),
    ("topk.topk_config.top_k", 4, "topk takes 4 experts, config.num_experts_per_tok is 2"),
    ("topk.topk_config.renormalize", False, "topk has renormalize False, config.norm_topk_prob is True"),
    ("topk.topk_config.scoring_func", "sigmoid", "topk scores by sigmoid, not by softmax"),
    ("topk.topk_config.use_grouped_topk", True, "topk.use_grouped_topk is set: the kernel chooses by the router's logits alone"),
    ("topk.topk_config.correction_bias", torch.zeros(16), "topk.correction_bias is set: the kernel chooses by the router's logits alone"),
    ("topk.topk_config.custom_routing_function", print, "topk.custom_routing_function is set: the kernel chooses by the router's logits alone"),
    ("topk.topk_config.num_shared_topk_slots", 1, "topk.num_shared_topk_slots is set: the kernel chooses by the router's logits alone"),
    ("topk.topk_config.routed_scaling_factor", 2.5, "topk scales its weights by 2.5"),
    ("topk.topk_config.output_format", SimpleNamespace(name="BYPASSED"), "topk hands out its choices as BYPASSED, not STANDARD"),
    ("experts.moe_ep_size", 2, "experts are spread over 2 x 1 GPUs"),
    ("experts.moe_tp_size", 4, "experts are spread over 1 x 4 GPUs"),
    ("experts.quant_method", object(), "experts run object, not UnquantizedFusedMoEMethod"),
    ("experts.quant_method.runner", "flashinfer_cutlass", "experts have the runner flashinfer_cutlass, not triton"),
    ("experts.quant_method.runner", None, "experts have the runner None, not triton"),
    ("experts.quant_method.w13_swiglu_interleaved", True, "experts.w13_weight has gate and up rows in turn (SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED)"),
    ("experts.quant_method.load_up_proj_weight_first", True, "experts.w13_weight has its up rows first"),
    ("experts.use_intel_amx_backend", True, "experts' weights are packed for Intel AMX"),
    ("experts.with_bias", True, "experts have biases"),
    ("experts.moe_runner_config.activation", "gelu", "experts have the activation gelu, not a gated silu"),
    ("experts.moe_runner_config.is_gated", False, "experts have the activation silu, not gated, not a gated silu"),
    ("experts.moe_runner_config.apply_router_weight_on_input", True, "experts have apply_router_weight_on_input True"),
    ("experts.moe_runner_config.no_combine", True, "experts have no_combine True"),
    ("experts.moe_runner_config.num_fused_shared_experts", 1, "experts have num_fused_shared_experts 1"),
    ("experts.moe_runner_config.gemm1_alpha", 1.7, "experts have gemm1_alpha 1.7"),
    ("experts.moe_runner_config.gemm1_clamp_limit", 7.0, "experts have gemm1_clamp_limit 7.0"),
    ("experts.moe_runner_config.swiglu_limit", 10.0, "experts have swiglu_limit 10.0"),
    ("experts.moe_runner_config.routed_scaling_factor", 1.5, "experts have routed_scaling_factor 1.5"),
    ("experts.w13_weight", torch.zeros(16, 64, 128, dtype=torch.bfloat16), "experts.w13_weight has shape [16, 64, 128], not [16, 128, 128]"),
    ("experts.w2_weight", transposed(16, 64, 128), "experts.w2_weight is not contiguous"),
    ("experts.w2_weight", torch.zeros(16, 128, 64), "experts.w2_weight is float32, not bfloat16"),
]


def with_defect(block, where, value):
    *path, name = where.split(".")
    holder = block
    for step in path:
        holder = getattr(holder, step)
    setattr(holder, name, value)
    return block


@pytest.mark.parametrize(("where", "value", "reason"), DEFECTS, ids=[f"{where} {number}" for number, (where, _, _) in enumerate(DEFECTS)])
def test_one_defect_is_one_reason(where, value, reason):
    assert list(moe.moe_reasons(with_defect(Qwen3MoeSparseMoeBlock(), where, value), GEOMETRY)) == [reason]


class Fp8MoEMethod:
    block_quant, weight_block_size, use_mxfp8, is_fp4_expert, with_bias = True, [128, 128], False, False, False

    def get_moe_runner_backend(self, layer):
        return SimpleNamespace(value="triton")


def fp8_block():
    block = Qwen3MoeSparseMoeBlock()
    experts = block.experts
    experts.quant_method = Fp8MoEMethod()
    experts.w13_weight, experts.w2_weight = (torch.zeros(shape, dtype=torch.float8_e4m3fn) for shape in ((16, 512, 128), (16, 128, 256)))
    experts.w13_weight_scale_inv, experts.w2_weight_scale_inv = torch.ones(16, 4, 1), torch.ones(16, 1, 2)
    experts.w13_input_scale = experts.w2_input_scale = None
    return block


FP8_DEFECTS = [
    ("gate.weight", torch.zeros(16, 128).to(torch.float8_e4m3fn), "gate.weight is float8_e4m3fn, not bfloat16"),
    ("experts.quant_method", UnquantizedFusedMoEMethod(), "experts run UnquantizedFusedMoEMethod, not Fp8MoEMethod"),
    ("experts.quant_method.block_quant", False, "experts have scales of an expert each, not of blocks of [128, 128]"),
    ("experts.quant_method.weight_block_size", [1, 32], "experts have scales of [1, 32], not of blocks of [128, 128]"),
    ("experts.quant_method.use_mxfp8", True, "experts hold MXFP8 weights"),
    ("experts.quant_method.is_fp4_expert", True, "experts hold FP4 weights"),
    ("experts.quant_method.with_bias", True, "experts have biases"),
    ("experts.w13_weight_scale_inv", torch.ones(16, 2, 1), "experts.w13_weight_scale_inv has shape [16, 2, 1], not [16, 4, 1]"),
    ("experts.w2_weight_scale_inv", torch.ones(16, 1, 2).bfloat16(), "experts.w2_weight_scale_inv is bfloat16, not float32"),
    ("experts.w2_input_scale", torch.ones(16), "experts.w2_input_scale is a static scale of activations: SGLang would clip them, the kernel does not"),
    ("experts.w2_weight", torch.zeros(16, 128, 256, dtype=torch.bfloat16), "experts.w2_weight is bfloat16, not float8_e4m3fn"),
]


def test_fp8_experts_with_scales_of_blocks_have_no_reason():
    assert list(moe.moe_reasons(fp8_block(), FP8_GEOMETRY, "fp8_block")) == []


@pytest.mark.parametrize(("where", "value", "reason"), FP8_DEFECTS, ids=[f"{where} {n}" for n, (where, _, _) in enumerate(FP8_DEFECTS)])
def test_one_defect_of_fp8_experts_is_one_reason(where, value, reason):
    assert list(moe.moe_reasons(with_defect(fp8_block(), where, value), FP8_GEOMETRY, "fp8_block")) == [reason]


def test_powers_of_two_as_scales_are_refused():
    block = fp8_block()
    block.experts.w2_weight_scale_inv.format_ue8m0 = True
    (reason,) = moe.moe_reasons(block, FP8_GEOMETRY, "fp8_block")
    assert reason == "experts.w2_weight_scale_inv was rounded to powers of two for DeepGEMM, which has not been tested"
