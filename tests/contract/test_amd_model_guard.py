"""The after-load guard of AMD's kernels over SGLang's real models on the CPU, in a process of its own (it needs process groups).

A rank's share stands in as a whole model of its sizes, judged by the config that it is a share of. Oracle: what was changed is what the reasons name.
"""

import json
import subprocess
import sys

import pytest
from sglang_models import PREAMBLE

SCRIPT = PREAMBLE + """
from types import SimpleNamespace
from sgl_lowlatency.guard.monokernel import model_disable_reasons

for name, case in json.load(sys.stdin).items():
    config_class, model_class, family = MODELS[case.get("family", "qwen3")]
    sizes = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                 intermediate_size=192, vocab_size=1000, max_position_embeddings=512, tie_word_embeddings=True)
    config = config_class(**{**sizes, **case.get("fields", {})})
    torch.set_default_dtype(getattr(torch, case.get("dtype", "bfloat16")))
    model = model_class(config)
    for module in model.modules():
        if hasattr(module, "w13_weight"):
            module.quant_method.process_weights_after_loading(module)
            module.moe_tp_size = case.get("experts_over", 1)
            if case.get("aiter"):
                module.quant_method._aiter_runner = SimpleNamespace(runner_backend=SimpleNamespace(value="aiter"))
    if case.get("hook"):
        model.model.layers[0].register_forward_hook(lambda *_: None)
    whole = config_class(**{**sizes, **case.get("fields", {}), **case.get("judged_by", {})})
    found[name] = model_disable_reasons(model, whole, MODELS[case.get("judged_as", case.get("family", "qwen3"))][2], case.get("tp", 1))
print(json.dumps(found))
"""

EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
MOE = {"family": "qwen3_moe", "fields": EXPERTS}
CASES = {
    "whole": {},
    "share of two": {"tp": 2, "judged_by": {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 384}},
    "share of eight": {"tp": 8, "judged_by": {"num_attention_heads": 32, "num_key_value_heads": 16, "intermediate_size": 1536}},
    "one KV head of four ranks": {
        "tp": 4, "fields": {"num_key_value_heads": 1}, "judged_by": {"num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 768},
    },
    "moe": MOE,
    "moe share": {
        **MOE, "tp": 2, "experts_over": 2, "judged_by": {"num_attention_heads": 8, "num_key_value_heads": 4, "moe_intermediate_size": 256},
    },
    "moe, whole experts": {**MOE, "tp": 2, "judged_by": {"num_attention_heads": 8, "num_key_value_heads": 4, "moe_intermediate_size": 256}},
    "moe, aiter": {**MOE, "aiter": True},
    "fp16": {"dtype": "float16"},
    "hook": {"hook": True},
    "layers": {"judged_by": {"num_hidden_layers": 3}},
    "not shared": {"tp": 2},
    "llama": {"family": "llama", "judged_as": "qwen3"},
    "bias": {"fields": {"attention_bias": True}},
    "head_dim": {"fields": {"head_dim": 32}},
}  # fmt: skip


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=json.dumps(CASES), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["whole", "share of two", "share of eight", "one KV head of four ranks", "moe", "moe share"])
def test_served_models_have_no_reason(found, name):
    assert found[name] == []


def test_a_model_that_is_not_shared_is_named(found):
    named = "\n".join(found["not shared"])
    assert all(matrix in named for matrix in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "attention heads"))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("moe, whole experts", "layer 0: experts are spread over 1 x 1 GPUs (and 1 more layers)"),
        ("moe, aiter", "layer 0: experts have the runner aiter, not triton (and 1 more layers)"),
        ("layers", "2 layers are loaded, config.num_hidden_layers is 3"),
        ("hook", "forward hooks are registered on 1 modules (layers.0, ...): the kernel does not run them"),
        ("llama", "the loaded model is sglang.srt.models.llama.LlamaForCausalLM, not sglang.srt.models.qwen3.Qwen3ForCausalLM"),
        ("head_dim", "config.head_dim 32 is not one of 64, 128"),
    ],
)
def test_a_defect_is_one_line(found, name, line):
    assert found[name] == [line]


def test_weights_of_another_type_and_biases(found):
    assert all(reason.split(" (and")[0].endswith("is float16, not bfloat16") for reason in found["fp16"]) and len(found["fp16"]) == 8
    assert found["bias"] == [f"layer 0: {name} has a bias (and 1 more layers)" for name in ("qkv_proj", "o_proj")]
