"""draft_sampler in emulation: base logits through the numerics gate, and behind them tokens, step logits and noise offsets bit by bit.

Oracle: reference/draft_sampler.py. Markov weights have few bits, so that every order of adding gives the same bias.
"""

import pytest
import torch
from draft_cases import Draft, hard_values, random_values, temperatures

from sgl_lowlatency.kernels.decode_step import EmulationOptions

SHAPES = [  # hidden, vocab, gamma, max_batch, blocks a rank
    (64, 500, 1, 2, 3),
    (128, 1000, 5, 4, 2),
    (576, 1026, 3, 5, 4),  # two stages, the second one short; a vocabulary that ends within a tile
    (640, 70, 4, 3, 6),  # more blocks than units
    (192, 2304, 5, 3, 2),  # units that do not stay in shared memory
    (1088, 450, 5, 16, 2),  # 80 rows, K in panels
    (256, 300, 7, 9, 1),  # a block alone; batches above 8
]


@pytest.mark.parametrize("kind", ["sampled", "sampled bf16", "greedy"])
@pytest.mark.parametrize(("hidden", "vocab", "gamma", "max_batch", "blocks"), SHAPES)
def test_every_batch(hidden, vocab, gamma, max_batch, blocks, kind):
    draft = Draft(hidden, vocab, gamma, max_batch, blocks_per_rank=blocks, norm=kind != "sampled bf16", greedy=kind == "greedy",
                  step_dtype=torch.bfloat16 if kind == "sampled bf16" else torch.float32)  # fmt: skip
    for batch in range(1, max_batch + 1):
        draft.sampler.emulation.seed = batch
        inputs = draft.inputs(batch, batch)
        assert draft.run(batch, inputs) == [], batch
        figure = draft.base_figure(batch, inputs)
        assert figure.passed, f"{batch}: {figure}"


@pytest.mark.parametrize(("batch", "at_once"), [(1, 1), (2, 4), (4, 4), (6, 2)])  # all of K is in one panel up to 7 rows
def test_walks_through_panels_of_k(batch, at_once):
    """A block has 19 tiles, a pair 5 or 4: walks for at_once of each, and the last one for fewer. Where sums are made alike, bits are."""
    bases = []
    for long_walks in (True, False):
        for seed in range(2):
            options = EmulationOptions(seed=seed, starvation=2 * seed, check_order=True)
            draft = Draft(5120, 300, 5, batch, blocks_per_rank=1, long_walks=long_walks, emulation=options)
            params, inputs = draft.sampler._params[batch], draft.inputs(batch)
            assert (params.k_panel < 5120, params.tiles_at_once) == (batch > 1, at_once if long_walks else 1)
            assert draft.run(batch, inputs) == []
            report = draft.sampler.last_report
            assert (report.num_races, [(race.kind, race.region) for race in report.races]) == (0, [])
            bases.append(draft.base_logits(batch))
        figure = draft.base_figure(batch, inputs)
        assert figure.passed, figure
        assert torch.equal(bases[-1], bases[-2])
    assert torch.equal(bases[0], bases[2]) or batch in (2, 4)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("greedy", [False, True])
def test_virtual_ranks_agree_bit_by_bit(num_ranks, greedy):
    """Every rank has all tokens and all step logits. 1000 tokens are padded to 1024: the last of eight ranks has 104 of its 128."""
    draft = Draft(192, 1000, 5, 4, num_ranks=num_ranks, blocks_per_rank=2, greedy=greedy)
    for batch in (4, 1, 3):
        assert draft.run(batch, draft.inputs(batch, num_ranks)) == []
    alone = Draft(192, 1000, 5, 4, blocks_per_rank=3, greedy=greedy)
    for batch in (4, 1, 3):
        assert alone.run(batch, alone.inputs(batch, num_ranks)) == []
    assert torch.equal(alone.base_logits(3), draft.base_logits(3))
    assert all(torch.equal(shard.draft_tokens, alone.shards[0].draft_tokens) for shard in draft.shards)


def test_a_greedy_request_alone_as_sglangs_fused_step():
    """Bias and sum stay fp32: tokens are others than those of rounded sums, and several requests are rounded as ever."""
    differ = 0
    for seed in range(12):
        head = torch.zeros(600, 64, dtype=torch.bfloat16)
        head[:, :10] = 64.0  # from where on bf16 has steps of 1/2
        rounded, fused = (
            Draft(64, 600, 5, 2, step_dtype=torch.bfloat16, greedy=True, norm=False, head=head, fused_greedy=is_fused) for is_fused in (False, True)
        )
        inputs = fused.inputs(2, seed)
        inputs[0].copy_(torch.eye(10, 64))
        alone = (inputs[0][:5].contiguous(), inputs[1][:1], inputs[2][:1])
        assert fused.run(2, inputs) == [] and rounded.run(1, alone) == []
        assert fused.run(1, alone) == []
        differ += not torch.equal(fused.shards[0].draft_tokens, rounded.shards[0].draft_tokens)
    assert differ > 0


def test_anchors_with_a_stride():
    draft = Draft(64, 500, 3, 4)
    hidden, anchors, at = draft.inputs(4)
    wide = torch.full((4, 7), -1)
    wide[:, 0] = anchors
    assert draft.run(4, (hidden, wide[:, 0], at)) == []
    with pytest.raises(ValueError, match=r"anchor_tokens: torch.int64 \(3,\) on cpu is not torch.int64 \(4,\) on cpu"):
        draft.sampler.launch(4, hidden, anchors[:3], at)
    with pytest.raises(ValueError, match="anchor_tokens: stride 0 gives all requests one token"):
        draft.sampler.launch(4, hidden, anchors[:1].expand(4), at)


def test_a_real_vocabulary():
    draft = Draft(64, 129280, 2, 2, num_ranks=2, blocks_per_rank=16)
    assert draft.run(2, draft.inputs(2)) == []


def test_many_launches_of_changing_batches_share_words_and_noise():
    draft = Draft(64, 500, 3, 4, num_ranks=2, blocks_per_rank=2, biased=False)
    seen = set()
    for launch, batch in enumerate((4, 1, 1, 3, 2, 4, 4, 1)):
        hidden, anchors, at = draft.inputs(batch)
        assert draft.run(batch, (hidden, anchors, at.fill_(2.0))) == [], launch
        seen.add(tuple(draft.shards[0].draft_tokens[: draft.gamma].tolist()))
    assert draft.shards[0].noise_offset.item() == 5 + 8
    assert len(seen) > 4, "requests that sample draw anew in every launch"


@pytest.mark.parametrize("step_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 0.7])
def test_ties_infinities_and_nan(temperature, step_dtype):
    """Each row of values is the base logits of all requests: one column of the head, the others zero, and hidden states that pick it."""
    names, values = hard_values(330)
    wrong = []
    for name, row in zip(names, values, strict=True):
        head = torch.zeros(330, 64, dtype=torch.bfloat16)
        head[:, 0] = row
        draft = Draft(64, 330, 2, 2, num_ranks=2, blocks_per_rank=2, norm=False, head=head, biased=False, step_dtype=step_dtype)
        hidden, anchors, at = draft.inputs(2)
        hidden.zero_()
        hidden[:, 0] = 1.0
        problems = draft.run(2, (hidden, anchors, at.fill_(temperature)))
        base = draft.base_logits(2)
        assert torch.equal(base.nan_to_num(9e9), row.expand_as(base).nan_to_num(9e9)), name
        wrong += [f"{name}: {problem}" for problem in problems]
    assert wrong == []


def test_selections_among_many_equal_logits():
    """Most greedy choices tie, most across blocks and ranks."""
    tied = 0
    for seed in range(24):
        vocab = 360
        head = torch.zeros(vocab, 64, dtype=torch.bfloat16)
        head[:, :8] = random_values(8, vocab, seed).T
        draft = Draft(64, vocab, 8, 1, num_ranks=4, blocks_per_rank=2, norm=False, head=head, biased=False)
        hidden, anchors, _ = draft.inputs(1)
        hidden.zero_()
        hidden[torch.arange(8), torch.arange(8)] = 1.0
        inputs = (hidden, anchors, temperatures(seed + 1)[-1:].clone())
        assert draft.run(1, inputs) == [], seed
        tied += int((draft.proposal(draft.base_logits(1), inputs, 5).margins == 0).sum())
    assert tied > 10


def test_results_repeat_bit_by_bit_under_every_schedule():
    first = None
    for seed in range(8):
        draft = Draft(128, 700, 4, 3, num_ranks=2, blocks_per_rank=3, emulation=EmulationOptions(seed=seed, starvation=seed % 4, check_order=True))
        for batch in (3, 2):
            assert draft.run(batch, draft.inputs(batch)) == [], seed
            report = draft.sampler.last_report
            assert (report.num_races, [(r.kind, r.region) for r in report.races]) == (0, []), seed
        outputs = (draft.base_logits(2), draft.shards[1].step_logits, draft.shards[1].draft_tokens)
        first = first or outputs
        assert all(torch.equal(a, b) for a, b in zip(outputs, first, strict=True)), seed
