"""What SGLang installs on a dense DSpark draft: no step of its forward, and draft_sampler for its proposals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from sgl_lowlatency import config
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.draft_sampler import DraftSampler, DraftShard, DraftWeights
from sgl_lowlatency.kernels.fault import describe_draft_fault
from sgl_lowlatency.runtime.fault_watch import FaultWatch
from sgl_lowlatency.runtime.self_check_draft import DraftCheck

logger = logging.getLogger(__name__)

# (hidden_states [batch * gamma, hidden] bf16, anchor_tokens int64 [batch]) -> (tokens int64 [batch, gamma], confidence features)
DraftLaunch = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class DraftProposal:
    """What the spec of dense DSpark drafts builds. grid: blocks of a launch. reasons_of: why the draft, with its LM head attached, keeps SGLang's
    proposal. most_of: (gamma, max_batch) -> requests of the largest launch, 0 for none. emulation: of a model on the CPU."""

    widths: tuple[int, ...] = ()

    def __init__(
        self,
        model: torch.nn.Module,
        deadline_s: float,
        grid: int,
        reasons_of: Callable[[Any], list[str]],
        most_of: Callable[[int, int], int],
        emulation: EmulationOptions | None = None,
    ):
        self._model, self._deadline_s, self._grid, self._emulation = model, deadline_s, grid, emulation
        self._reasons_of, self._most_of = reasons_of, most_of
        self.sampler: DraftSampler | None = None

    def summary(self) -> str:
        """What was built, for SGLang's startup line."""
        return "draft_sampler for the draft's proposals"

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """None: the draft's layers keep SGLang's forward."""

    def forward(self, step: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Not reached: `plan` names no step. Runs the model's own forward."""
        return original(*args, **kwargs)

    def draft_sampler(
        self,
        *,
        gamma: int,
        max_bs: int,
        greedy_draft: bool,
        noise: Any,
        draft_tokens: torch.Tensor,
        step_logits: torch.Tensor | None,
        step_temperatures: torch.Tensor,
    ) -> Callable[[int], DraftLaunch | None]:
        """SGLang's factory: bs -> the launch of that many requests, or None for SGLang's own proposal, which a draft that the kernel does not
        know keeps at every size, with the reasons in the log.

        SGLang calls it once, when the LM head is attached and before any graph is captured. Memory is allocated here, and the kernel checked
        against SGLang's own functions: raises RuntimeError with figures when it misses.
        """
        reasons, most = self._reasons_of(self._model), self._most_of(gamma, max_bs)
        if not most:
            reasons.append(f"gamma {gamma} is beyond the kernel's")
        elif not reasons:
            vocab, hidden = self._model.markov_head.vocab_size, self._model.lm_head.weight.shape[1]
            most = DraftSampler.most_that_fit(most, gamma, hidden, vocab, self._grid)
            if not most:
                reasons.append(f"a vocabulary of {vocab} on {self._grid} blocks does not fit into shared memory")
        if reasons:
            logger.info("sgl-lowlatency: the draft keeps SGLang's proposal:\n  - %s", "\n  - ".join(reasons))
            return lambda bs: None
        self.sampler = sampler = self._make(gamma, most, noise, draft_tokens, step_logits)
        if config.get().self_check:
            start_s = time.monotonic()
            DraftCheck(sampler, self._model, noise, draft_tokens, step_logits, step_temperatures).run()
            logger.info("sgl-lowlatency: draft_sampler self-check: proposals of 1 to %d requests, %.2f s: passed", most, time.monotonic() - start_s)
        if sampler.device.type == "cuda":
            torch.cuda.empty_cache()  # of the check: what graphs capture next has pools of its own
            FaultWatch(sampler.fault, sampler.acknowledge_fault, describe=describe_draft_fault).start()
        logger.info(
            "sgl-lowlatency: draft_sampler makes the proposals of 1 to %d requests, %d tokens each; %.1f MiB", most, gamma, sampler.extra_bytes / 2**20
        )

        def launch(bs: int) -> DraftLaunch:
            def step(hidden_states: torch.Tensor, anchor_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                stream = torch.cuda.current_stream().cuda_stream if sampler.device.type == "cuda" else 0
                sampler.launch(bs, hidden_states, anchor_tokens, step_temperatures, stream)
                return draft_tokens[: bs * gamma].view(bs, gamma), hidden_states

            return step

        return lambda bs: launch(bs) if 1 <= bs <= most else None

    def _make(self, gamma: int, most: int, noise: Any, draft_tokens: torch.Tensor, step_logits: torch.Tensor | None) -> DraftSampler:
        markov, head = self._model.markov_head, self._model.lm_head.weight.data
        shard = DraftShard(
            0, head, markov.markov_w2.weight.data, draft_tokens[: most * gamma], noise.offset, None if step_logits is None else step_logits[:most]
        )
        return DraftSampler(
            DraftWeights(markov.markov_w1.weight.data), [shard], gamma, most, head.device, self._grid, self._deadline_s,
            markov.step_logits_dtype(torch.bfloat16), noise.key, has_fused_greedy=markov.greedy_w2_weight() is not None, emulation=self._emulation,
        )  # fmt: skip
