"""SGLang's entry points (group sglang.srt.plugins). They run in every SGLang process: paths only, no torch.

The imports are inside the functions so that loading the entry point costs nothing when its flag is not in use.
"""

from __future__ import annotations

# HF architecture -> the "module:attribute" of its spec, imported by SGLang once the flag asks for it.
NVIDIA_SPECS = {
    "LlamaForCausalLM": "sgl_lowlatency.specs.nvidia.dense:LLAMA_SPEC",
    "Qwen2ForCausalLM": "sgl_lowlatency.specs.nvidia.dense:QWEN2_SPEC",
    "Qwen3ForCausalLM": "sgl_lowlatency.specs.nvidia.dense:QWEN3_SPEC",
    "Qwen3MoeForCausalLM": "sgl_lowlatency.specs.nvidia.qwen3_moe:QWEN3_MOE_SPEC",
}
# The same of draft models, which SGLang looks up when it loads the draft of a served target, and of a target of which nothing but its draft is
# served.
NVIDIA_DRAFT_SPECS = {
    "DeepseekV4ForCausalLM": "sgl_lowlatency.specs.nvidia.deepseek_v4_dspark:DEEPSEEK_V4_TARGET_SPEC",
    "DeepseekV4ForCausalLMDSpark": "sgl_lowlatency.specs.nvidia.deepseek_v4_dspark:DEEPSEEK_V4_DSPARK_SPEC",
    "DSparkDraftModel": "sgl_lowlatency.specs.nvidia.dspark:DSPARK_DRAFT_SPEC",
    "Qwen3DSparkModel": "sgl_lowlatency.specs.nvidia.dspark:DSPARK_DRAFT_SPEC",
}
# In the place of DeepSeek-V4's there, unless SGL_LOWLATENCY_DEEPSEEK_SLICES is "none": the target's own steps.
DEEPSEEK_V4_STEP_SPEC = "sgl_lowlatency.specs.nvidia.deepseek_v4:DEEPSEEK_V4_SPEC"
AMD_SPECS = {
    "Qwen3ForCausalLM": "sgl_lowlatency.specs.amd.qwen3:QWEN3_SPEC",
    "Qwen3MoeForCausalLM": "sgl_lowlatency.specs.amd.qwen3_moe:QWEN3_MOE_SPEC",
}


def register_nvidia() -> None:
    """Entry point `nvidia_megakernel`: register the NVIDIA specs.

    With SGL_LOWLATENCY_EMULATE=1 it also makes a host without a GPU look like one to SGLang's checks.
    Raises ValueError on a bad SGL_LOWLATENCY_* variable, with the specs registered: SGLang logs it as "Failed to execute
    general plugin", far above the refusal, and the specs' own check names it again there.
    """
    from sglang.kernels.plugin_kernels.nvidia.spec import register

    for architecture, path in nvidia_specs().items():
        register(architecture=architecture, path=path)
    _emulate_on_request()


def nvidia_specs() -> dict[str, str]:
    """HF architecture -> "module:attribute", as this process's environment has it. A bad variable of it changes nothing: the specs name it."""
    from sgl_lowlatency import config

    specs = NVIDIA_SPECS | NVIDIA_DRAFT_SPECS
    try:
        wants_step = bool(config.get().deepseek_slices)
    except ValueError:
        wants_step = True  # the default
    return specs | {"DeepseekV4ForCausalLM": DEEPSEEK_V4_STEP_SPEC} if wants_step else specs


def register_amd() -> None:
    """Entry point `amd_monokernel`: register the AMD specs, for --enable-amd-monokernel and its old name --monokernel-backend amd.

    Host emulation and bad variables as in register_nvidia.
    """
    from sglang.kernels.plugin_kernels.amd.spec import BACKEND, register

    for architecture, path in AMD_SPECS.items():
        register(backend=BACKEND, architecture=architecture, path=path)
    _emulate_on_request()


def _emulate_on_request() -> None:
    from sgl_lowlatency import config

    if config.get().emulate:
        from sgl_lowlatency.runtime import emulated_device

        emulated_device.install()
