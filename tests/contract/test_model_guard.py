"""The after-load guard over SGLang's real models on the CPU, in a process of its own (it needs process groups).

Oracle: the change made to the config or the dtype is what the reasons name, and nothing else.
"""

import json
import subprocess
import sys

import pytest
from sglang_models import PREAMBLE

SCRIPT = PREAMBLE + """
from sgl_lowlatency.guard.model import model_disable_reasons

for name, (dtype, fields) in json.load(sys.stdin).items():
    config_class, model_class, family = MODELS[fields.pop("family", "qwen3")]
    judged_as = MODELS[fields.pop("judged_as", None) or next(k for k, v in MODELS.items() if v[2] is family)][2]
    sizes = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                 intermediate_size=192, vocab_size=1000, max_position_embeddings=512, tie_word_embeddings=True)
    config = config_class(**{**sizes, **fields})
    torch.set_default_dtype(getattr(torch, dtype))
    model = model_class(config)
    for module in model.modules():
        if hasattr(module, "w13_weight"):
            module.quant_method.process_weights_after_loading(module)
    found[name] = model_disable_reasons(model, config, judged_as)
print(json.dumps(found))
"""

MOE = {"family": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
CASES = {
    "bf16": ("bfloat16", {}),
    "untied": ("bfloat16", {"tie_word_embeddings": False}),
    "yarn": ("bfloat16", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
    "llama": ("bfloat16", {"family": "llama"}),
    "llama3": ("bfloat16", {"family": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 128}}),
    "qwen2": ("bfloat16", {"family": "qwen2"}),
    "moe": ("bfloat16", {**MOE}),
    "moe without renormalisation": ("bfloat16", {**MOE, "norm_topk_prob": False}),
    "moe fp16": ("float16", {**MOE}),
    "llama with a bias": ("bfloat16", {"family": "llama", "attention_bias": True}),
    "llama taken for qwen2": ("bfloat16", {"family": "llama", "judged_as": "qwen2"}),
    "fp16": ("float16", {}),
    "bias": ("bfloat16", {"attention_bias": True}),
    "head_dim": ("bfloat16", {"head_dim": 32}),
}


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=json.dumps(CASES), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["bf16", "untied", "yarn", "llama", "llama3", "qwen2", "moe", "moe without renormalisation"])
def test_served_models_have_no_reason(found, name):
    assert found[name] == []


def test_fp16_names_every_weight_once(found):
    names = {"embed_tokens", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"}
    names |= {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    lines = [reason.removeprefix("layer 0: ").removesuffix(" (and 1 more layers)") for reason in found["fp16"]]
    assert sorted(lines) == sorted(f"{name}.weight is float16, not bfloat16" for name in names)


def test_fp16_names_every_weight_of_a_moe_layer(found):
    lines = {reason.removeprefix("layer 0: ").removesuffix(" (and 1 more layers)") for reason in found["moe fp16"]}
    assert {f"{name} is float16, not bfloat16" for name in ("gate.weight", "experts.w13_weight", "experts.w2_weight")} <= lines


def test_bias(found):
    assert found["bias"] == [f"layer 0: {name} has a bias (and 1 more layers)" for name in ("qkv_proj", "o_proj")]


def test_geometry(found):
    assert found["head_dim"] == ["config.head_dim 32 is not one of 64, 128"]


def test_a_bias_that_a_family_does_not_have(found):
    assert "layer 0: qkv_proj has a bias (and 1 more layers)" in found["llama with a bias"]


def test_another_familys_class(found):
    (reason,) = found["llama taken for qwen2"]
    assert reason == "the loaded model is sglang.srt.models.llama.LlamaForCausalLM, not sglang.srt.models.qwen2.Qwen2ForCausalLM"
