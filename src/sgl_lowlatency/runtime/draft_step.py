"""What SGLang installs on a draft model whose architecture has a spec: nothing of ours. On NVIDIA its forwards are counted; on AMD, where SGLang
hands over only the steps that it routes here, they are not.

SGLang applies the target's spec to the draft of STANDALONE decoding when both are of one architecture. A draft's decode steps
have lengths of their own (seq_lens + step + 1) and its extend steps several ragged tokens a request: decode_step runs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_lowlatency import config
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.coverage import DRAFT_MODEL, Coverage


class DraftStep:
    """widths: what SGLang asked for, since it refuses a model without any; `plan` serves none of them."""

    draft_sampler = None

    def __init__(self, widths: tuple[int, ...]):
        self.widths = widths
        self.coverage = Coverage(dict, of=" (draft model)")
        self.coverage.start_reporting(config.get().log_coverage_s, sglang_state.metrics_enabled())

    def summary(self) -> str:
        """What was built, for SGLang's startup line."""
        return "a draft model, which keeps SGLang's forward in every step"

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """None, counted, for every step."""
        if not sglang_state.capturing_graphs():
            self.coverage.count_fallback(DRAFT_MODEL)

    def forward(self, step: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Not reached: `plan` names no step. Runs the model's own forward."""
        return original(*args, **kwargs)


class AmdDraftStep:
    """The same on AMD, where SGLang routes by key: none of a draft's steps has one of the target's verify steps. model: with its own `forward`."""

    def __init__(self, model: Any):
        self._original = model.forward

    def forward(self, plan: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own forward."""
        return self._original(*args, **kwargs)
