"""A server of DeepSeek-V4.1, cut down to eight layers, with its bundled draft: SGLang's whole resolution of its arguments, plugin on.

Oracle: SGLang's own list of refusals, and what it resolves.
"""

import json

import pytest

pytest.importorskip("sglang")

from sglang.kernels.plugin_kernels.nvidia import spec  # noqa: E402

from sgl_lowlatency import config, plugin  # noqa: E402

CUT = {
    "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304, "num_hidden_layers": 8, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "hidden_act": "silu",
    "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "tie_word_embeddings": False, "max_position_embeddings": 1048576, "rope_theta": 10000,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
    "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 128, "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "compress_rope_theta": 160000, "kv_source_layer_ids": [2, 4], "index_source_layer_ids": [2, 4, 6], "index_n_heads": 32, "index_head_dim": 128,
    "index_topk": 512, "candidate_source_layer_id": 4, "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-06, "engram_layer_ids": [1], "engram_num_embeddings": [6660], "engram_max_ngram_size": 4,
    "engram_vocab_size": 200, "engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 129280,
    "num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 256, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3, "model_type": "deepseek_v41_text",
}  # fmt: skip
TOP = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0",
                            "expert_dtype": "fp4"},
}  # fmt: skip
DSPARK = ["--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "5", "--skip-tokenizer-init", "--cuda-graph-max-bs-decode", "4"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({**TOP, "text_config": CUT}))
    monkeypatch.setenv("SGL_LOWLATENCY_DRAFT_SAMPLER", "1")
    config.get.cache_clear()
    return str(tmp_path)


def test_the_bundled_draft_is_accepted_on_hopper(resolve, folder):
    cfg = resolve(["--model-path", folder, *DSPARK])
    assert (cfg.attention_backend, cfg.speculative_num_draft_tokens, cfg.speculative_draft_model_path) == ("dsv4", 6, folder)
    assert cfg.cuda_graph_config.decode.backend == "full"


@pytest.mark.parametrize("arguments", [DSPARK, ["--skip-tokenizer-init", "--cuda-graph-max-bs-decode", "4"]])
@pytest.mark.parametrize("draft_sampler", ["0", "1"])
def test_the_flag_alone_is_enough(refusals, folder, monkeypatch, arguments, draft_sampler):
    monkeypatch.setenv("SGL_LOWLATENCY_DRAFT_SAMPLER", draft_sampler)
    config.get.cache_clear()
    assert refusals(["--model-path", folder, *arguments]) == []


def test_what_leaves_nothing_to_propose_is_refused(refusals, folder, monkeypatch):
    monkeypatch.setenv("SGL_LOWLATENCY_DEEPSEEK_SLICES", "none")
    config.get.cache_clear()
    monkeypatch.setattr(spec, "_REGISTRY", {})  # of a process that is started in that environment
    plugin.register_nvidia()
    plain = refusals(["--model-path", folder, "--skip-tokenizer-init"])
    assert plain == ["speculative_algorithm None is not 'DSPARK', whose proposals are all that there is of DeepSeek-V4 with SGL_LOWLATENCY_DEEPSEEK_SLICES=none"]
    monkeypatch.setenv("SGL_LOWLATENCY_DRAFT_SAMPLER", "0")
    config.get.cache_clear()
    assert any("SGL_LOWLATENCY_DRAFT_SAMPLER is not 1" in line for line in refusals(["--model-path", folder, *DSPARK]))
