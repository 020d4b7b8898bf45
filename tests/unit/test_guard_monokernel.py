"""Refusals of AMD's k1 and k2 on stand-ins; what SGLang prints of them: tests/contract/test_amd_refusals.py."""

from types import SimpleNamespace

import pytest
from guard_cases import hf_config, server

from sgl_lowlatency.guard import device, moe, parallel, speculation
from sgl_lowlatency.guard import monokernel as guard
from sgl_lowlatency.kernels import code_objects

BUILT = {"k1": ["gfx950"], "k2": ["gfx950"]}
BACKENDS = ("aiter", "triton")
MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}


def amd_server(**fields):
    quiet = {name: None for name in speculation.READ} | {"speculative_adaptive": False, "enable_multi_layer_eagle": False}
    quiet |= {name: values[0] for name, values, _ in (*moe.SERVER_ARGUMENTS, *parallel.SPLITS)}
    quiet |= {"moe_runner_backend": "auto", "enable_nvidia_megakernel": False}
    return server(**{**quiet, "attention_backend": "aiter", "tp_size": 1, **fields})


def reasons(built=BUILT, use_aiter=False, cfg=None, emulate=False, **fields):
    return guard.config_disable_reasons(
        cfg or amd_server(), hf_config(**fields), isa="gfx950", built=built, use_aiter=use_aiter, attention_backends=BACKENDS, emulate=emulate
    )


def test_a_served_configuration_has_no_reason():
    assert reasons() == reasons(**MOE) == []


def test_nothing_is_launched_without_objects():
    line = f"kernels k1/k2 not built for gfx950: {code_objects.HOW_TO_BUILD}"
    assert reasons(built={"k1": [], "k2": []}) == [line]
    assert reasons(built={"k1": ["gfx942"], "k2": ["gfx950"]}) == [line.replace("k1/k2", "k1")]
    assert reasons(built={"k1": [], "k2": []}, emulate=True, cfg=amd_server(device="cpu")) == [], "emulation takes none"
    assert device.code_object_reasons("gfx942", {"k1": ["gfx942"], "k2": ["gfx942"]}) == []


def test_settings_of_the_server():
    assert reasons(cfg=amd_server(device="cpu")) == ["--device 'cpu' is not 'cuda', SGLang's word for a ROCm GPU too"]
    line = "--device 'cuda' is not 'cpu': SGL_LOWLATENCY_EMULATE=1 runs the kernels on the CPU"
    assert reasons(cfg=amd_server(), emulate=True) == [line]
    assert reasons(cfg=amd_server(enable_nvidia_megakernel=True)) == ["--enable-nvidia-megakernel is also set; use one of the two"]
    (line,) = reasons(cfg=amd_server(prefill_attention_backend="wave"))
    assert line == "--prefill-attention-backend 'wave' is not one of aiter, triton: it may keep K and V in another layout"
    (line,) = reasons(cfg=amd_server(enable_pdmux=True))
    assert line.startswith("--enable-pdmux True is not served: ")


@pytest.mark.parametrize("name", [row[0] for row in parallel.SPLITS])
def test_what_splits_otherwise_is_refused_with_several_ranks_alone(name):
    (line,) = reasons(cfg=amd_server(tp_size=2, **{name: 16}))
    assert line.startswith(f"--{name.replace('_', '-')} 16 is not served: ")
    assert reasons(cfg=amd_server(**{name: 16})) == []


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "NGRAM"])
def test_several_ranks_do_not_speculate(algorithm):
    """One line, and nothing else."""
    cfg = amd_server(tp_size=2, speculative_algorithm=algorithm, speculative_num_draft_tokens=4)
    assert reasons(cfg=cfg) == [f"--speculative-algorithm {algorithm!r} is not served: on several GPUs it has not been tested"]


def test_prefill_and_decode_have_one_backend():
    line = "prefill and decode attention backends differ ('triton' and 'aiter'): SGLang then gives a step no attention metadata; give both the same "
    assert reasons(cfg=amd_server(prefill_attention_backend="triton")) == [line + "--attention-backend"]
    assert reasons(cfg=amd_server(prefill_attention_backend="triton", decode_attention_backend="triton")) == []


@pytest.mark.parametrize("name", [row[0] for row in moe.SERVER_ARGUMENTS])
def test_arguments_of_experts(name):
    assert reasons(cfg=amd_server(**{name: "something-else"})) == [], "dense models are not asked"
    (line,) = reasons(cfg=amd_server(**{name: "something-else"}), **MOE)
    assert line.startswith(f"--{name.replace('_', '-')} 'something-else' is not served: ")


@pytest.mark.parametrize(("backend", "use_aiter", "count"), [("auto", True, 1), ("auto", False, 0), ("triton", True, 0), ("aiter", True, 1)])
def test_shuffled_experts(backend, use_aiter, count):
    found = reasons(cfg=amd_server(moe_runner_backend=backend), use_aiter=use_aiter, **MOE)
    expected = f"--moe-runner-backend {backend!r} with SGLANG_USE_AITER=1 shuffles the experts' weights: give --moe-runner-backend triton"
    assert found == [expected] * count


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "config.quantization_config has quant_method 'awq': the kernels read bf16 weights"),
        (
            {"quantization_config": SimpleNamespace(to_dict=lambda: {"quant_method": "fp8"})},
            "config.quantization_config has quant_method 'fp8': the kernels read bf16 weights",
        ),
        ({"hidden_act": "gelu"}, "config.hidden_act 'gelu' is not 'silu'"),
        ({"num_attention_heads": 40}, None),
        ({"num_attention_heads": 20}, "config.num_attention_heads is 20 a rank, no multiple of 8 KV heads"),
        ({"hidden_size": 1040}, "config.hidden_size 1040 is not a multiple of 32"),
        ({"vocab_size": None}, "config.vocab_size is None, not a positive integer"),
        ({**MOE, "num_experts": 120}, "config.num_experts 120 is not a multiple of 16 up to 256"),
        ({**MOE, "num_experts": 272}, "config.num_experts 272 is not a multiple of 16 up to 256"),
        ({**MOE, "num_experts_per_tok": 17}, "config.num_experts_per_tok 17 is outside 1..16"),
        ({**MOE, "moe_intermediate_size": 776}, "config.moe_intermediate_size is 776 a rank, no multiple of 32"),
    ],
)
def test_an_unserved_model_is_one_line(fields, line):
    assert reasons(**fields) == ([line] if line else [])


def test_quantization_of_a_bf16_checkpoint():
    assert reasons(cfg=amd_server(quantization="fp8")) == ["--quantization fp8 is not served: the kernels read bf16 weights"]


@pytest.mark.parametrize(
    ("tp_size", "heads", "kv_heads", "expected"),
    [
        (1, 16, 8, (16, 8)),
        (2, 16, 8, (8, 4)),
        (8, 16, 8, (2, 1)),
        (8, 16, 4, (2, 1)),  # two ranks have a KV head alike
        (8, 16, 1, (2, 1)),
        (4, 16, 6, None),
        (8, 20, 4, None),
    ],
)
def test_shares_of_a_rank(tp_size, heads, kv_heads, expected):
    """Oracle: SGLang's Qwen3Attention, which keeps max(1, heads / ranks) KV heads (models/qwen3.py)."""
    geometry, found = guard.rank_geometry(hf_config(num_attention_heads=heads, num_key_value_heads=kv_heads), tp_size)
    if expected is None:
        assert geometry is None and len(found) == 1
    else:
        assert (geometry.num_q_heads, geometry.num_kv_heads, geometry.intermediate) == (*expected, 3072 // tp_size) and found == []


def test_shares_of_experts():
    geometry, _ = guard.rank_geometry(hf_config(**MOE), 4)
    assert (geometry.num_experts, geometry.moe_intermediate, geometry.top_k) == (128, 192, 8)
    geometry, found = guard.rank_geometry(hf_config(**{**MOE, "moe_intermediate_size": 770}), 4)
    assert geometry is None and found == ["config.moe_intermediate_size 770 cannot be shared evenly by --tp-size 4"]


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE"])
@pytest.mark.parametrize(
    ("tokens", "is_served"), [(2, True), (3, True), (4, True), (5, False), (6, True), (7, False), (16, True), (17, False), (1, False)]
)
def test_tokens_of_a_verify_step(algorithm, tokens, is_served):
    found = reasons(cfg=amd_server(speculative_algorithm=algorithm, speculative_num_draft_tokens=tokens))
    rows = "1, 2, 4, 6, 8, 12, 16"
    line = f"--speculative-num-draft-tokens {tokens} is not served: a step has {rows} rows, and none of these is whole requests of it"
    assert found == ([] if is_served else [line])


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"speculative_algorithm": "NGRAM"},
            "--speculative-algorithm NGRAM is not served: its drafts are verified as a tree; served are STANDALONE, EAGLE",
        ),
        *(
            (
                {"speculative_algorithm": name},
                f"--speculative-algorithm {name} is not served: its drafts read inputs of layers, which the kernels do not hand over; "
                "served are STANDALONE, EAGLE",
            )
            for name in ("EAGLE3", "DFLASH", "DSPARK")
        ),
        (
            {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4},
            "--speculative-eagle-topk 4 is not 1: drafts would form a tree, and the kernels verify a chain",
        ),
        (
            {"speculative_algorithm": "EAGLE", "speculative_adaptive": True},
            "--speculative-adaptive is not served: the number of draft tokens would change while the server runs",
        ),
        (
            {"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True},
            "--enable-multi-layer-eagle is not served: its verify steps have not been tested",
        ),
    ],
)
def test_an_unserved_speculation_is_one_line(fields, line):
    assert reasons(cfg=amd_server(**{"speculative_num_draft_tokens": 4, **fields})) == [line]


def test_an_argument_that_this_sglang_lacks_is_a_reason():
    cfg = amd_server()
    del cfg.speculative_adaptive
    (line,) = reasons(cfg=cfg)
    assert line.startswith("this SGLang has no server argument 'speculative_adaptive' to check; ")
