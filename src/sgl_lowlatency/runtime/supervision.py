"""What a step object does beside its launches, whichever vendor's contract it serves: it decides who runs a step, checks a number of rows before
it serves, counts, and watches for faults."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sgl_lowlatency import config
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.agreed_fallback import AgreedFallback
from sgl_lowlatency.runtime.coverage import DECODE, VERIFY, Coverage
from sgl_lowlatency.runtime.fallback import fallback_reason, hooked_module
from sgl_lowlatency.runtime.fault_watch import FaultWatch
from sgl_lowlatency.runtime.self_check import SelfCheck
from sgl_lowlatency.runtime.sglang_state import KvState

logger = logging.getLogger(__name__)


class Supervision:
    """Of the steps of one model by one kernel.

    kernel: its name in messages, as that of coverage and self-check. launcher: has its `executed`, `fault` and `acknowledge_fault`. describe: puts a
    fault record in words. widths: rows it serves, ascending. tokens_per_request: 1 in a server of plain decode; in a speculative one the tokens that a
    verify step has a request. replaced: named modules that a step of the kernel does not call. self_check: None, without one. exchange: of several
    ranks that share the model: sends JSON values to all and returns theirs, in rank order; None: there is one. Every rank decides alike: the batch is
    the scheduler's, which is the same on all, and what a rank finds in its own model they tell each other before the first step of each number of
    rows.
    """

    def __init__(
        self,
        *,
        kernel: str,
        launcher: Any,
        describe: Callable[[Any], str],
        widths: Sequence[int],
        tokens_per_request: int,
        replaced: Sequence[tuple[str, torch.nn.Module]],
        self_check: SelfCheck | None,
        exchange: Callable[[Mapping[str, Any]], list[dict]] | None,
    ):
        self._kernel, self._widths, self._tokens_per_request = kernel, tuple(widths), tokens_per_request
        self._replaced, self._self_check, self._exchange = list(replaced), self_check, exchange
        self.checked: set[int] = set()  # numbers of rows that may serve
        self._fallback = AgreedFallback(exchange, kernel)
        if self_check is None:
            logger.warning("SGL_LOWLATENCY_SELF_CHECK=0: %s serves without being compared to SGLang's forward", kernel)
        self.coverage = Coverage(launcher.executed, DECODE if tokens_per_request == 1 else VERIFY, kernel=kernel)
        self.coverage.start_reporting(config.get().log_coverage_s, sglang_state.metrics_enabled())
        FaultWatch(launcher.fault, launcher.acknowledge_fault, describe=describe).start()

    def batch_reason(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> str | None:
        """Why this batch, a forward's arguments without its positions, is not the kernel's on any rank; None: it is. Reads host state only."""
        return fallback_reason(self._widths, self._tokens_per_request, input_ids, forward_batch, *args, **kwargs)

    def model_reason(self, rows: int, own: str | None) -> str | None:
        """Why no rank runs this step of `rows` rows: what one of them found in its model. own: what this one did, beside hooks."""
        hooked = hooked_module(self._replaced) if own is None else None
        return self._fallback.reason(rows, own if hooked is None else f"a forward hook on {hooked}")

    def count_fallback(self, reason: str) -> None:
        """A step that SGLang's forward runs. Not counted while graphs are captured: a warm-up run serves nobody."""
        if not sglang_state.capturing_graphs():
            self.coverage.count_fallback(reason)

    def before_launch(self, rows: int) -> None:
        """A step of `rows` rows is about to be launched. A warm-up run is not counted; a captured launch is, when its graph is replayed."""
        if sglang_state.capturing_graphs() and not torch.cuda.is_current_stream_capturing():
            self.coverage.discount(rows, 1)

    def check(
        self, rows: int, original: Callable[..., Any], ours: Callable[..., Any], forward_batch: Any, kv: KvState, *, backs_only_padding: bool = False
    ) -> None:
        """The self-check of `rows` rows, once, before they serve. See SelfCheck.run. backs_only_padding: of the KV pool.

        Raises RuntimeError when it fails on any rank, or cannot run now: the server must not serve. Raises what `exchange` does, naming a rank
        that does not come.
        """
        if rows in self.checked:
            return
        if self._self_check is not None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{self._kernel}: {rows} rows are being captured before their self-check ran")
            if backs_only_padding:
                raise RuntimeError(
                    f"{self._kernel}: the self-check needs KV memory, which SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1 provides "
                    "only after the decode graphs are captured; unset it"
                )
            with self.coverage.uncounted(rows):
                report = self._self_check.run(original, ours, forward_batch, kv)
            logger.info("%s self-check: %s", self._kernel, report)
            if failed := list(self._verdicts(f"{report}" if report.misses else None)):
                raise RuntimeError(f"{self._kernel} self-check failed, the server is refused: {'; '.join(failed)}")
        self.checked.add(rows)

    def _verdicts(self, failed: str | None) -> Iterator[str]:
        """What failed, of every rank: they refuse together."""
        if self._exchange is None:
            yield from [] if failed is None else [failed]
            return
        for rank, one in enumerate(self._exchange({"failed": failed})):
            if one["failed"] is not None:
                yield f"rank {rank}: {one['failed']}"
