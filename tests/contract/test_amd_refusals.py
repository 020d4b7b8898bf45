"""What an operator of an AMD GPU is told before the weights load: SGLang 0.5.23's own message, through its own resolution on a stand-in for ROCm.

Oracle: the text of the ValueError that SGLang raises, and the decode graph sizes that its own function resolves.
"""

from __future__ import annotations

from unittest import mock

import pytest

pytest.importorskip("sglang")

from sglang.kernels.plugin_kernels.amd.spec import Feature  # noqa: E402

from sgl_lowlatency import config, plugin  # noqa: E402
from sgl_lowlatency.kernels import code_objects  # noqa: E402
from sgl_lowlatency.runtime.amd_step import FIGURES  # noqa: E402
from sgl_lowlatency.specs.amd import monokernel as spec_module  # noqa: E402
from sgl_lowlatency.specs.amd.qwen3 import QWEN3_SPEC  # noqa: E402
from sgl_lowlatency.specs.amd.qwen3_moe import QWEN3_MOE_SPEC  # noqa: E402

ALL_BUILT = {"k1": ["gfx942", "gfx950"], "k2": ["gfx942", "gfx950"]}
NONE_BUILT = {"k1": [], "k2": []}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "num_hidden_layers": 48, "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
ROCM = {
    "is_cuda": False, "is_hip": True, "has_amx": False, "has_flashinfer": False, "is_sm90": False, "is_hopper_with_cuda_12_3": False,
    "is_sm100": False, "is_sm100_or_sm110": False, "is_sm110": False, "is_sm120": False, "is_blackwell": False,
    "device_capability": (9, 5), "device_sm": 95,
}  # fmt: skip


@pytest.fixture
def resolve_amd(monkeypatch):
    """resolve_amd(arguments, …): SGLang's whole resolution with the flag on, on ROCm's platform facts; (server_args, cfg)."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.kernel_plugins.amd import binding
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import prepare_server_args

    plugin.register_amd()

    def run(arguments, isa="gfx950", built=ALL_BUILT, flag=("--enable-amd-monokernel",)):
        with (
            override_platform(**ROCM),
            mock.patch.object(binding, "device_isa", lambda: isa),
            mock.patch.object(code_objects, "installed", lambda: built),
        ):
            server_args = prepare_server_args(["--device", "cuda", *flag, *arguments])
            server_args.resolve_once()
            return server_args, resolving_view(server_args)

    return run


@pytest.fixture
def refusals_amd(resolve_amd):
    """Like `refusals`: SGLang's lines of reasons; [] when it accepts the configuration."""

    def run(arguments, **options):
        try:
            resolve_amd(arguments, **options)
        except ValueError as error:
            head, *lines = str(error).split("\n  - ")
            assert head == "--enable-amd-monokernel cannot run this setup:", str(error)
            return lines
        return []

    return run


@pytest.mark.parametrize("flag", [("--enable-amd-monokernel",), ("--monokernel-backend", "amd")])
def test_a_server_without_code_objects_is_refused(refusals_amd, model_dir, flag):
    """Before the weights load."""
    lines = refusals_amd(["--model-path", model_dir()], built=NONE_BUILT, flag=flag)
    assert lines == [f"kernels k1/k2 not built for gfx950: {code_objects.HOW_TO_BUILD}"]


def test_an_extension_that_does_not_load_is_a_reason(refusals_amd, model_dir, monkeypatch):
    def missing():
        raise ImportError("the compiled extension sgl_lowlatency._C does not load (gone): reinstall sgl-lowlatency")

    monkeypatch.setattr("sgl_lowlatency.guard.device.compiled_backends", missing)
    assert refusals_amd(["--model-path", model_dir()]) == ["the compiled extension sgl_lowlatency._C does not load (gone): reinstall sgl-lowlatency"]


def test_a_bad_variable_is_a_reason(refusals_amd, model_dir, monkeypatch):
    monkeypatch.setenv("SGL_LOWLATENCY_EMULATE", "yes")
    config.get.cache_clear()
    assert refusals_amd(["--model-path", model_dir()]) == ["SGL_LOWLATENCY_EMULATE='yes' is not 0 or 1"]


@pytest.mark.parametrize(("device", "lines"), [
    ("cpu", []),
    ("cuda", ["--device 'cuda' is not 'cpu': SGL_LOWLATENCY_EMULATE=1 runs the kernels on the CPU"]),
])  # fmt: skip
def test_emulation_needs_no_code_object_but_the_cpu(refusals_amd, model_dir, monkeypatch, device, lines):
    monkeypatch.setenv("SGL_LOWLATENCY_EMULATE", "1")
    config.get.cache_clear()
    words = ["--model-path", model_dir(), "--attention-backend", "torch_native", "--device", device]
    assert refusals_amd(words, built=NONE_BUILT) == lines


def test_a_kernel_of_another_gpu_does_not_do(refusals_amd, model_dir):
    (line,) = refusals_amd(["--model-path", model_dir()], built={"k1": ["gfx942", "gfx950"], "k2": ["gfx942"]})
    assert line == f"kernels k2 not built for gfx950: {code_objects.HOW_TO_BUILD}"
    assert refusals_amd(["--model-path", model_dir()], built={"k1": ["gfx942"], "k2": ["gfx942"]}, isa="gfx942") == []


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("isa", ["gfx942", "gfx950"])
def test_qwen3_is_accepted(refusals_amd, model_dir, isa, tp):
    assert refusals_amd(["--model-path", model_dir(), "--tp", str(tp)], isa=isa) == []


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_qwen3_moe_is_accepted(refusals_amd, model_dir, tp):
    assert refusals_amd(["--model-path", model_dir(**QWEN3_30B_A3B), "--tp", str(tp)]) == []


def test_the_old_name_of_the_flag_does_the_same(resolve_amd, model_dir):
    _, cfg = resolve_amd(["--model-path", model_dir()], flag=("--monokernel-backend", "amd"))
    assert cfg.enable_amd_monokernel is True and cfg.attention_backend in spec_module.ATTENTION_BACKENDS


CHAINS = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
# (extra arguments, the one line they cause)
SINGLE = {
    "ranks": (["--tp", "16"], "tp_size 16 is not one of ['1', '2', '4', '8']"),
    "fp16": (["--dtype", "float16"], "dtype 'float16' is not one of ['bfloat16']"),
    "page size": (["--page-size", "7"], "page_size 7 is not one of ['1', '128', '16', '32', '64']"),
    "kv dtype": (["--kv-cache-dtype", "fp8_e5m2"], "kv_cache_dtype 'fp8_e5m2' is not one of ['auto', 'bf16', 'bfloat16']"),
    "decode backend": (
        ["--decode-attention-backend", "wave"],
        "decode attention backend 'wave' is not one of ['aiter', 'torch_native', 'triton']",
    ),
    "prefill backend": (
        ["--prefill-attention-backend", "wave"],
        "--prefill-attention-backend 'wave' is not one of aiter, torch_native, triton: it may keep K and V in another layout",
    ),
    "two backends": (
        ["--prefill-attention-backend", "triton"],
        "prefill and decode attention backends differ ('triton' and 'aiter'): SGLang then gives a step no attention metadata; give both the same "
        "--attention-backend",
    ),
    "speculation of ranks": (
        ["--tp", "2", "--speculative-algorithm", "EAGLE", *CHAINS],
        "--speculative-algorithm 'EAGLE' is not served: on several GPUs it has not been tested",
    ),
    "fp8": (["--quantization", "fp8"], "--quantization fp8 is not served: the kernels read bf16 weights"),
    "model code": (["--model-impl", "transformers"], "--model-impl 'transformers' is not served: the kernel replaces SGLang's own model code"),
    "overlapped load": (
        ["--startup-weight-load-mode", "overlap"],
        "--startup-weight-load-mode 'overlap' is not served: weights would still be loading when the kernel is checked",
    ),
    "watchdog": (["--watchdog-timeout", "8"], "--watchdog-timeout 8 s leaves the waits a deadline under 5 s"),
    "deterministic": (
        ["--enable-deterministic-inference", "--attention-backend", "triton"],
        "--enable-deterministic-inference needs a BITWISE spec, and this one is not",
    ),
    "lora": (["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"], "LoRA is in use and the spec does not accept it"),
    "torch compile": (["--enable-torch-compile"], "torch-compiled decode is in use and the spec does not accept it"),
}


@pytest.mark.parametrize("case", SINGLE)
def test_one_unserved_setting_is_one_line(refusals_amd, model_dir, case):
    arguments, line = SINGLE[case]
    assert refusals_amd(["--model-path", model_dir(), *arguments]) == [line]


# (config.json fields, extra arguments, the one line they cause)
MODELS = {
    "head_dim": ({"head_dim": 96}, [], "config.head_dim 96 is not one of 64, 128"),
    "intermediate": ({"intermediate_size": 12300}, [], "config.intermediate_size is 12300 a rank, no multiple of 32"),
    "intermediate of a rank": (
        {"intermediate_size": 12352}, ["--tp", "4"], "config.intermediate_size over --tp-size 4 is 3088 a rank, no multiple of 32",
    ),
    "heads": (
        {"num_attention_heads": 36, "num_key_value_heads": 4}, ["--tp", "8"], "config.num_attention_heads 36 cannot be shared evenly by --tp-size 8",
    ),
    "group": ({"num_attention_heads": 34, "num_key_value_heads": 1}, [], "a KV head has 34 query heads, more than 16"),
    "bias": ({"attention_bias": True}, [], "config.attention_bias is true: the kernel adds no bias but that of Qwen2's q, k and v"),
    "window": (
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 36},
        [],
        "config.use_sliding_window: the kernel attends to the whole context in every layer",
    ),
    "rope": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 64}},
        [],
        "rope type 'longrope' of the model's config is not one of default, linear, dynamic, yarn, llama3",
    ),
    "fp8 checkpoint": (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}},
        [],
        "config.quantization_config has quant_method 'fp8': the kernels read bf16 weights",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_one_unserved_model_field_is_one_line(refusals_amd, model_dir, case):
    fields, arguments, line = MODELS[case]
    assert refusals_amd(["--model-path", model_dir(**fields), *arguments]) == [line]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ([], ["--moe-runner-backend 'auto' with SGLANG_USE_AITER=1 shuffles the experts' weights: give --moe-runner-backend triton"]),
        (["--moe-runner-backend", "triton"], []),
    ],
)
def test_aiter_shuffles_experts(refusals_amd, model_dir, monkeypatch, arguments, lines):
    monkeypatch.setenv("SGLANG_USE_AITER", "1")
    assert refusals_amd(["--model-path", model_dir(**QWEN3_30B_A3B), *arguments]) == lines


def test_aiter_leaves_other_matrices_alone(refusals_amd, model_dir, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_AITER", "1")
    assert refusals_amd(["--model-path", model_dir()]) == []


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("SGLANG_USE_HND_KVCACHE", "1", "SGLANG_USE_HND_KVCACHE True is not False"),
        ("SGLANG_AITER_KV_CACHE_LAYOUT", "vectorized_5d", "SGLANG_AITER_KV_CACHE_LAYOUT 'vectorized_5d' is not 'nhd'"),
        ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING True is not False"),
    ],
)
def test_pinned_environment(refusals_amd, model_dir, monkeypatch, name, value, line):
    monkeypatch.setenv(name, value)
    assert line in refusals_amd(["--model-path", model_dir(), "--page-size", "16"])


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_another_model_has_no_spec(refusals_amd, model_dir, architecture):
    fields = {"architectures": [architecture], "model_type": architecture.removesuffix("ForCausalLM").lower()}
    assert refusals_amd(["--model-path", model_dir(**fields)]) == [f"monokernel backend 'amd' has no spec for ['{architecture}'] on gfx950"]


def test_no_gpu_and_another_gpu(refusals_amd, model_dir):
    assert refusals_amd(["--model-path", model_dir()], isa=None) == ["no GPU is visible"]
    (line,) = refusals_amd(["--model-path", model_dir()], isa="gfx90a")
    assert line == "monokernel backend 'amd' has no spec for ['Qwen3ForCausalLM'] on gfx90a"


def test_every_reason_is_in_one_message(refusals_amd, model_dir):
    arguments = ["--tp", "16", "--dtype", "float16", "--page-size", "7", "--watchdog-timeout", "8"]
    lines = refusals_amd(["--model-path", model_dir(attention_bias=True), *arguments], built=NONE_BUILT)
    expected = [SINGLE[case][1] for case in ("ranks", "fp16", "page size", "watchdog")] + [MODELS["bias"][2]]
    expected += [f"kernels k1/k2 not built for gfx950: {code_objects.HOW_TO_BUILD}"]
    assert sorted(lines) == sorted(expected)


# --- decode graph sizes: SGLang's own function -----------------------------------------------------------------------------
def graph_sizes(resolve_amd, arguments):
    _, cfg = resolve_amd(arguments)
    return list(cfg.cuda_graph_config.decode.bs)


def test_graph_sizes_become_the_widths(resolve_amd, model_dir):
    """SGLang's default sizes up to the most that a server captures, of which the first seven are ours."""
    sizes = graph_sizes(resolve_amd, ["--model-path", model_dir(), "--cuda-graph-max-bs-decode", "24"])
    assert sizes[:7] == [1, 2, 4, 6, 8, 12, 16] and sizes[7:] == [24]


def test_sizes_that_were_given_stay(resolve_amd, model_dir):
    assert graph_sizes(resolve_amd, ["--model-path", model_dir(), "--cuda-graph-bs-decode", "1", "3", "8"]) == [1, 3, 8]


@pytest.mark.parametrize(
    ("tokens", "sizes"), [(1, [1, 2, 4, 6, 8, 12, 16]), (2, [1, 2, 3, 4, 6, 8]), (3, [2, 4]), (4, [1, 2, 3, 4]), (6, [1, 2]), (8, [1, 2]), (16, [1])]
)
def test_verify_graphs_are_whole_requests(tokens, sizes):
    """Oracle: by hand. What is larger than the largest width runs SGLang's forward."""
    from sglang.srt.kernel_plugins.amd.binding import _served_keys, covered_capture_sizes

    widths = QWEN3_SPEC.widths("gfx950")
    covered = covered_capture_sizes(widths=widths, tokens_per_request=tokens, sizes=[1, 2, 4, 8, 16, 32])
    assert covered == sizes + [size for size in (2, 4, 8, 16, 32) if size > sizes[-1]]
    keys = _served_keys(mode="target_verify", widths=widths, tokens=tokens)
    assert sorted(key.batch_size for key in keys) == sizes and {key.rows for key in keys} <= set(widths)


# --- what the specs state -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", [QWEN3_SPEC, QWEN3_MOE_SPEC], ids=lambda spec: spec.name)
def test_what_the_specs_state(spec):
    assert set(spec.devices) == {"gfx942", "gfx950"}
    for isa, units in (("gfx942", 304), ("gfx950", 256)):
        limits = spec.devices[isa]
        assert (limits.widths, limits.tp_sizes, limits.resident_blocks) == ((1, 2, 4, 6, 8, 12, 16), (1, 2, 4, 8), units)
    assert spec.features == {Feature.SPECULATIVE_DECODING} and spec.load_tensor is None
    assert all(0 < bound < 0.2 for name, bound in spec.numerics.bounds.items() if name != "k2.wrong_choices.max_abs")
    is_moe = spec is QWEN3_MOE_SPEC
    of_routing = {"k2.router_logits.rel", "k2.routing_gap.rel", "k2.wrong_choices.max_abs"}
    assert set(spec.numerics.bounds) == (set(FIGURES) if is_moe else set(FIGURES) - of_routing)


def test_names_that_the_specs_require_exist():
    """SGLang reads them with getattr: a name it lacks would be an AttributeError at every start."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    fields = {field.name for field in record_fields(ServerArgs)}
    for spec in (QWEN3_SPEC, QWEN3_MOE_SPEC):
        assert set(spec.requires.server_args) <= fields and all(hasattr(envs, name) for name in spec.requires.env)
    assert hasattr(envs, "SGLANG_USE_AITER") and {"enable_nvidia_megakernel", "tp_size", "moe_runner_backend"} <= fields
