"""draft_sampler on the GPU: against the oracle, against SGLang's own functions on the same logits, against itself over replays; lost ranks."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from draft_cases import Draft, hard_values, random_values, temperatures

SHAPES = [  # hidden, vocab, gamma, max_batch, ranks, blocks a rank
    (5120, 32320, 5, 4, 4, 33),  # DeepSeek-V4.1, a shard of TP4
    (5120, 129280, 5, 2, 1, 132),
    (4096, 151936, 7, 3, 2, 66),  # Qwen3-8B
    (1024, 1026, 5, 16, 8, 4),  # 80 rows
    (192, 2304, 5, 3, 1, 2),  # units that do not stay in shared memory
    (64, 70, 4, 3, 1, 6),  # more blocks than units
]


def run(draft, batch, inputs):
    return draft.run(batch, inputs, torch.cuda.current_stream().cuda_stream)


@pytest.mark.parametrize(("hidden", "vocab", "gamma", "max_batch", "ranks", "blocks"), SHAPES)
def test_base_logits_tokens_and_step_logits(hidden, vocab, gamma, max_batch, ranks, blocks):
    """Against the oracle. Its noise comes from the CPU's logarithms: keys may differ in their last bits, which these inputs do not notice."""
    draft = Draft(hidden, vocab, gamma, max_batch, num_ranks=ranks, blocks_per_rank=blocks, device="cuda")
    for batch in {1, (max_batch + 1) // 2, max_batch}:
        inputs = draft.inputs(batch, batch)
        assert run(draft, batch, inputs) == [], batch
        figure = draft.base_figure(batch, inputs)
        assert figure.passed, f"{batch}: {figure}"


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("batch", range(1, 17))
def test_every_batch(batch, greedy):
    draft = Draft(576, 1000, 5, 16, num_ranks=2, blocks_per_rank=7, norm=batch % 2 == 0, device="cuda", greedy=greedy,
                  step_dtype=torch.bfloat16 if batch % 3 == 0 else torch.float32)  # fmt: skip
    for seed in range(3):
        assert run(draft, batch, draft.inputs(batch, seed)) == []


@pytest.mark.parametrize(("batch", "at_once"), [(2, 4), (4, 4), (6, 2), (8, 2)])
def test_walks_through_panels_of_k(batch, at_once):
    """One walk for at_once tiles of a pair, or for each: of a block's 60 or 62 tiles the last walk has fewer. Where sums are made alike, bits are."""
    bases = []
    for long_walks in (True, False):
        draft = Draft(5120, 129280, 5, batch, blocks_per_rank=132, device="cuda", long_walks=long_walks)
        assert draft.sampler._params[batch].tiles_at_once == (at_once if long_walks else 1)
        inputs = draft.inputs(batch)
        assert run(draft, batch, inputs) == []
        figure = draft.base_figure(batch, inputs)
        assert figure.passed, figure
        bases.append(draft.base_logits(batch))
    assert torch.equal(*bases) or at_once == 4


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 0.7])
def test_ties_infinities_and_nan(temperature):
    names, values = hard_values(330)
    wrong = []
    for name, row in zip(names, values, strict=True):
        head = torch.zeros(330, 64, dtype=torch.bfloat16)
        head[:, 0] = row
        draft = Draft(64, 330, 2, 2, num_ranks=2, blocks_per_rank=2, norm=False, head=head, biased=False, device="cuda")
        hidden, anchors, at = draft.inputs(2)
        hidden.zero_()
        hidden[:, 0] = 1.0
        wrong += [f"{name}: {problem}" for problem in run(draft, 2, (hidden, anchors, at.fill_(temperature)))]
    assert wrong == []


class SGLangBlock:
    """draft_markov_block of SGLang on one GPU, with its dense or DeepSeek's head on the draft's weights, behind given base logits."""

    def __init__(self, draft, batch):
        from sglang.srt.models.deepseek_v4_dspark import DSparkV4MarkovHead
        from sglang.srt.models.dspark import VanillaMarkov
        from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise

        self.draft, self.batch = draft, batch
        with torch.device("meta"):
            if draft.step_dtype == torch.float32:
                self.head = DSparkV4MarkovHead(vocab_size=draft.vocab, markov_rank=256, is_dsv41=True)
            else:
                self.head = VanillaMarkov(vocab_size=draft.vocab, markov_rank=256)
        self.head.markov_w1 = torch.nn.Embedding.from_pretrained(draft.w1.cuda())
        self.head.markov_w2.weight = torch.nn.Parameter(draft.w2.cuda(), requires_grad=False)
        self.noise = DraftNoise(key=draft.key, offset=torch.tensor([5], device="cuda"))
        self.logits = torch.empty(batch, draft.gamma, draft.vocab, dtype=draft.step_dtype, device="cuda")

    def __call__(self, base, anchors, at):
        from sglang.srt.speculative.dspark_components.dspark_draft import draft_markov_block

        tokens, _ = draft_markov_block(
            markov_head=self.head, base_logits=base, anchor_tokens=anchors, draft_hidden=None, step_temperatures=at, noise=self.noise,
            tp_sync=types.SimpleNamespace(sync=lambda site, tokens: tokens), logits_out=None if self.draft.greedy else self.logits,
            greedy_draft=self.draft.greedy,
        )  # fmt: skip
        return tokens


@pytest.fixture
def exact_products():
    """Products that torch splits along K are added in fp32, so that weights of few bits give one bias."""
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize(
    ("vocab", "launches", "ranks", "step_dtype", "greedy"),
    [
        (1000, 700, 4, torch.float32, False), (1026, 700, 1, torch.bfloat16, False), (1000, 200, 8, torch.float32, True),
        (129280, 24, 4, torch.float32, False),
    ],
)  # fmt: skip
def test_a_hundred_thousand_selections_are_sglangs_bit_by_bit(exact_products, vocab, launches, ranks, step_dtype, greedy):
    """Tokens on every rank and step logits, against the Triton kernels that SGLang runs, on base logits made of whole rows: a hidden state picks a
    column of the head. 64 selections a launch: 45,000, 45,000, 13,000 and 1,500. Temperatures 0 to 2; most rows have several maxima."""
    pytest.importorskip("sglang")
    batch, gamma = 16, 4
    draft = Draft(64, vocab, gamma, batch, num_ranks=ranks, blocks_per_rank=128 // ranks if vocab > 10000 else 3, norm=False, device="cuda",
                  step_dtype=step_dtype, greedy=greedy)  # fmt: skip
    with torch.no_grad():
        block = SGLangBlock(draft, batch)
        hidden, at = torch.eye(64, device="cuda").bfloat16(), torch.zeros(batch, device="cuda")
        differing = torch.zeros(3, dtype=torch.int64, device="cuda")
        for launch in range(launches):
            values = random_values(64, vocab, launch).cuda()
            for shard in draft.shards:
                count = shard.markov_w2.shape[0]
                shard.head[:count].copy_(values[:, shard.vocab_begin : shard.vocab_begin + count].T)
            at.copy_(temperatures(batch).roll(launch))
            anchors = torch.randint(0, vocab, (batch,), device="cuda")
            draft.sampler.launch(batch, hidden, anchors, at, torch.cuda.current_stream().cuda_stream)
            base = torch.cat([draft.sampler.base_logits(batch, i) for i in range(ranks)], -1)
            tokens = block(base, anchors, at).flatten()
            differing[0] += (base.flatten(0, 1) != values).sum()
            for shard in draft.shards:
                differing[1] += (shard.draft_tokens != tokens).sum()
                if not greedy:
                    samples = (at != 0)[:, None, None]
                    differing[2] += ((shard.step_logits != block.logits) & samples).sum()
        assert differing.tolist() == [0, 0, 0]
        assert draft.shards[-1].noise_offset.item() == block.noise.offset.item() == 5 + (0 if greedy else launches)


def test_samples_are_distributed_as_the_step_logits():
    """Chi-square of 16,000 first tokens of one distribution, fixed seeds: below the 99.9 % point of 63 degrees of freedom."""
    vocab, batch, launches, temperature = 64, 16, 1000, 0.8
    head = torch.zeros(vocab, 64, dtype=torch.bfloat16)
    head[:, 0] = torch.linspace(-2, 2, vocab).bfloat16()
    draft = Draft(64, vocab, 1, batch, norm=False, head=head, biased=False, device="cuda")
    hidden, anchors, at = (tensor.cuda() for tensor in draft.inputs(batch))
    hidden.zero_()
    hidden[:, 0] = 1.0
    at.fill_(temperature)
    counts = torch.zeros(vocab, device="cuda")
    for _ in range(launches):
        draft.sampler.launch(batch, hidden, anchors, at, torch.cuda.current_stream().cuda_stream)
        counts += torch.bincount(draft.shards[0].draft_tokens, minlength=vocab)
    logits = draft.shards[0].step_logits
    assert torch.equal(logits, head[:, 0].float().cuda().expand_as(logits))
    expected = torch.softmax(logits[0, 0].double() / temperature, 0).float() * batch * launches
    assert float(((counts - expected) ** 2 / expected).sum()) < 103.4


@pytest.mark.parametrize("greedy", [False, True])
def test_replays_give_the_bits_of_eager_launches(greedy):
    """Two drafts of the same weights, one captured, one eager; inputs and noise move on in both."""
    drafts = [Draft(1024, 4000, 5, 4, num_ranks=4, blocks_per_rank=16, device="cuda", greedy=greedy) for _ in range(2)]
    static = [tensor.cuda() for tensor in drafts[0].inputs(4)]

    def launch(draft):
        draft.sampler.launch(4, *static, stream=torch.cuda.current_stream().cuda_stream)

    launch(drafts[0])
    launch(drafts[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(drafts[0])
    for repeat in range(30):
        for to, new in zip(static, drafts[0].inputs(4, repeat), strict=True):
            to.copy_(new)
        graph.replay()
        launch(drafts[1])
        for replayed, eager in zip(drafts[0].shards, drafts[1].shards, strict=True):
            assert torch.equal(replayed.draft_tokens, eager.draft_tokens), repeat
            assert torch.equal(replayed.noise_offset, eager.noise_offset), repeat
            assert greedy or torch.equal(replayed.step_logits, eager.step_logits), repeat
        assert torch.equal(drafts[0].base_logits(4), drafts[1].base_logits(4))


def test_launches_back_to_back_beside_other_work():
    """No host in between, and copies on another stream that slow blocks down unevenly: the last launch is right, on every rank."""
    draft = Draft(1024, 4000, 5, 4, num_ranks=4, blocks_per_rank=16, device="cuda")
    inputs = draft.inputs(4)
    static, other = [tensor.cuda() for tensor in inputs], torch.empty(2, 64 * 2**20, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            for _ in range(8):
                other[0].copy_(other[1], non_blocking=True)
        for _ in range(50):
            draft.sampler.launch(4, *static, stream=torch.cuda.current_stream().cuda_stream)
    assert draft.shards[0].noise_offset.item() == 5 + 1000
    assert run(draft, 4, inputs) == []


def end_of(how):
    result = subprocess.run([sys.executable, Path(__file__).with_name("faulty_draft.py"), how], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "trapped after " in result.stdout, result.stdout
    return result.stdout


def test_a_dead_rank_is_named_within_the_deadline():
    text = end_of("dead")
    waited, whom = r"draft_sampler stopped: rank [0-2], SM \d+, block \d+ waited 0\.5\d s", r"block \d of rank 3"
    assert (found := re.search(rf"record after (\d\.\d+) s\n.*{waited} for {whom} to answer in step 0 for request [01]\n", text)), text
    assert 0.5 <= float(found[1]) < 1.0, text


def test_a_bad_anchor_is_named():
    text = end_of("anchor")
    assert re.search(r"draft_sampler stopped: rank \d, SM \d+, block \d+: request 1 has anchor token 4000, outside 0\.\.3999", text), text
