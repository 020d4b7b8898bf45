"""What an operator is told before the weights load: SGLang 0.5.23's own message, through its own resolution.

Oracle: the text of the ValueError that SGLang raises; it stops the server with a non-zero exit code.
"""

import json
import os
import subprocess
import sys

import pytest

from sgl_lowlatency import config, plugin
from sgl_lowlatency.specs.nvidia.dense import MAX_ROWS

NAME = "sgl_lowlatency decode_step (Qwen3 dense)"
NGRAM = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"]


def test_the_default_configuration_is_accepted(refusals, model_dir):
    assert refusals(["--model-path", model_dir()]) == []


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton", "torch_native"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_hopper_backends_and_page_sizes_are_accepted(refusals, model_dir, backend, page_size):
    arguments = ["--model-path", model_dir(), "--attention-backend", backend, "--page-size", str(page_size)]
    assert refusals(arguments) == []


@pytest.mark.parametrize("isa", ["sm_100", "sm_103"])
def test_blackwell_defaults_are_accepted(resolve, model_dir, isa):
    cfg = resolve(["--model-path", model_dir()], isa)
    assert (cfg.attention_backend, cfg.page_size) == ("trtllm_mha", 64)


def draft_arguments(algorithm, draft, steps=3, topk=1):
    """Of a speculative server whose draft is the model in the folder `draft`."""
    arguments = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft]
    if algorithm in ("EAGLE", "EAGLE3", "STANDALONE"):
        arguments += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk)]
    return [*arguments, "--speculative-num-draft-tokens", str(steps + 1)]


def test_a_chain_of_ngram_drafts_is_accepted(resolve, model_dir):
    """SGLang's own default backend on Hopper, and its default of twelve draft tokens."""
    cfg = resolve(["--model-path", model_dir(), *NGRAM])
    assert (cfg.attention_backend, cfg.speculative_eagle_topk, cfg.speculative_num_draft_tokens) == ("fa3", 1, 12)
    cfg = resolve(["--model-path", model_dir(), *NGRAM, "--attention-backend", "trtllm_mha"], "sm_100")
    assert cfg.attention_backend == "trtllm_mha"


@pytest.mark.parametrize("isa", ["sm_90", "sm_100"])
@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "NEXTN"])
def test_a_chain_of_a_draft_model_is_accepted(refusals, model_dir, algorithm, isa):
    arguments = draft_arguments(algorithm if algorithm != "NEXTN" else "EAGLE", model_dir())
    if algorithm == "NEXTN":
        arguments[1] = "NEXTN"
    assert refusals(["--model-path", model_dir(), *arguments], isa=isa) == []


@pytest.mark.parametrize("isa", ["sm_90", "sm_100"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH", "DSPARK"])
def test_a_chain_of_a_draft_that_reads_hidden_states_between_layers_is_accepted(refusals, model_dir, algorithm, isa):
    assert refusals(["--model-path", model_dir(), *draft_arguments(algorithm, model_dir())], isa=isa) == []


@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH", "DSPARK"])
def test_a_block_that_is_wider_than_a_step_is_refused(refusals, model_dir, algorithm):
    arguments = draft_arguments(algorithm, model_dir(), steps=MAX_ROWS)
    assert refusals(["--model-path", model_dir(), *arguments]) == [
        f"--speculative-num-draft-tokens {MAX_ROWS + 1} is not served: a verify step has 2 to {MAX_ROWS} tokens a request, and at most "
        f"{MAX_ROWS} in all"
    ]


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3"])
def test_a_draft_model_with_a_tree_is_refused(refusals, model_dir, algorithm):
    assert refusals(["--model-path", model_dir(), *draft_arguments(algorithm, model_dir(), topk=4)]) == [
        "--speculative-eagle-topk 4 is not 1: drafts would form a tree, and the kernel verifies a chain"
    ]


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "DFLASH", "DSPARK"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_several_gpus_speculate_as_one_does(refusals, model_dir, algorithm, ranks):
    arguments = NGRAM if algorithm == "NGRAM" else draft_arguments(algorithm, model_dir())
    assert refusals(["--model-path", model_dir(), "--tp", str(ranks), *arguments]) == []


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_ranks_that_do_not_follow_rank_0_are_refused(refusals, model_dir, monkeypatch, algorithm):
    monkeypatch.setenv("SGLANG_SPEC_TP_SYNC", "all,-dspark-draft,-dflash-target")
    arguments = ["--model-path", model_dir(), *draft_arguments(algorithm, model_dir())]
    assert refusals([*arguments, "--tp", "2"]) == [
        f"SGLANG_SPEC_TP_SYNC='all,-dspark-draft,-dflash-target' is not served with {algorithm} on several GPUs: ranks would not all follow rank 0, and "
        "could verify other drafts than each other; unset it"
    ]
    assert refusals(arguments) == []


@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
@pytest.mark.parametrize("algorithm", ["NGRAM", "DSPARK"])
def test_ragged_verify_is_refused(refusals, model_dir, monkeypatch, algorithm, mode):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", mode)
    arguments = NGRAM if algorithm == "NGRAM" else draft_arguments(algorithm, model_dir())
    assert refusals(["--model-path", model_dir(), *arguments]) == [
        f"uneven tokens per request in verify (SGLANG_RAGGED_VERIFY_MODE) is in use and {NAME} does not accept it"
    ]


# (extra arguments, the one line they cause)
SINGLE = {
    "tensor parallelism": (["--tp", "3"], "tp_size 3 is not one of ['1', '2', '4', '8']"),
    "scattered inputs": (
        ["--tp", "2", "--enable-attn-tp-input-scattered"],
        "--enable-attn-tp-input-scattered True is not served: weights or activations would be split otherwise than the kernel takes them to be",
    ),
    "ranks with corpora": (
        ["--tp", "2", *NGRAM, "--speculative-ngram-external-sam-budget", "3"],
        "--speculative-ngram-external-sam-budget 3 is not served: a corpus that is added would reach the drafts of one rank before another's",
    ),
    "replicas": (["--dp-size", "2"], "--dp-size 2 is not served: servers that share their requests have not been tested"),
    "fp16": (["--dtype", "float16"], "dtype 'float16' is not one of ['bfloat16']"),
    "lora": (["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"], f"LoRA is in use and {NAME} does not accept it"),
    "page size": (["--page-size", "7"], "page_size 7 is not one of ['1', '128', '16', '32', '64']"),
    "kv dtype": (["--kv-cache-dtype", "fp8_e5m2"], "kv_cache_dtype 'fp8_e5m2' is not one of ['auto', 'bf16', 'bfloat16']"),
    "backend": (
        ["--attention-backend", "flex_attention"],
        "attention_backend 'flex_attention' is not one of ['fa3', 'fa4', 'flashinfer', 'torch_native', 'triton', 'trtllm_mha']",
    ),
    "mixed backends": (
        ["--prefill-attention-backend", "flashinfer"],
        "prefill and decode attention backends differ ('flashinfer' and 'fa3'): SGLang then gives a step no attention "
        "metadata; give both the same --attention-backend",
    ),
    "watchdog": (["--watchdog-timeout", "8"], "--watchdog-timeout 8 s leaves the waits a deadline under 5 s"),
    "both vendor flags": (["--enable-amd-monokernel"], "--enable-amd-monokernel is also set; use one of the two"),
    "both, the old name": (["--monokernel-backend", "amd"], "--enable-amd-monokernel is also set; use one of the two"),
    "a tree of drafts": (
        ["--speculative-algorithm", "NGRAM"],
        "--speculative-ngram-max-bfs-breadth 10 is not 1: drafts would form a tree, and the kernel verifies a chain",
    ),
    "drafts verified as a tree": (
        [*NGRAM, "--attention-backend", "flashinfer"],
        "--attention-backend flashinfer is not served with NGRAM: it verifies a tree where the drafts' matches part; fa3, fa4, "
        "trtllm_mha verify a chain, as the kernel does",
    ),
    "too many drafts": (
        [*NGRAM, "--speculative-num-draft-tokens", str(MAX_ROWS + 1)],
        f"--speculative-num-draft-tokens {MAX_ROWS + 1} is not served: a verify step has 2 to {MAX_ROWS} tokens a request, and at "
        f"most {MAX_ROWS} in all",
    ),
    "torch compile": (["--enable-torch-compile"], f"torch-compiled decode is in use and {NAME} does not accept it"),
    "deterministic": (["--enable-deterministic-inference"], f"deterministic inference is in use and {NAME} does not accept it"),
    "decode graphs": (["--cuda-graph-backend-decode", "breakable"], "decode CUDA graphs 'breakable' is not one of ['disabled', 'full']"),
    "overlapped load": (
        ["--startup-weight-load-mode", "overlap"],
        "--startup-weight-load-mode 'overlap' is not served: weights would still be loading when the kernel is checked",
    ),
    "kv canary": (
        ["--kv-canary", "log"],
        "--kv-canary 'log' is not served: its patches of the model's forward and the KV pool have not been tested here",
    ),
    "hooks": (
        ["--forward-hooks", json.dumps([{"name": "h"}])],
        "--forward-hooks [{'name': 'h'}] is not served: it hooks layers that the kernel does not run one by one",
    ),
    "model code": (
        ["--model-impl", "transformers"],
        "--model-impl 'transformers' is not served: the kernel replaces SGLang's own model code",
    ),
}


@pytest.mark.parametrize("case", SINGLE)
def test_one_unserved_setting_is_one_line(refusals, model_dir, case):
    arguments, line = SINGLE[case]
    assert refusals(["--model-path", model_dir(), *arguments]) == [line]


# (config.json fields, the one line they cause)
MODELS = {
    "head_dim": ({"head_dim": 96}, "config.head_dim 96 is not one of 64, 128"),
    "intermediate": ({"intermediate_size": 12300}, "config.intermediate_size 12300 is not a multiple of 64"),
    "group": (
        {"num_attention_heads": 34, "num_key_value_heads": 1},
        "config.num_attention_heads 34 over config.num_key_value_heads 1 is more than 16 query heads a KV head",
    ),
    "bias": ({"attention_bias": True}, "config.attention_bias is true: the kernel adds no bias but that of Qwen2's q, k and v"),
    "window": (
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 36},
        "config.use_sliding_window: the kernel attends to the whole context in every layer",
    ),
    "quantisation": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}},
        "config.quantization_config has quant_method 'awq': the kernel reads bf16 weights, or FP8 ones of quant_method 'fp8'",
    ),
    "static activations": (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        "config.quantization_config has activation_scheme 'static', not 'dynamic': SGLang would clip activations, the kernel does not",
    ),
    "rope": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 64}},
        "rope type 'longrope' of the model's config is not one of default, linear, dynamic, yarn, llama3",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_one_unserved_model_field_is_one_line(refusals, model_dir, case):
    fields, line = MODELS[case]
    assert refusals(["--model-path", model_dir(**fields)]) == [line]


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}  # as Qwen3-8B-FP8's config, without its blocks


@pytest.mark.parametrize("block", [{"weight_block_size": [128, 128]}, {}], ids=["blocks", "a scale a matrix"])
def test_fp8_checkpoints_are_accepted(refusals, model_dir, block):
    assert refusals(["--model-path", model_dir(quantization_config={**FP8, **block})]) == []


def test_fp8_made_of_a_bf16_checkpoint_is_accepted(refusals, model_dir):
    assert refusals(["--model-path", model_dir(), "--quantization", "fp8"]) == []


@pytest.mark.parametrize("isa", ["sm_100", "sm_103"])
def test_fp8_weights_are_refused_on_blackwell(refusals, model_dir, isa):
    (line,) = refusals(["--model-path", model_dir(quantization_config={**FP8, "weight_block_size": [128, 128]})], isa=isa)
    assert line == f"FP8 weights are served on sm_90 alone: on {isa} SGLang may requantize them for its own kernels"


def test_fp8_weights_need_k_in_blocks_of_128(refusals, model_dir):
    (line,) = refusals(["--model-path", model_dir(intermediate_size=12352), "--quantization", "fp8"])
    assert line == "config.intermediate_size 12352 is not a multiple of 128"


def test_yarn_is_accepted(refusals, model_dir):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert refusals(["--model-path", model_dir(rope_scaling=yarn)]) == []


def test_every_reason_is_in_one_message(refusals, model_dir):
    lines = refusals(
        ["--model-path", model_dir(head_dim=96, attention_bias=True), "--tp", "3", "--dtype", "float16", "--page-size", "7"]
        + ["--kv-cache-dtype", "fp8_e4m3", "--watchdog-timeout", "8", "--enable-amd-monokernel"]
        + ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"]
        + ["--prefill-attention-backend", "flashinfer"]
    )
    expected = [SINGLE[case][1] for case in ("tensor parallelism", "fp16", "page size", "watchdog", "both vendor flags")]
    expected += [SINGLE[case][1] for case in ("lora", "mixed backends")]
    expected += ["kv_cache_dtype 'fp8_e4m3' is not one of ['auto', 'bf16', 'bfloat16']"]
    expected += [MODELS[case][1] for case in ("head_dim", "bias")]
    assert sorted(lines) == sorted(expected)


def test_no_gpu(refusals, model_dir):
    assert refusals(["--model-path", model_dir()], isa=None) == ["no GPU is visible"]


def test_wrong_gpu(refusals, model_dir):
    (line,) = refusals(["--model-path", model_dir()], isa="sm_89")
    assert line == "sgl_lowlatency.specs.nvidia.dense:QWEN3_SPEC supports ['sm_100', 'sm_103', 'sm_90'], not sm_89"


def test_wrong_model(refusals, model_dir):
    (line,) = refusals(["--model-path", model_dir(architectures=["MistralForCausalLM"], model_type="mistral")])
    known = [
        "DSparkDraftModel", "DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMDSpark", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3DSparkModel",
        "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    ]  # fmt: skip
    assert line == f"no megakernel spec is registered for ['MistralForCausalLM'] (registered: {known})"


def test_plugin_not_listed(refusals, model_dir, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    lines = refusals(["--model-path", model_dir()])
    assert lines == ["SGLANG_PLUGINS='another' does not list the 'nvidia_megakernel' plugin"]


def test_pinned_environment(refusals, model_dir, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert refusals(["--model-path", model_dir()]) == ["SGLANG_USE_HND_KVCACHE True is not False"]


def test_host_only_installation(refusals, model_dir):
    (line,) = refusals(["--model-path", model_dir()], backends={"emulation": ["host"]})
    assert line == (
        "this installation has no CUDA kernels (it was built without nvcc): reinstall sgl-lowlatency where nvcc is on PATH"
    )


def test_installation_without_kernels_for_this_gpu(refusals, model_dir):
    (line,) = refusals(["--model-path", model_dir()], isa="sm_103", backends={"cuda": ["sm_90a", "sm_100a"]})
    assert line.startswith("this installation has kernels for sm_90a, sm_100a, not for sm_103: reinstall sgl-lowlatency")


def test_a_bad_variable_of_ours_stops_the_registration(monkeypatch):
    """SGLang logs what an entry point raises; the value must not be served with a guess."""
    monkeypatch.setenv("SGL_LOWLATENCY_SELF_CHECK", "no")
    config.get.cache_clear()
    with pytest.raises(ValueError, match="SGL_LOWLATENCY_SELF_CHECK='no' is not 0 or 1"):
        plugin.register_nvidia()


def test_the_server_process_ends_with_the_refusal(model_dir):
    """The real launcher in its own process, on a machine whose GPUs are hidden."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--model-path", model_dir(), "--device", "cpu"]
        + ["--enable-nvidia-megakernel"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "--enable-nvidia-megakernel cannot run this setup:\n  - no GPU is visible" in done.stderr


def test_a_bad_variable_is_a_reason_among_the_others(monkeypatch):
    """SGLang logs what the entry point raised and goes on: the refusal itself names the variable."""
    from sgl_lowlatency import config
    from sgl_lowlatency.specs.nvidia.dense import QWEN3_SPEC as SPEC

    monkeypatch.setenv("SGL_LOWLATENCY_SELF_CHECK", "yes")
    config.get.cache_clear()
    try:
        assert SPEC.config_disable_reasons(None, None) == ["SGL_LOWLATENCY_SELF_CHECK='yes' is not 0 or 1"]
    finally:
        config.get.cache_clear()
