"""SGLang's real models on the CPU, for scripts that run in a process of their own (they need process groups)."""

# Defines MODELS: name -> (HF config class, SGLang's model class, the family), torch, json, sys, and found = {}.
PREAMBLE = """
import json, socket, sys
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
import sglang.srt.layers.rotary_embedding.base as rope
rope._is_cpu = True  # no vllm import on a CPU machine
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sgl_lowlatency.guard.family import LLAMA, QWEN2, QWEN3, QWEN3_MOE

publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler", ranks=SpawnRanks(world_rank=0))
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
init_distributed_environment(
    backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}"
)
initialize_model_parallel()
found = {}
MODELS = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, QWEN3),
    "llama": (LlamaConfig, LlamaForCausalLM, LLAMA),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, QWEN2),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, QWEN3_MOE),
}
"""
