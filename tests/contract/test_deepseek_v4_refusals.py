"""What the spec of DeepSeek-V4.1's own steps refuses before the weights load: its own model's sizes and, as every spec, plain server arguments, the
device and the installation. Oracle: the texts. The arguments are a served server's, as they are when SGLang has resolved them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from guard_cases import server as plain_server  # noqa: E402
from sglang.srt.kernel_plugins.nvidia import binding  # noqa: E402

from sgl_lowlatency import config, plugin  # noqa: E402
from sgl_lowlatency.guard import attention_slices, device, fused_moe, moe  # noqa: E402
from sgl_lowlatency.specs.nvidia.deepseek_v4 import DEEPSEEK_V4_SPEC, SERVER_ARGUMENTS  # noqa: E402

MODEL = {
    "hidden_size": 5120, "moe_intermediate_size": 2304, "n_routed_experts": 384, "num_experts_per_tok": 6, "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "hidden_act": "silu", "topk_method": "noaux_tc",
    "head_dim": 512, "qk_rope_head_dim": 64, "hc_mult": 4, "hc_pre_from_prev_sublayer": True, "q_head_norm": False, "num_attention_heads": 64,
    "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1280, "compress_ratios": [0, 0, 2, 1],
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
}  # fmt: skip


@pytest.fixture
def reasons(monkeypatch):
    """Of a server on an H200 with `fields` changed. backends, emulate: of the installation and the environment."""

    def ask(backends=None, emulate=False, model=None, slices="attention_in,attention_out,moe", **fields):
        monkeypatch.setattr(binding, "device_isa", lambda: "sm_90")
        monkeypatch.setattr(device, "compiled_backends", lambda: backends or {"emulation": ["host"], "cuda": ["sm_90a"]})
        monkeypatch.setenv("SGL_LOWLATENCY_EMULATE", "1" if emulate else "0")
        if slices is not None:
            monkeypatch.setenv("SGL_LOWLATENCY_DEEPSEEK_SLICES", slices)
        config.get.cache_clear()
        tables = fused_moe.SERVER_ARGUMENTS + moe.SERVER_ARGUMENTS + attention_slices.SERVER_ARGUMENTS + SERVER_ARGUMENTS
        own = {name: values[0] for name, values, _ in tables}
        cfg = plain_server(**{**own, "quantization": "fp8", **fields})
        return DEEPSEEK_V4_SPEC.config_disable_reasons(cfg, SimpleNamespace(**{**MODEL, **(model or {})}))

    return ask


@pytest.mark.parametrize("slices", ["attention_in,attention_out,moe", "attention_in", "attention_out", "moe"])
def test_a_plain_server_is_served(reasons, slices):
    assert reasons(slices=slices) == [] == reasons(slices=slices, speculative_algorithm="DSPARK")


def test_without_a_slice_the_variable_is_named(reasons):
    assert reasons(slices="none") == [
        "SGL_LOWLATENCY_DEEPSEEK_SLICES=none leaves every layer to SGLang: unset it, or name attention_in, attention_out or moe"
    ]


def test_all_slices_are_the_default(reasons, monkeypatch):
    monkeypatch.delenv("SGL_LOWLATENCY_DEEPSEEK_SLICES", raising=False)
    assert reasons(slices=None) == []
    assert len(reasons(slices=None, model={"n_routed_experts": 400, "q_lora_rank": 1536})) == 2


def test_a_slice_that_is_not_ours_asks_nothing(reasons):
    experts, heads = {"n_routed_experts": 400}, {"q_lora_rank": 1536}
    assert reasons(slices="attention_in,attention_out", model=experts) == [] == reasons(slices="moe", model=heads)
    assert len(reasons(slices="moe", model=experts)) == 1 == len(reasons(slices="attention_out", model=heads))


@pytest.mark.parametrize(("fields", "reason"), [
    ({"dp_size": 2}, "--dp-size 2 is not served: servers that share their requests have not been tested"),
    ({"forward_hooks": ["x"]}, "--forward-hooks ['x'] is not served: it hooks layers that the kernel does not run one by one"),
    ({"model_impl": "transformers"}, "--model-impl 'transformers' is not served: the kernel replaces SGLang's own model code"),
    ({"enforce_shared_experts_fusion": True}, "--enforce-shared-experts-fusion True is not served: the shared expert is then one of the experts"),
    ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend 'deepep' is not served: experts would not all be on this GPU in the model's order"),
    ({"device": "cpu"}, "--device 'cpu' is not 'cuda': SGL_LOWLATENCY_EMULATE=0, the default, runs the kernels on a GPU"),
    ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm 'EAGLE' is not served: nobody has tested its verify steps with slices of "
                                         "DeepSeek-V4.1"),
    ({"dsv4_attn_backend": "trtllm"}, "--dsv4-attn-backend 'trtllm' is not served: its keys and queries are of another form than the kernels write"),
    ({"enable_encoder_swa_bounded_replay": True},
     "--enable-encoder-swa-bounded-replay True is not served: window keys of requests' own have not been tested"),
    ({"tp_size": 2}, "slices of DeepSeek-V4.1's layers run on one GPU: on several, SGL_LOWLATENCY_DEEPSEEK_SLICES=none and "
                     "SGL_LOWLATENCY_DRAFT_SAMPLER=1 have the proposals of its DSPARK draft"),
    ({"model": {"hc_mult": 2}}, "config.hc_mult 2 is not 4"),
    ({"model": {"n_routed_experts": 400}}, "config.n_routed_experts 400 is not a multiple of 16 up to 384"),
    ({"backends": {"emulation": ["host"]}}, "this installation has no CUDA kernels (it was built without nvcc): reinstall sgl-lowlatency where nvcc "
                                            "is on PATH"),
    ({"backends": {"cuda": ["sm_100a"]}}, "this installation has kernels for sm_100a, not for sm_90: reinstall sgl-lowlatency with an nvcc that "
                                          "compiles sm_90a, and SGL_LOWLATENCY_CUDA_ARCHS unset"),
    ({"emulate": True, "device": "cpu"}, "FP8 weights in host emulation: SGLang's CPU backend packs them for Intel AMX, or refuses them"),
])  # fmt: skip
def test_each_reason_by_itself(reasons, fields, reason):
    assert reasons(**fields) == [reason]


def test_all_reasons_are_told_together(reasons):
    assert len(reasons(dp_size=3, device="cpu", model={"moe_intermediate_size": 7168})) == 3


def test_a_bad_variable_is_the_reason(monkeypatch):
    monkeypatch.setenv("SGL_LOWLATENCY_EMULATE", "maybe")
    config.get.cache_clear()
    (reason,) = DEEPSEEK_V4_SPEC.config_disable_reasons(plain_server(), SimpleNamespace(**MODEL))
    assert "SGL_LOWLATENCY_EMULATE" in reason


def test_every_server_gets_it_that_does_not_decline(monkeypatch):
    ours = "sgl_lowlatency.specs.nvidia.deepseek_v4:DEEPSEEK_V4_SPEC"
    for slices, found in ((None, ["DeepseekV4ForCausalLM"]), ("moe", ["DeepseekV4ForCausalLM"]), ("none", [])):
        monkeypatch.delenv("SGL_LOWLATENCY_DEEPSEEK_SLICES", raising=False)
        if slices is not None:
            monkeypatch.setenv("SGL_LOWLATENCY_DEEPSEEK_SLICES", slices)
        config.get.cache_clear()
        assert [architecture for architecture, path in plugin.nvidia_specs().items() if path == ours] == found
