"""Ranks and blocks that are lost, late or dead, and inputs that would reach foreign memory: who waited for whom is named, within the deadline."""

import re

import pytest
import torch
from draft_cases import Draft

from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.draft_sampler import DraftPeer, DraftSampler, DraftShard, DraftWeights
from sgl_lowlatency.kernels.fault import DraftSamplerFault

WITHHELD_SIGNAL, LATE_PEER = 3, 30  # dialect::Planted
DEADLINE_S = 0.5


def draft_of(num_ranks, planted=0, seed=0, ranks=None, starvation=-1):
    options = EmulationOptions(planted=planted, seed=seed, starvation=starvation)
    return Draft(64, 500, 4, 2, num_ranks=num_ranks, blocks_per_rank=2, deadline_s=DEADLINE_S, emulation=options, ranks=ranks)


def fault_of(draft):
    with pytest.raises(DraftSamplerFault) as raised:
        draft.run(2, draft.inputs(2))
    return str(raised.value), draft.sampler.fault()


@pytest.mark.parametrize("dead", [0, 3])
def test_a_dead_rank_is_named_by_the_others(dead):
    """It never runs: three of four ranks do."""
    for seed in range(4):
        draft = draft_of(4, seed=seed, ranks=[rank for rank in range(4) if rank != dead])
        message, record = fault_of(draft)
        waited, whom = r"draft_sampler stopped: rank [0-3], SM \d, block \d waited 0\.5\d s", f"block [01] of rank {dead}"
        assert re.fullmatch(f"{waited} for {whom} to answer in step 0 for request [01]", message), message
        assert DEADLINE_S <= record.waited_ns / 1e9 < 1.1 * DEADLINE_S and record.rank != dead
        with pytest.raises(DraftSamplerFault, match="an earlier launch failed: draft_sampler stopped: rank"):
            draft.run(1, draft.inputs(1))


def test_a_lost_candidate_of_another_rank_is_named_with_its_step():
    for seed in range(4):
        message, _ = fault_of(draft_of(2, WITHHELD_SIGNAL, seed))
        assert re.search(r"waited 0\.5\d s for block 1 of rank 1 to answer in step 2 for request [01]$", message), message


def test_a_lost_candidate_of_the_own_rank_is_named_with_its_step():
    for seed in range(4):
        message, _ = fault_of(draft_of(1, WITHHELD_SIGNAL, seed))
        assert re.search(r"waited 0\.5\d s for block 1 of rank 0 to answer in step 2 for request [01]$", message), message


def test_a_late_rank_is_waited_for():
    for seed in range(4):
        draft = draft_of(4, LATE_PEER, seed)
        assert draft.run(2, draft.inputs(2)) == []
        assert draft.sampler.last_report.virtual_ns > 0.9 * DEADLINE_S / 2 * 1e9, "half a deadline was waited for"


@pytest.mark.parametrize("starvation", [1, 2, 3])
def test_starved_blocks_and_warps_only_take_longer(starvation):
    for seed in range(3):
        draft = draft_of(4, seed=seed, starvation=starvation)
        assert draft.run(2, draft.inputs(2)) == []


@pytest.mark.parametrize("bad", [500, -1, 2**32 + 5, -(2**40)])
def test_a_bad_anchor_is_named(bad):
    draft = draft_of(1)
    hidden, anchors, at = draft.inputs(2)
    anchors[1] = bad
    message = f"draft_sampler stopped: rank 0, SM \\d, block \\d: request 1 has anchor token {bad}, outside 0..499 \\(the vocabulary size\\)"
    with pytest.raises(DraftSamplerFault, match=f"^{message}$"):
        draft.run(2, (hidden, anchors, at))


def make(**changes):
    """A DraftSampler whose arguments `changes` replace, of 100 tokens."""
    bf16 = torch.bfloat16
    shard = dict(vocab_begin=0, head=torch.zeros(112, 64, dtype=bf16), markov_w2=torch.zeros(100, 256, dtype=bf16),
                 draft_tokens=torch.zeros(6, dtype=torch.int64), noise_offset=torch.zeros(1, dtype=torch.int64),
                 step_logits=torch.zeros(2, 3, 100))  # fmt: skip
    shard |= {name: changes.pop(name) for name in list(changes) if name in shard}
    weights = DraftWeights(changes.pop("markov_w1", torch.zeros(100, 256, dtype=bf16)))
    arguments = dict(gamma=3, max_batch=2, device=torch.device("cpu"), blocks_per_rank=2, deadline_s=1.0) | changes
    return DraftSampler(weights, [DraftShard(**shard)], **arguments)


def test_walks_of_other_lengths_are_refused():
    draft = draft_of(1)
    draft.sampler._params[2].tiles_at_once = 3
    with pytest.raises(ValueError, match="tiles_at_once 3 is neither 1 nor 4"):
        draft.run(2, draft.inputs(2))


def test_what_fits_is_accepted():
    assert make().max_units == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 17, "max_batch": 1}, "max_batch 1 by gamma 17 is beyond 16, 16 or together 80"),
        ({"gamma": 6, "max_batch": 14}, "max_batch 14 by gamma 6 is beyond"),
        ({"deadline_s": 0.0}, "deadline_s 0.0 is not positive"),
        ({"vocab_begin": 2}, "token ids 2..101 do not begin at a multiple of 4"),
        ({"markov_w2": torch.zeros(99, 256, dtype=torch.bfloat16)}, "are not an even number"),
        ({"markov_w1": torch.zeros(101, 256, dtype=torch.bfloat16)}, "vocab 101 is odd"),
        ({"markov_w1": torch.zeros(100, 128, dtype=torch.bfloat16)}, r"markov_w1: shape \(100, 128\) is not \(100, 256\)"),
        ({"markov_w1": torch.zeros(100, 256)}, "markov_w1: dtype torch.float32 is not torch.bfloat16"),
        ({"head": torch.zeros(96, 64, dtype=torch.bfloat16)}, "head has 96 rows for 100 token ids"),
        ({"head": torch.zeros(112, 96, dtype=torch.bfloat16)}, "hidden 96 is not a multiple of 64"),
        ({"step_logits": torch.zeros(2, 3, 100, dtype=torch.bfloat16)}, "step_logits: dtype torch.bfloat16 is not torch.float32"),
        ({"first_rank": 1}, r"ranks 1..1 and peers \[\] are not 0..n - 1"),
        ({"peers": {2: DraftPeer(1, 1)}}, r"ranks 0..0 and peers \[2\] are not 0..n - 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_a_batch_beyond_the_greatest_is_refused():
    draft = draft_of(1)
    with pytest.raises(ValueError, match="batch 3 is outside 1..2"):
        draft.sampler.launch(3, *draft.inputs(2))
