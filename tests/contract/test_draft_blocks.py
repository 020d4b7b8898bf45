"""Random blocks of draft_sampler against SGLang's own: tokens, step logits and noise offsets bit by bit behind the kernel's base logits.

Oracle: draft_markov_block with SGLang's DeepSeek head (fp32 step logits) and its dense one (bf16), temperatures as resolve_draft_params makes them of
requests. In emulation, where a GPU is on it. Base logits are of few values and many, with ties, equal and duplicate maxima, infinities, NaN,
subnormal and largest finite values; temperatures 0 (top-k 1), 1e-5 to 2; any number of requests. A row of markov_w1 has one column, so that no order
of adding matters and the bias needs rounding; seven in eight biases are 0, so that ties stay.

`--draft-blocks 100000` runs as many; by default 1500 do, and 2 that have DeepSeek's vocabulary of 129280.
"""

import dataclasses
import types

import pytest
import torch

pytest.importorskip("sglang")
from draft_cases import Draft  # noqa: E402
from sglang.kernels.ops.speculative.dspark import markov_sample  # noqa: E402
from sglang.srt.models.deepseek_v4_dspark import DSparkV4MarkovHead  # noqa: E402
from sglang.srt.models.dspark import VanillaMarkov  # noqa: E402
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_markov_block, resolve_draft_params  # noqa: E402

from sgl_lowlatency import _C  # noqa: E402
from sgl_lowlatency.kernels.decode_step import EmulationOptions  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, GAMMA, MAX_BATCH = 64, 5, 16
LARGE_VOCAB, LARGE_SHARE = 129280, 1000  # beside so many blocks there is one of it
HUGE = 3.0e38  # twice as much is infinite
TIE_TO_HIGHER_ID, NOISE_OF_NEXT_ROW, STALE_NOISE, UNROUNDED_BIAS = 15, 28, 27, 31  # dialect::Planted


class TorchWithHostLogarithms:
    """torch for SGLang's sampling step on the CPU, with the logarithms that the host dialect has. Its own differ in the last bit of some."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def _of(x, plus_one):
        x = x.contiguous()
        y = torch.empty_like(x)
        _C.host_logarithms(x.data_ptr(), y.data_ptr(), x.numel(), plus_one)
        return y

    def log(self, x):
        return self._of(x, False)

    def log1p(self, x):
        return self._of(x, True)


@pytest.fixture(autouse=True)
def host_logarithms(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(markov_sample, "torch", TorchWithHostLogarithms())


def head_columns(vocab: int, generator: torch.Generator) -> torch.Tensor:
    """bf16 [vocab, HIDDEN]: a column is what a row of base logits is made of."""
    uniform = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    levels = torch.randint(1, 9, (HIDDEN,), generator=generator)
    columns = (torch.randn(vocab, HIDDEN, generator=generator) * levels).round() / 8  # few values: most rows tie
    columns[:, 24:40] = torch.randn(vocab, 16, generator=generator) * 3
    some = lambda count: torch.randint(0, vocab, (count,), generator=generator)  # noqa: E731
    for column in range(36, 48):  # duplicate maxima
        columns[some(1 + column % 4), column] = columns[:, column].amax() + (column % 2) / 4
    columns[:, 48:50] = -HUGE  # all but a few are -inf
    for column in (48, 49):
        columns[some(3), column] = uniform(3)
    for pair in range(5):  # +inf in one, -inf in the other, NaN where both are
        places = some(4)
        columns[places[:3], 50 + pair] = HUGE
        columns[places[1:], 55 + pair] = -HUGE
    columns[:, 60] = uniform(1)  # all equal
    columns[:, 61] = 0.0
    columns[some(3), 61] = torch.tensor([1e-40, -1e-40, -0.0])
    columns[:, 62] = -1.0
    columns[some(2), 62] = 1.69e38  # the largest finite values, twice
    columns[:, 63] = HUGE * torch.randint(-1, 2, (vocab,), generator=generator)  # a third each: +inf, -inf, 0
    return columns.bfloat16()


def hidden_states(rows: int, generator: torch.Generator) -> torch.Tensor:
    """bf16 [rows, HIDDEN]: a column each; of those that overflow twice as much, of some a pair."""
    hidden = torch.zeros(rows, HIDDEN)
    picked = torch.randint(0, HIDDEN, (rows,), generator=generator)
    hidden[torch.arange(rows), picked] = torch.where(picked < 48, 1.0, 2.0)
    is_pair = (picked >= 50) & (picked < 55)
    hidden[is_pair.nonzero().flatten(), picked[is_pair] + 5] = 2.0
    return hidden.bfloat16()


def sampling(batch: int, generator: torch.Generator) -> torch.Tensor:
    """float32 [batch]: the step temperatures of requests, a third of top-k 1."""
    temperatures = 10.0 ** (torch.rand(batch, 1, generator=generator) * 5.31 - 5.0)
    top_ks = torch.where(torch.rand(batch, generator=generator) < 1 / 3, 1, 50)
    temperatures[torch.rand(batch, generator=generator) < 0.1] = 0.0  # below what SGLang samples at
    asked = types.SimpleNamespace(temperatures=temperatures, top_ks=top_ks)
    return resolve_draft_params(sampling_info=asked, bs=batch, device="cpu").step_temperatures


@dataclasses.dataclass
class Case:
    """A draft, and SGLang's Markov head on its weights."""

    vocab: int
    num_ranks: int
    blocks: int
    dense: bool = False
    greedy: bool = False
    max_batch: int = MAX_BATCH
    planted: int = 0

    def __post_init__(self):
        self.draft = Draft(
            HIDDEN, self.vocab, GAMMA, self.max_batch, num_ranks=self.num_ranks, blocks_per_rank=self.blocks, norm=False, greedy=self.greedy,
            step_dtype=torch.bfloat16 if self.dense else torch.float32, seed=self.vocab, device=DEVICE, key=0x1234567890ABCDEF + self.vocab,
            emulation=EmulationOptions(planted=self.planted),
        )  # fmt: skip
        generator = torch.Generator().manual_seed(self.vocab)
        w1, tokens = torch.zeros(self.vocab, 256), torch.arange(self.vocab)
        w1[tokens, tokens * 37 % 256] = torch.randn(self.vocab, generator=generator)
        w2 = torch.randn(self.vocab, 256, generator=generator) * (torch.rand(self.vocab, 256, generator=generator) < 1 / 8)
        w1, w2 = w1.bfloat16().to(DEVICE), w2.bfloat16().to(DEVICE)
        self.draft.sampler._weights.markov_w1.copy_(w1)
        for shard in self.draft.shards:
            shard.markov_w2.copy_(w2[shard.vocab_begin : shard.vocab_begin + shard.markov_w2.shape[0]])
        with torch.device("meta"):
            self.head = VanillaMarkov(vocab_size=self.vocab, markov_rank=256) if self.dense else DSparkV4MarkovHead(
                vocab_size=self.vocab, markov_rank=256, is_dsv41=True
            )  # fmt: skip
        self.head.markov_w1 = torch.nn.Embedding.from_pretrained(w1)
        self.head.markov_w2.weight = torch.nn.Parameter(w2, requires_grad=False)

    def launch(self, number: int) -> tuple[int, list[str], dict[str, int]]:
        """(blocks, what differs, how many choices of each kind there were)."""
        draft, generator = self.draft, torch.Generator().manual_seed(number)
        columns = head_columns(self.vocab, generator)
        for shard in draft.shards:
            count = shard.markov_w2.shape[0]
            shard.head[:count] = columns[shard.vocab_begin : shard.vocab_begin + count].to(DEVICE)
        least = 2 if self.dense and self.greedy else 1  # a greedy one of a dense head alone has a kernel of its own in SGLang
        batch = self.max_batch if number % 3 else int(torch.randint(least, self.max_batch + 1, (), generator=generator))
        hidden, at = hidden_states(batch * GAMMA, generator).to(DEVICE), sampling(batch, generator).to(DEVICE)
        anchors = torch.randint(0, self.vocab, (batch,), generator=generator).to(DEVICE)
        offset = (0, 1, 2**32 - 1, 2**32, 2**40 + 7, int(torch.randint(0, 2**60, (), generator=generator)))[number % 6]
        for shard in draft.shards:
            shard.noise_offset.fill_(offset)
            shard.draft_tokens.fill_(-7)
        stream = torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else 0
        draft.sampler.launch(batch, hidden, anchors, at, stream)
        base = torch.cat([draft.sampler.base_logits(batch, rank) for rank in range(self.num_ranks)], -1)
        noise = DraftNoise(key=draft.key, offset=torch.tensor([offset], device=DEVICE))
        logits = None if self.greedy else torch.zeros(batch, GAMMA, self.vocab, dtype=draft.step_dtype, device=DEVICE)
        with torch.no_grad():
            tokens, _ = draft_markov_block(
                markov_head=self.head, base_logits=base, anchor_tokens=anchors, draft_hidden=None, step_temperatures=at, noise=noise,
                tp_sync=types.SimpleNamespace(sync=lambda site, tokens: tokens), logits_out=logits, greedy_draft=self.greedy,
            )  # fmt: skip
        return batch, list(self._differences(number, batch, tokens, logits, at, noise)), self._kinds(base, at)

    def _differences(self, number, batch, tokens, logits, at, noise):
        for rank, shard in enumerate(self.draft.shards):
            ours = shard.draft_tokens[: batch * GAMMA].view(batch, GAMMA)
            for request in (ours != tokens).any(1).nonzero().flatten().tolist():
                what = f"request {request} at {float(at[request]):.3g}: {ours[request].tolist()} are not {tokens[request].tolist()}"
                yield f"{self.vocab} tokens, launch {number}, rank {rank}, {what}"
            if shard.noise_offset.item() != noise.offset.item():
                yield f"launch {number}: noise offset of rank {rank}: {shard.noise_offset.item()} is not {noise.offset.item()}"
            if logits is not None:
                samples = at != 0
                wrong = ~((shard.step_logits[:batch] == logits) | (shard.step_logits[:batch].isnan() & logits.isnan()))
                if bool(wrong[samples].any()):
                    yield f"launch {number}: step logits of rank {rank} differ"

    def _kinds(self, base, at):
        largest = base.amax(-1, keepdim=True)
        return {
            "greedy": int((at == 0).sum()), "tied": int(((base == largest).sum(-1) > 1).sum()), "NaN": int(base.isnan().any(-1).sum()),
            "infinite": int(base.isinf().any(-1).sum()), "coldest": int(((at > 0) & (at < 1e-4)).sum()),
        }  # fmt: skip


# Arguments of Case. 330 ends within a tile of 16 and a unit of 32; 1026 is 2 columns more than 32 units; 96 fills its units.
SMALL = (
    (330, 1, 1), (330, 2, 1, True), (96, 1, 2), (330, 1, 1, False, True), (190, 4, 1), (330, 2, 1, True, True), (1026, 1, 2),
)  # fmt: skip


def run_blocks(cases, blocks, first=0):
    """(blocks run, differences, choices of each kind)."""
    done, found, kinds, number = 0, [], {}, first
    while done < blocks and len(found) < 20:
        batch, differences, of = cases[number % len(cases)].launch(number)
        done, found, number = done + batch, found + differences, number + 1
        kinds = {name: kinds.get(name, 0) + count for name, count in of.items()}
    return done, found, kinds


def test_random_blocks(request):
    blocks = request.config.getoption("--draft-blocks")
    done, found, kinds = run_blocks([Case(*arguments) for arguments in SMALL], blocks)
    assert found == []
    assert done >= blocks and all(count > 20 for count in kinds.values()), kinds


def test_random_blocks_of_the_real_vocabulary(request):
    blocks = max(request.config.getoption("--draft-blocks") // LARGE_SHARE, 2)
    cases = [Case(LARGE_VOCAB, 4, 16, max_batch=2)] + [Case(LARGE_VOCAB, 1, 64, max_batch=2)] * (blocks > 2)
    done, found, _ = run_blocks(cases, blocks, first=1000)
    assert found == []
    assert done >= blocks


@pytest.mark.skipif(DEVICE == "cuda", reason="host emulation alone has planted bugs")
@pytest.mark.parametrize("planted", [TIE_TO_HIGHER_ID, NOISE_OF_NEXT_ROW, STALE_NOISE, UNROUNDED_BIAS])
def test_planted_bugs_are_found(planted):
    assert run_blocks([Case(330, 2, 1, planted=planted)], 64)[1] != []


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draws_are_distributed_as_the_softmax_of_the_step_logits(temperature):
    """Chi-square over 4800 draws of the kernel, a row and an offset each: below the 99.9 % point of its 23 degrees of freedom."""
    vocab, launches = 24, 300
    head = torch.zeros(vocab, HIDDEN, dtype=torch.bfloat16)
    head[:, 0] = torch.linspace(-2, 2, vocab).bfloat16()[torch.randperm(vocab, generator=torch.Generator().manual_seed(1))]
    draft = Draft(HIDDEN, vocab, 1, MAX_BATCH, blocks_per_rank=1, norm=False, head=head, biased=False, device=DEVICE)
    hidden = torch.zeros(MAX_BATCH, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    hidden[:, 0] = 1.0
    anchors, at = torch.zeros(MAX_BATCH, dtype=torch.int64, device=DEVICE), torch.full((MAX_BATCH,), temperature, device=DEVICE)
    counts = torch.zeros(vocab, dtype=torch.int64)
    stream = torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else 0
    for _ in range(launches):
        draft.sampler.launch(MAX_BATCH, hidden, anchors, at, stream)
        counts += torch.bincount(draft.shards[0].draft_tokens.cpu(), minlength=vocab)
    step_logits = draft.shards[0].step_logits.cpu()
    assert torch.equal(step_logits, head[:, 0].cpu().float().expand_as(step_logits))
    expected = torch.softmax(step_logits[0, 0] / temperature, 0) * launches * MAX_BATCH
    assert float(((counts - expected) ** 2 / expected).sum()) < 49.73
    assert float(((counts.flip(0) - expected) ** 2 / expected).sum()) > 49.73, "another distribution would be found"
