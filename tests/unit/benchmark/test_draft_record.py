"""The recorder of draft blocks with stand-ins of SGLang's worker and proposer. Oracle: the proposals that were made."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from benchmark.serve import draft_record
from benchmark.serve.draft_record import PLUGIN, SGLANG, Block, Recorder

GAMMA, VOCAB = 3, 11


def proposal(anchors, drafts, logits=None, folded=False):
    ids = torch.full((len(anchors), GAMMA), 9)
    ids[:, 0] = torch.tensor(anchors)
    block = SimpleNamespace(draft_tokens=torch.tensor(drafts), corrected_logits=logits)
    return SimpleNamespace(draft_block_ids=ids, draft_block=block, folded=folded)


def batch(names, prefixes=(5,), is_extend=False):
    mode = SimpleNamespace(is_extend=lambda: is_extend)
    return SimpleNamespace(reqs=[SimpleNamespace(rid=name) for name in names], seq_lens=torch.tensor(prefixes), forward_mode=mode)


def proposer(steps=None, sizes=(1, 2, 4)):
    runner = SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(capture_bs=list(sizes)))
    return SimpleNamespace(_draft_sampler=None if steps is None else SimpleNamespace(_megakernel_steps=steps), draft_model_runner=runner)


def names(count, run="greedy.b2", seed=7):
    return draft_record.request_names(draft_record.run_name(run, seed), count)


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path / "blocks.jsonl")


def propose(recorder, made, of, by=None):
    return recorder.around_propose(lambda self, **kwargs: made, by or proposer(), batch=of, bs=len(of.reqs))


def test_every_request_of_a_named_run_has_its_blocks_in_order(recorder):
    logits = torch.zeros(2, GAMMA, VOCAB)
    logits[1, 2, 4], logits[1, 2, 6] = 3.0, 2.5
    first = proposal([21, 31], [[1, 2, 3], [4, 5, 6]], logits)
    assert propose(recorder, first, batch(names(2), (5, 8))) is first, "what the server gets is what it made"
    propose(recorder, proposal([22, 32], [[7, 8, 9], [1, 1, 1]]), batch(names(2), (6, 10)))
    found = draft_record.wait_blocks(recorder._path, names(2), [2, 2])
    assert found[0][1] == Block(1, 0, 2, 6, 22, (7, 8, 9), None, SGLANG)
    assert found[1][0] == Block(0, 1, 2, 8, 31, (4, 5, 6), ((0.0, 0.0), (0.0, 0.0), (3.0, 2.5)), SGLANG)
    assert [block.prefix for block in found[1]] == [8, 10]


def test_a_block_behind_a_requests_end_is_left_out_and_a_missing_one_is_named(recorder):
    for prefix in (5, 6, 7):
        propose(recorder, proposal([1], [[1, 2, 3]]), batch(names(1), (prefix,)))
    assert [block.prefix for block in draft_record.wait_blocks(recorder._path, names(1), [2])[0]] == [5, 6]
    with pytest.raises(RuntimeError, match=r"3 of 4 draft blocks of request recorded\.7\.greedy\.b2\.0 were recorded in blocks\.jsonl"):
        draft_record.wait_blocks(recorder._path, names(1), [4], limit_s=0.3)


def test_what_the_server_writes_over_afterwards_is_not_what_was_recorded(recorder):
    made = proposal([1], [[1, 2, 3]])
    propose(recorder, made, batch(names(1)))
    made.draft_block.draft_tokens.fill_(0)
    assert draft_record.wait_blocks(recorder._path, names(1), [1])[0][0].drafts == (1, 2, 3)


def test_other_requests_are_neither_recorded_nor_touched(recorder):
    propose(recorder, SimpleNamespace(), batch(["a1b2"]))
    recorder.around_forward(lambda worker, of: None, None, batch(["a1b2"], is_extend=True))
    assert draft_record.blocks(recorder._path) == {} and recorder._thread is None


def test_who_made_a_proposal_is_told_by_the_graph_that_ran(recorder):
    small = proposer(lambda size: object() if size <= 2 else None)
    assert draft_record._made_by(small, proposal([1], [[1, 2, 3]], folded=True), 2) == PLUGIN
    assert draft_record._made_by(small, proposal([1], [[1, 2, 3]], folded=True), 3) == SGLANG, "three requests run in the graph of four"
    assert draft_record._made_by(small, proposal([1], [[1, 2, 3]]), 1) == SGLANG, "an eager proposal"
    assert draft_record._made_by(proposer(), proposal([1], [[1, 2, 3]], folded=True), 1) == SGLANG


def test_a_run_begins_with_its_seed_once(recorder):
    offset = torch.tensor([13])
    worker = SimpleNamespace(_proposer=SimpleNamespace(noise=SimpleNamespace(offset=offset)))

    def forward(of):
        return recorder.around_forward(lambda worker, of: (int(offset), torch.rand(2).tolist()), worker, of)

    torch.manual_seed(7)
    expected = [torch.rand(2).tolist() for _ in range(2)]
    assert forward(batch(names(2), is_extend=True)) == (0, expected[0])
    offset.add_(4)
    assert forward(batch(names(2), is_extend=True)) == (4, expected[1]), "a second prefill of the run goes on"
    assert forward(batch(names(2, run="sampled.b2"), is_extend=True)) == (0, expected[0])
    assert forward(batch(names(2, run="other"))) == (0, expected[1]), "no prefill"


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "blocks.jsonl"
    assert draft_record.blocks(path) == {}
    block = dataclasses.asdict(Block(0, 0, 1, 5, 1, (2, 3), None, SGLANG))
    whole = draft_record.json.dumps({"request": "a", **block})
    path.write_text(whole + "\n" + whole[:20])
    assert draft_record.blocks(path) == {"a": [Block(0, 0, 1, 5, 1, (2, 3), None, SGLANG)]}


def test_the_entry_point_is_found(tmp_path):
    from importlib.metadata import distributions

    folder = draft_record.install(tmp_path).split(":")[0]
    (found,) = [point for of in distributions(path=[folder]) for point in of.entry_points]
    assert (found.group, found.name, found.load()) == ("sglang.srt.plugins", draft_record.NAME, draft_record.register)
