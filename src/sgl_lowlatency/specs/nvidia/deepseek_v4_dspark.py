"""DeepSeek-V4.1 on NVIDIA with draft_sampler: its DSPARK draft's proposals, and a target that keeps SGLang's forward in every step.

SGLang asks for a draft's spec only where the target has one. The target's covers no width and touches nothing; without proposals to make the flag
would be of no use, so a server that is known to have none before weights load is refused: another algorithm, no decode graphs, in which alone SGLang
asks for proposals, DeepSeek-V4's draft. What only the loaded draft tells (guard/draft.py: its head, splits of the vocabulary) keeps SGLang's proposal.
TP 1, 2, 4 and 8. The target has this spec with SGL_LOWLATENCY_DEEPSEEK_SLICES=none alone, else another one (deepseek_v4.py), and its draft this one.
"""

from __future__ import annotations

from typing import Any

from sglang.kernels.plugin_kernels.nvidia.spec import (
    MEGAKERNEL_API_VERSION,
    BuildContext,
    Feature,
    MegakernelSpec,
    Numerics,
    NumericsKind,
    Requirements,
)

from sgl_lowlatency import config
from sgl_lowlatency.build.draft import deepseek_v4_parts
from sgl_lowlatency.guard.config import device_reasons, server_argument_reasons
from sgl_lowlatency.guard.device import installation_reasons
from sgl_lowlatency.guard.draft import ENVIRONMENT, SERVER_ARGUMENTS, deepseek_v4_config_reasons, deepseek_v4_reasons
from sgl_lowlatency.guard.parallel import SPLITS, TP_SIZES
from sgl_lowlatency.runtime.draft_sampler import KeptForward
from sgl_lowlatency.specs.nvidia.dspark import ISAS, SWITCH, draft_spec

DEEPSEEK_V4_DSPARK_SPEC = draft_spec("DeepSeek-V4.1's DSpark draft", deepseek_v4_reasons, deepseek_v4_parts)


def _config_disable_reasons(cfg: Any, hf_config: Any) -> list[str]:
    from sglang.srt.kernel_plugins.nvidia.binding import device_isa

    try:
        settings = config.get()
    except ValueError as error:
        return [str(error)]
    reasons = [] if settings.draft_sampler else [f"{SWITCH}, and SGL_LOWLATENCY_DEEPSEEK_SLICES is none: nothing would be ours"]
    if cfg.speculative_algorithm != "DSPARK":
        other = "whose proposals are all that there is of DeepSeek-V4 with SGL_LOWLATENCY_DEEPSEEK_SLICES=none"
        reasons.append(f"speculative_algorithm {cfg.speculative_algorithm!r} is not 'DSPARK', {other}")
    reasons += deepseek_v4_config_reasons(hf_config) + server_argument_reasons(cfg, SERVER_ARGUMENTS)
    if cfg.tp_size > 1:
        reasons += server_argument_reasons(cfg, SPLITS)
    reasons += device_reasons(cfg, settings.emulate)
    return reasons + installation_reasons(device_isa(), emulate=settings.emulate)


def _build(model: Any, hf_config: Any, context: BuildContext) -> KeptForward:
    return KeptForward()


DEEPSEEK_V4_TARGET_SPEC = MegakernelSpec(
    name="sgl_lowlatency (DeepSeek-V4.1, its draft's proposals alone)",
    requires=Requirements(isas=ISAS, tp_sizes=frozenset(TP_SIZES), decode_graph_backends=frozenset({"full"}), env=ENVIRONMENT),
    features=frozenset({Feature.SPECULATIVE_DECODING}),
    numerics=Numerics(NumericsKind.BITWISE),
    max_rows=0,
    build=_build,
    api_version=MEGAKERNEL_API_VERSION,
    config_disable_reasons=_config_disable_reasons,
)
