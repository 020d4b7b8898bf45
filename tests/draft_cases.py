"""Logits for which the rules of a draft's choice matter."""

import torch

TEMPERATURES = (0.0, 1e-5, 1e-3, 0.1, 0.6, 1.0, 2.0)


def random_values(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """bf16 [rows, vocab] in steps of 1/8, few of them: most rows have several maxima."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 2).round().div(8).bfloat16()


def temperatures(rows: int) -> torch.Tensor:
    """float32 [rows]: all of TEMPERATURES in turn."""
    return torch.tensor([TEMPERATURES[row % len(TEMPERATURES)] for row in range(rows)])


def hard_values(vocab: int) -> tuple[list[str], torch.Tensor]:
    """(names, bf16 [rows, vocab]): ties, both zeros, infinities, NaN, in places that the tiles of a kernel have apart."""
    last, middle = vocab - 1, vocab // 2
    inf, nan = float("inf"), float("nan")
    rows: list[tuple[str, torch.Tensor]] = []

    def add(name: str, fill: float = -1.0, **at: float) -> None:
        row = torch.full((vocab,), fill)
        for place, value in at.items():
            row[{"first": 0, "second": 1, "middle": middle, "last": last}[place]] = value
        rows.append((name, row))

    add("all equal", 0.5)
    add("maxima first and last", first=3.0, last=3.0)
    add("maxima middle and last", middle=3.0, last=3.0)
    add("last alone", last=0.25)
    add("zeros of both signs", second=-0.0, last=0.0)
    add("negative zero last", middle=0.0, last=-0.0)
    add("+inf twice", middle=inf, last=inf)
    add("+inf and NaN", first=inf, middle=nan)
    add("NaN last", last=nan)
    add("NaN twice", middle=nan, last=nan)
    add("all NaN", nan)
    add("all -inf", -inf)
    add("-inf but one", -inf, last=-3.0)
    add("-inf and NaN", -inf, middle=nan)
    add("largest finite", middle=3.38e38, last=3.38e38)
    add("subnormal", 0.0, last=1e-40)
    return [name for name, _ in rows], torch.stack([row for _, row in rows]).bfloat16()


def split(vocab: int, num_ranks: int) -> list[tuple[int, int]]:
    """(first token id, number) of each rank, as SGLang pads a vocabulary: to a multiple of 64, then in equal parts."""
    part = -(-vocab // 64) * 64 // num_ranks
    return [(begin, min(part, vocab - begin)) for begin in range(0, part * num_ranks, part)]


class Draft:
    """A draft with weights, virtual ranks and outputs, and its sampler. exact: Markov weights of few bits, so that every order of adding gives
    the same bias. norm: with a final norm. greedy: keeps no step logits. ranks: of all, those that run. head: [vocab, hidden], or a random one.
    biased: with Markov weights, not zeros. fused_greedy: as SGLang's dense drafts. long_walks: as DraftSampler's."""

    def __init__(self, hidden, vocab, gamma, max_batch, num_ranks=1, blocks_per_rank=3, norm=True, step_dtype=torch.float32, greedy=False,
                 exact=True, seed=0, device="cpu", deadline_s=0.5, key=0x1234567890ABCDEF, emulation=None, ranks=None,
                 head=None, biased=True, fused_greedy=False, long_walks=True):  # fmt: skip
        from sgl_lowlatency.kernels.draft_sampler import MARKOV_RANK, DraftPeer, DraftSampler, DraftShard, DraftWeights

        self.device = torch.device(device)
        generator = torch.Generator(self.device).manual_seed(seed)

        def random(*shape):
            values = torch.randn(*shape, generator=generator, device=self.device)
            return (values.mul(4).round().clamp(-8, 8).div(16) if exact else values).bfloat16().cpu()

        self.gamma, self.hidden, self.vocab, self.key, self.greedy, self.step_dtype = gamma, hidden, vocab, key, greedy, step_dtype
        self.fused_greedy = fused_greedy
        self.w1, self.w2 = random(vocab, MARKOV_RANK), random(vocab, MARKOV_RANK)
        if not biased:
            self.w1.zero_()
        if head is None:
            head = (torch.randn(vocab, hidden, generator=generator, device=self.device) * 3 * hidden**-0.5).bfloat16()
        self.head = head.to(self.device)
        self.norm = (1 + 0.2 * torch.randn(hidden, generator=generator, device=self.device)).bfloat16() if norm else None
        self.eps = 1e-6
        self.max_batch, self.num_ranks = max_batch, num_ranks
        parts = split(vocab, num_ranks)
        kept = range(num_ranks) if ranks is None else ranks
        rows = parts[0][1] if num_ranks > 1 else -(-vocab // 64) * 64
        self.shards = []
        for begin, count in (parts[rank] for rank in kept):
            head = torch.full((rows, hidden), float("nan"), dtype=torch.bfloat16, device=self.device)  # padding must not be read into anything
            head[:count] = self.head[begin : begin + count]
            logits = None if greedy else torch.full((max_batch, gamma, vocab), -777.0, dtype=step_dtype, device=self.device)
            w2 = self.w2[begin : begin + count].clone().to(self.device)
            tokens, offset = torch.full((max_batch * gamma,), -7, device=self.device), torch.tensor([5], device=self.device)
            self.shards.append(DraftShard(begin, head, w2, tokens, offset, logits))
        self._absent = {rank: torch.full((1 << 20,), 0xFF, dtype=torch.uint8, device=self.device) for rank in range(num_ranks) if rank not in kept}
        weights = DraftWeights(self.w1.to(self.device), self.norm, self.eps)
        self.sampler = DraftSampler(
            weights, self.shards, gamma, max_batch, self.device, blocks_per_rank, deadline_s, step_dtype, key, kept[0],
            {rank: DraftPeer(memory.data_ptr(), 0 if greedy else memory.data_ptr()) for rank, memory in self._absent.items()},
            fused_greedy, emulation, has_long_walks=long_walks,
        )  # fmt: skip

    def inputs(self, batch: int, seed: int = 0):
        """(hidden_states, anchor_tokens, step_temperatures) on the CPU."""
        generator = torch.Generator().manual_seed(1000 + seed)
        hidden = torch.randn(batch * self.gamma, self.hidden, generator=generator).bfloat16()
        anchors = torch.randint(0, self.vocab, (batch,), generator=generator)
        return hidden, anchors, temperatures(self.max_batch + 3)[3 : 3 + batch].clone()

    def run(self, batch: int, inputs, stream: int = 0):
        """Launches; what the launch before wrote is poisoned. Returns problems() of the launch."""
        offset = self.shards[0].noise_offset.item()
        for shard in self.shards:
            shard.draft_tokens.fill_(-7)
            if shard.step_logits is not None:
                shard.step_logits.fill_(-777)
        self.sampler.launch(batch, *(tensor.to(self.device) for tensor in inputs), stream=stream)
        return self.problems(batch, inputs, offset)

    def base_logits(self, batch: int) -> torch.Tensor:
        """bf16 [batch, gamma, vocab] of the kernel, all ranks' together, on the CPU."""
        return torch.cat([self.sampler.base_logits(batch, i).cpu() for i in range(len(self.shards))], -1)

    def base_figure(self, batch: int, inputs):
        """The kernel's base logits through the numerics gate, against SGLang's layers in bf16: the norm in fp32, rounded, then a bf16 product."""
        from sgl_lowlatency.reference import draft_sampler as oracle
        from sgl_lowlatency.reference import gate

        hidden = x = inputs[0].to(self.device)
        if self.norm is not None:
            wide = x.float()
            x = (wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + self.eps) * self.norm.float()).bfloat16()
        standard = torch.matmul(x, self.head.T).cpu()
        wanted = torch.cat([oracle.base_logits(hidden, self.norm, self.eps, part).cpu() for part in self.head.split(16384)], -1)
        return gate.figure("base_logits", self.base_logits(batch).flatten(0, 1), standard, wanted)

    def proposal(self, base: torch.Tensor, inputs, offset: int):
        """The oracle's, behind the given base logits."""
        from sgl_lowlatency.reference import draft_sampler as oracle

        _, anchors, at = inputs
        at = torch.zeros_like(at) if self.greedy else at
        is_fused = self.fused_greedy and self.greedy and len(at) == 1
        step_dtype = torch.float32 if is_fused else self.step_dtype
        return oracle.propose(base, anchors, self.w1, self.w2, at, self.key, offset, step_dtype, rounds_bias=not is_fused)

    def problems(self, batch: int, inputs, offset: int) -> list[str]:
        """What every rank has of the newest launch against the oracle behind the kernel's own base logits."""
        proposal, found = self.proposal(self.base_logits(batch), inputs, offset), []
        for rank, shard in enumerate(self.shards):
            tokens = shard.draft_tokens.cpu()[: batch * self.gamma].view(batch, self.gamma)
            if not torch.equal(tokens, proposal.tokens):
                found.append(f"tokens of rank {rank}: {tokens.tolist()} are not {proposal.tokens.tolist()}")
            if bool((shard.draft_tokens.cpu()[batch * self.gamma :] != -7).any()):
                found.append(f"rank {rank} wrote tokens of requests beyond the batch")
            if not self.greedy:
                found += self._logit_problems(rank, shard.step_logits.cpu(), proposal.step_logits, inputs[2])
            wanted = offset + (0 if self.greedy else 1)
            if shard.noise_offset.item() != wanted:
                found.append(f"noise offset of rank {rank}: {shard.noise_offset.item()} is not {wanted}")
        return found

    def _logit_problems(self, rank, logits, wanted, at) -> list[str]:
        samples = at != 0
        found = []
        if not torch.equal(logits[: len(at)][samples].nan_to_num(9e9), wanted[samples].nan_to_num(9e9)):
            found.append(f"step logits of rank {rank} differ")
        if bool((logits[: len(at)][~samples] != -777).any()) or bool((logits[len(at) :] != -777).any()):
            found.append(f"rank {rank} wrote step logits of requests that do not sample")
        return found
