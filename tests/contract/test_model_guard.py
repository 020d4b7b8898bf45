"""The after-load guard over SGLang's real Qwen3ForCausalLM on the CPU, in a process of its own (it needs process groups).

Oracle: the change made to the config or the dtype is what the reasons name, and nothing else.
"""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, socket, sys
import torch
from transformers import Qwen3Config
import sglang.srt.layers.rotary_embedding.base as rope
rope._is_cpu = True  # no vllm import on a CPU machine
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sgl_lowlatency.guard.model import qwen3_disable_reasons

publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler", ranks=SpawnRanks(world_rank=0))
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
init_distributed_environment(
    backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}"
)
initialize_model_parallel()
found = {}
for name, (dtype, fields) in json.load(sys.stdin).items():
    sizes = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                 intermediate_size=192, vocab_size=1000, max_position_embeddings=512, tie_word_embeddings=True)
    config = Qwen3Config(**{**sizes, **fields})
    torch.set_default_dtype(getattr(torch, dtype))
    found[name] = qwen3_disable_reasons(Qwen3ForCausalLM(config), config)
print(json.dumps(found))
"""

CASES = {
    "bf16": ("bfloat16", {}),
    "untied": ("bfloat16", {"tie_word_embeddings": False}),
    "yarn": ("bfloat16", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
    "fp16": ("float16", {}),
    "bias": ("bfloat16", {"attention_bias": True}),
    "head_dim": ("bfloat16", {"head_dim": 32}),
}


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=json.dumps(CASES), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["bf16", "untied", "yarn"])
def test_served_models_have_no_reason(found, name):
    assert found[name] == []


def test_fp16_names_every_weight_once(found):
    names = {"embed_tokens", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"}
    names |= {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    lines = [reason.removeprefix("layer 0: ").removesuffix(" (and 1 more layers)") for reason in found["fp16"]]
    assert sorted(lines) == sorted(f"{name}.weight is float16, not bfloat16" for name in names)


def test_bias(found):
    assert found["bias"] == [f"layer 0: {name} has a bias (and 1 more layers)" for name in ("qkv_proj", "o_proj")]


def test_geometry(found):
    assert found["head_dim"] == ["config.head_dim 32 is not one of 64, 128"]
