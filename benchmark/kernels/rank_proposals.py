"""The proposals of a DSpark draft on real ranks, without a server: what `proposals` and `killed-proposals` of ranks_check run on each rank.

A rank has its part of the LM head at DeepSeek-V4.1's sizes, and draft_sampler as a server's factory makes it (runtime/draft_sampler.py), over
workspaces that the ranks share. Beside it, on the same GPU, *one rank alone* has the whole head. Both make their sums in one order, so what they
compute must have the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import time
import types
from collections.abc import Callable

import torch

from benchmark.common.ranks import Place
from benchmark.kernels.draft_sampler import EPS, GAMMA, HIDDEN, KEY, Tensors
from sgl_lowlatency.bench import stats, timing
from sgl_lowlatency.build.device_limits import device_limits
from sgl_lowlatency.build.draft import draft_ranks
from sgl_lowlatency.kernels.draft_sampler import DraftWeights
from sgl_lowlatency.kernels.fault import describe_draft_fault
from sgl_lowlatency.runtime.draft_sampler import DraftParts, DraftProposal
from sgl_lowlatency.runtime.sglang_state import TensorParallel

VOCAB = 129280
SMALL_HIDDEN, SMALL_COLUMNS = 64, 260  # of emulation; columns of a rank
BATCHES = (1, 2, 4)  # requests
MIXES = {  # step temperatures, 0: greedy; the first of each is timed
    1: ((0.8,), (0.0,)), 2: ((0.0, 1.3), (0.6, 0.9)), 4: ((0.0, 0.8, 0.0, 1.3), (0.7, 0.0, 0.0, 0.0)),
}  # fmt: skip
SLOTS = 50  # proposals of a graph of random blocks
TIMED = {"cuda": 10, "cpu": 1}  # proposals of a graph that is timed
CHECKS = 20  # times that the blocks are looked at
MEETING_S = 60.0
DIGEST_FACTOR = 6364136223846793005  # odd, so that no token is forgotten


def tensors_of(place: Place) -> Tensors:
    """The whole head and Markov weights, the same on every rank."""
    if place.device.type == "cpu":
        return Tensors(SMALL_COLUMNS * place.num_ranks, place.device, SMALL_HIDDEN)
    return Tensors(VOCAB, place.device, HIDDEN)


def bits(values: torch.Tensor) -> torch.Tensor:
    """int16 or int32 of the same shape: NaN and both zeros are compared too."""
    return values.contiguous().view({2: torch.int16, 4: torch.int32}[values.element_size()])


class Proposer:
    """draft_sampler of up to BATCHES[-1] requests. place: a rank's among several, None: one rank with the whole vocabulary. Raises RuntimeError
    where the kernel does not serve them."""

    def __init__(self, tensors: Tensors, place: Place | None, deadline_s: float) -> None:
        os.environ["SGL_LOWLATENCY_SELF_CHECK"] = "0"  # it compares with a model of SGLang, and there is none
        self.device, most = tensors.head.device, BATCHES[-1]
        where = TensorParallel(0, 1, None) if place is None else TensorParallel(place.rank, place.num_ranks, place.group)
        count = tensors.vocab // where.num_ranks
        self.columns = [slice(rank * count, (rank + 1) * count) for rank in range(where.num_ranks)]
        own = self.columns[where.rank]
        parts = DraftParts(DraftWeights(tensors.w1, tensors.norm, EPS), own.start, tensors.head[own], tensors.w2[own], torch.float32, False)
        self.tokens = torch.full((most * GAMMA,), -7, device=self.device)
        self.offset = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.step_logits = torch.zeros(most, GAMMA, tensors.vocab, device=self.device)
        self.temperatures = torch.zeros(most, device=self.device)
        proposal = DraftProposal(
            None, deadline_s, device_limits(self.device).grid, lambda _: [], lambda _: parts, lambda _gamma, requests: requests,
            draft_ranks("a draft without a server", where, self.device, MEETING_S),
        )  # fmt: skip
        launch_of = proposal.draft_sampler(
            gamma=GAMMA, max_bs=most, greedy_draft=False, noise=types.SimpleNamespace(key=KEY, offset=self.offset), draft_tokens=self.tokens,
            step_logits=self.step_logits, step_temperatures=self.temperatures,
        )  # fmt: skip
        self._launches, self.sampler = {batch: launch_of(batch) for batch in BATCHES}, proposal.sampler
        if None in self._launches.values():
            raise RuntimeError(f"draft_sampler does not serve {most} requests of a vocabulary of {tensors.vocab}")

    def propose(self, batch: int, hidden: torch.Tensor, anchors: torch.Tensor) -> None:
        """hidden: bf16 [batch * GAMMA or more, hidden]. anchors: int64 [batch or more]."""
        self._launches[batch](hidden[: batch * GAMMA], anchors[:batch])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fault(self) -> str | None:
        """The record of a launch that ended itself, in words."""
        record = self.sampler.fault()
        return None if record is None else describe_draft_fault(record)

    def acknowledge_fault(self) -> None:
        self.sampler.acknowledge_fault()


class Endless(Proposer):
    """A rank of `killed-proposals`: the same two requests again and again."""

    def __init__(self, place: Place, deadline_s: float) -> None:
        self._tensors = tensors_of(place)
        super().__init__(self._tensors, place, deadline_s)
        self.temperatures[1] = 0.8

    def launch(self) -> None:
        self.propose(2, self._tensors.hidden, self._tensors.anchors)


class Checked:
    """A rank's proposals beside those of one rank alone on the same inputs."""

    def __init__(self, place: Place, deadline_s: float) -> None:
        self.place, self.tensors = place, tensors_of(place)
        self.ranks, self.alone = Proposer(self.tensors, place, deadline_s), Proposer(self.tensors, None, deadline_s)
        self.launched = 0

    def order_problems(self) -> list[str]:
        """Where a rank and one alone would add in other orders, and bits could not be compared."""
        orders = [[(p.k_panel, p.tiles_at_once) for p in one.sampler._params.values()] for one in (self.ranks, self.alone)]
        return [] if orders[0] == orders[1] else [f"sums are made in other orders: {orders[0]}, alone {orders[1]}"]

    def propose(self, batch: int, mix: tuple[float, ...]) -> list[str]:
        """One proposal of all ranks and one of a rank alone: what is wrong with it here."""
        for one in (self.ranks, self.alone):
            one.step_logits.fill_(float("nan"))
            one.tokens.fill_(-7)
            one.temperatures[:batch] = torch.tensor(mix)
        self.alone.offset.copy_(self.ranks.offset)
        self.place.barrier()  # the others store here from now on
        for one in (self.ranks, self.alone):
            one.propose(batch, self.tensors.hidden, self.tensors.anchors)
        self.launched += 1
        self.place.barrier()
        return self.problems(batch, self.alone.tokens, self.ranks.tokens)

    def problems(self, batch: int, wanted: torch.Tensor, tokens: torch.Tensor) -> list[str]:
        """Of the newest proposal, of `batch` requests, when all ranks have ended it. wanted, tokens: int64, of one rank alone and of this one."""
        ranks, alone, found = self.ranks, self.alone, []
        different = bits(ranks.sampler.base_logits(batch)) != bits(alone.sampler.base_logits(batch)[..., ranks.columns[self.place.rank]])
        if count := int(different.sum()):
            found.append(f"base logits differ in {count} of {different.numel()}")
        different = bits(ranks.step_logits[:batch]) != bits(alone.step_logits[:batch])
        for rank, columns in enumerate(ranks.columns):
            if count := int(different[..., columns].sum()):
                found.append(f"rank {rank}'s columns of the step logits differ in {count} of {different[..., columns].numel()}")
        if not torch.equal(wanted, tokens):
            found.append(f"tokens differ in {int((wanted != tokens).sum())} of {wanted.numel()}")
        samples = ranks.temperatures[:batch] != 0
        if bool(ranks.step_logits[:batch][samples].isnan().any()):
            found.append("step logits are not written in full")
        if not bool(ranks.step_logits[:batch][~samples].isnan().all()):
            found.append("step logits of greedy requests are written")
        used = tokens[tokens != -7]
        if int(((used < 0) | (used >= self.tensors.vocab)).sum()):
            found.append("tokens are not all in the vocabulary")
        if ranks.offset.item() != self.launched or alone.offset.item() != self.launched:
            found.append(f"the noise offset is {ranks.offset.item()}, alone {alone.offset.item()}, after {self.launched} proposals")
        digest = hashlib.sha256()
        for values in (bits(ranks.step_logits[:batch]), tokens, ranks.offset):
            digest.update(values.cpu().numpy().tobytes())
        return [*found, *self.of_ranks("step logits, tokens or noise offset", digest.hexdigest())]

    def of_ranks(self, what: str, digest: str) -> list[str]:
        """Where it is not every rank's. All ranks call it, and go on together: nobody stores to one that still compares."""
        digests = self.place.gather(digest)
        return [] if len(set(digests)) == 1 else [f"ranks {[r for r, one in enumerate(digests) if one != digests[0]]} have other {what} than rank 0"]

    def run_blocks(self, count: int) -> tuple[dict, list[str]]:
        """(figures, problems): `count` proposals or a few more, back to back, of random requests, hidden states, anchors and temperatures."""
        place, ranks, alone, device, vocab = self.place, self.ranks, self.alone, self.place.device, self.tensors.vocab
        slots = random.Random(0).choices(BATCHES, k=min(SLOTS, count))
        generator = torch.Generator(device=device).manual_seed(1)
        hidden = torch.empty(len(slots), BATCHES[-1] * GAMMA, self.tensors.head.shape[1], dtype=torch.bfloat16, device=device)
        anchors = torch.empty(len(slots), BATCHES[-1], dtype=torch.int64, device=device)
        at, tokens = torch.empty(BATCHES[-1], device=device), torch.full((len(slots), BATCHES[-1] * GAMMA), -7, device=device)
        wanted, digest = tokens.clone(), torch.zeros_like(tokens)

        def blocks(one: Proposer, kept: torch.Tensor) -> Callable[[], None]:
            def run() -> None:
                for slot, batch in enumerate(slots):
                    one.propose(batch, hidden[slot], anchors[slot])
                    kept[slot, : batch * GAMMA].copy_(one.tokens[: batch * GAMMA])

            return run

        replay, check, found = self._repeated(blocks(ranks, tokens)), blocks(alone, wanted), []
        replays, compared, last, began = -(-count // len(slots)), 0, slots[-1], time.monotonic()
        for index in range(replays):
            hidden.normal_(generator=generator)
            anchors.random_(0, vocab, generator=generator)
            at.uniform_(generator=generator)
            ranks.temperatures.copy_(torch.where(at < 0.4, 0.0, 2 * at))
            is_looked_at = index % max(replays // CHECKS, 1) == 0 or index + 1 == replays
            if is_looked_at:
                ranks.step_logits.fill_(float("nan"))
                place.barrier()
            replay()
            self.launched += len(slots)
            digest.mul_(DIGEST_FACTOR).add_(tokens)
            if is_looked_at:
                alone.temperatures.copy_(ranks.temperatures)
                alone.offset.fill_(self.launched - len(slots))
                alone.step_logits.fill_(float("nan"))
                check()
                place.barrier()
                found += self.problems(last, wanted, tokens)
                found += self.of_ranks("tokens of all blocks", hashlib.sha256(digest.cpu().numpy().tobytes()).hexdigest())
                compared += len(slots)
                if any(place.gather(bool(found))):
                    found = found and [f"after {(index + 1) * len(slots)} blocks: {what}" for what in found]
                    break
        figures = {"proposals": (index + 1) * len(slots), "seconds": round(time.monotonic() - began, 2), "compared_with_one_rank": compared}
        return figures, found

    def times(self, groups: int, group_ms: float) -> dict[str, dict[str, list[float]]]:
        """us a proposal of every repeat, the slower rank's, by requests: `us` of the ranks, `one_rank_us` of one rank alone."""
        arms = {}
        for batch in BATCHES:
            for name, one in (("us", self.ranks), ("one_rank_us", self.alone)):
                one.temperatures[:batch] = torch.tensor(MIXES[batch][0])
                arms[name, batch] = self._timed(one, batch, groups, group_ms)
        return {name: {str(batch): arms[name, batch] for batch in BATCHES} for name in ("us", "one_rank_us")}

    def _timed(self, one: Proposer, batch: int, groups: int, group_ms: float) -> list[float]:
        timed = TIMED[self.place.device.type]

        def run() -> None:
            for _ in range(timed):
                one.propose(batch, self.tensors.hidden, self.tensors.anchors)

        replay, own = self._repeated(run), []
        self.place.barrier()
        count = self.place.gather(max(int(group_ms / self._group_ms(replay, 2)), 2))[0]  # as many launches on every rank
        for _ in range(groups):
            self.place.barrier()
            own.append(1e3 * self._group_ms(replay, count) / timed)
        return [round(max(of_ranks), 3) for of_ranks in zip(*self.place.gather(own), strict=True)]

    def _repeated(self, run: Callable[[], None]) -> Callable[[], None]:
        return timing.capture(run).replay if self.place.device.type == "cuda" else run

    def _group_ms(self, replay: Callable[[], None], count: int) -> float:
        replay()  # the ranks are together behind it
        if self.place.device.type == "cuda":
            return timing.group_ms(replay, count)
        began = time.perf_counter()
        for _ in range(count):
            replay()
        return 1e3 * (time.perf_counter() - began) / count


def run_proposals(place: Place, args: argparse.Namespace) -> dict:
    """The row of `proposals`, the same on every rank but where a launch ended itself: that rank's own record."""
    checked, row = Checked(place, args.kernel_deadline), {"case": "proposals", "tp": place.num_ranks}
    row |= {"hidden": checked.tensors.head.shape[1], "vocab": checked.tensors.vocab, "gamma": GAMMA}
    try:
        with torch.no_grad():
            found = checked.order_problems()
            for batch in BATCHES:
                for mix in MIXES[batch]:
                    found += [f"{batch} requests at {list(mix)}: {what}" for what in checked.propose(batch, mix)]
            if not any(place.gather(found)):
                figures, found = checked.run_blocks(args.proposals)
                row |= figures
            if not any(place.gather(found)):
                row |= checked.times(args.groups, args.group_ms)
                row |= {"median_us": {name: {batch: stats.median(us) for batch, us in row[name].items()} for name in ("us", "one_rank_us")}}
            return row | {"problems": [f"rank {rank}: {what}" for rank, of_rank in enumerate(place.gather(found)) for what in of_rank]}
    except RuntimeError as error:
        record = checked.ranks.fault() or checked.alone.fault()
        return row | {"problems": [f"rank {place.rank}: {record or error}"]}
