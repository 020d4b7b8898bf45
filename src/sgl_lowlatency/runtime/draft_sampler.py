"""What SGLang installs on a DSpark draft: no step of its forward, and draft_sampler for its proposals."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sgl_lowlatency import config
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.draft_sampler import DraftSampler, DraftShard, DraftWeights, shared_step_logits
from sgl_lowlatency.kernels.fault import describe_draft_fault
from sgl_lowlatency.kernels.symmetric_workspace import MappedWorkspaces
from sgl_lowlatency.runtime.fault_watch import FaultWatch
from sgl_lowlatency.runtime.self_check_draft import DraftCheck

logger = logging.getLogger(__name__)

# (hidden_states [batch * gamma, hidden] bf16, anchor_tokens int64 [batch]) -> (tokens int64 [batch, gamma], confidence features)
DraftLaunch = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class DraftParts:
    """What the kernel reads of a draft, in place. first_token: the rank's first id of the vocabulary. head: its rows, and maybe padding. markov_w2:
    its rows. step_dtype: of step logits. has_fused_greedy: as DraftSampler's."""

    weights: DraftWeights
    first_token: int
    head: torch.Tensor
    markov_w2: torch.Tensor
    step_dtype: torch.dtype
    has_fused_greedy: bool


@dataclasses.dataclass(frozen=True)
class DraftRanks:
    """A rank's place among several. exchange: sends JSON values to all ranks and returns theirs, in rank order. meet: (what the kernel is built for,
    by name) -> the workspaces of all ranks. All ranks call either together."""

    rank: int
    num_ranks: int
    exchange: Callable[[Mapping[str, Any]], list[dict]]
    meet: Callable[..., MappedWorkspaces]


class KeptForward:
    """What a spec of no width builds: the model keeps SGLang's forward in every step."""

    widths: tuple[int, ...] = ()
    draft_sampler: Any = None

    def summary(self) -> str:
        """What was built, for SGLang's startup line."""
        return "a model that keeps SGLang's forward in every step"

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """None: no step is ours."""

    def forward(self, step: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Not reached: `plan` names no step. Runs the model's own forward."""
        return original(*args, **kwargs)


class DraftProposal(KeptForward):
    """What the spec of a DSpark draft builds. grid: blocks of a launch. reasons_of: why the draft, with its LM head attached, keeps SGLang's
    proposal. parts_of: what the kernel reads of it. most_of: (gamma, max_batch) -> requests of the largest launch, 0 for none. ranks: of a draft that
    several share, None: there is one. emulation: of a model on the CPU."""

    def __init__(
        self,
        model: torch.nn.Module,
        deadline_s: float,
        grid: int,
        reasons_of: Callable[[Any], list[str]],
        parts_of: Callable[[Any], DraftParts],
        most_of: Callable[[int, int], int],
        ranks: DraftRanks | None = None,
        emulation: EmulationOptions | None = None,
    ):
        self._model, self._deadline_s, self._grid, self._emulation = model, deadline_s, grid, emulation
        self._reasons_of, self._parts_of, self._most_of, self._ranks = reasons_of, parts_of, most_of, ranks
        self.sampler: DraftSampler | None = None

    def summary(self) -> str:
        """What was built, for SGLang's startup line."""
        return "draft_sampler for the draft's proposals"

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
        know keeps at every size, with the reasons in the log; of several ranks on all of them.

        SGLang calls it once, when the LM head is attached and before any graph is captured. Memory is allocated here, and the kernel checked
        against SGLang's own functions: raises RuntimeError with figures when it misses, on every rank alike, and DisagreementError where ranks differ
        or one does not come.
        """
        most, reasons = self._agree(*self._largest(gamma, max_bs))
        if reasons:
            logger.info("sgl-lowlatency: the draft keeps SGLang's proposal:\n  - %s", "\n  - ".join(reasons))
            return lambda bs: None
        self.sampler = sampler = self._make(gamma, most, noise, draft_tokens, step_logits)
        if sampler.device.type == "cuda":  # before the check, whose launches may miss another rank
            FaultWatch(sampler.fault, sampler.acknowledge_fault, describe=describe_draft_fault).start()
        if config.get().self_check:
            start_s = time.monotonic()
            exchange = None if self._ranks is None else self._ranks.exchange
            DraftCheck(sampler, self._model, noise, draft_tokens, step_logits, step_temperatures, exchange).run()
            logger.info("sgl-lowlatency: draft_sampler self-check: proposals of 1 to %d requests, %.2f s: passed", most, time.monotonic() - start_s)
        if sampler.device.type == "cuda":
            torch.cuda.empty_cache()  # of the check: what graphs capture next has pools of its own
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

    def _largest(self, gamma: int, max_bs: int) -> tuple[int, list[str]]:
        """Requests of the largest launch, and why there is none, of this rank."""
        reasons, most = self._reasons_of(self._model), self._most_of(gamma, max_bs)
        if not most:
            reasons.append(f"gamma {gamma} is beyond the kernel's")
        elif not reasons:
            parts = self._parts_of(self._model)
            vocab, hidden = parts.markov_w2.shape[0], parts.head.shape[1]
            most = DraftSampler.most_that_fit(most, gamma, hidden, vocab, self._grid)
            if not most:
                reasons.append(f"a vocabulary of {vocab} on {self._grid} blocks does not fit into shared memory")
        return most, reasons

    def _agree(self, most: int, reasons: list[str]) -> tuple[int, list[str]]:
        """The same of all ranks: a rank that proposed alone would wait for the others."""
        if self._ranks is None:
            return most, reasons
        found = self._ranks.exchange({"most": most, "reasons": reasons})
        by_rank = (f"rank {rank}: {reason}" for rank, one in enumerate(found) for reason in one["reasons"])
        return min(one["most"] for one in found), list(by_rank)

    def _make(self, gamma: int, most: int, noise: Any, draft_tokens: torch.Tensor, step_logits: torch.Tensor | None) -> DraftSampler:
        parts, mapped = self._parts_of(self._model), None
        if self._ranks is not None:
            mapped = self._meet(parts, gamma, most, noise.key, step_logits)
        logits = None if step_logits is None else step_logits[:most]
        shard = DraftShard(parts.first_token, parts.head, parts.markov_w2, draft_tokens[: most * gamma], noise.offset, logits)
        return DraftSampler(
            parts.weights, [shard], gamma, most, parts.head.device, self._grid, self._deadline_s, parts.step_dtype, noise.key,
            has_fused_greedy=parts.has_fused_greedy, emulation=self._emulation, ranks=mapped,
        )  # fmt: skip

    def _meet(self, parts: DraftParts, gamma: int, most: int, noise_key: int, step_logits: torch.Tensor | None) -> MappedWorkspaces:
        """The ranks' workspaces. SGLang's step logits move into this rank's: the other ranks store theirs there, and nothing is copied behind a
        launch."""
        mapped = self._ranks.meet(
            vocab=parts.weights.markov_w1.shape[0], hidden=parts.head.shape[1], gamma=gamma, max_batch=most, grid=self._grid,
            step_dtype=str(parts.step_dtype).removeprefix("torch."), has_norm=parts.weights.norm is not None, rms_eps=parts.weights.rms_eps,
            has_fused_greedy=parts.has_fused_greedy, noise_key=noise_key,
            step_logits_bytes=0 if step_logits is None else step_logits.numel() * step_logits.element_size(),
        )  # fmt: skip
        if step_logits is not None:
            with torch.inference_mode():  # which made the tensor, maybe
                step_logits.set_(shared_step_logits(mapped, step_logits))
        return mapped
