"""The self-check passes the kernel, fails every planted bug, and leaves nothing behind."""

from __future__ import annotations

import math

import pytest
import torch
from sgl_lowlatency.runtime.self_check import FIGURES, SelfCheck
from tiny_serving import TOLERANCES

PLANTED = {"off-by-one page": 4, "wrong kv head": 5, "skipped norm": 6, "wrong rope": 7, "mask off by one": 8}


PLANTED_IN_VERIFY = {"sees the next draft": 10, "drafts before it are read from the pool": 11, "drafts rotated by the first's position": 12}
DRAFTS = 4
# The tokens of a request that its draft `d` sees behind a prefix of `p` tokens; right is range(p + d + 1). Bound: what the worst
# figure exceeds its tolerance by.
CHAIN_BUGS = {
    "sees every draft": (lambda p, d: range(p + DRAFTS), 2.0),
    "sees the next draft": (lambda p, d: range(min(p + d + 2, p + DRAFTS)), 2.0),
    "sees no other draft": (lambda p, d: [*range(p), p + d], 2.0),
    "misses the draft before it": (lambda p, d: [at for at in range(p + d + 1) if d == 0 or at != p + d - 1], 2.0),
    "sees the siblings of a tree": (lambda p, d: sorted({*range(p + 1), p + d}), 2.0),
    "prefix too long": (lambda p, d: range(p + d + 2), 2.0),
    "prefix too short": (lambda p, d: range(p + d), 2.0),
    "misses the last of the prefix": (lambda p, d: [*range(p - 1), *range(p, p + d + 1)], 2.0),
    "the first draft twice": (lambda p, d: [p, *range(p + d + 1)], 1.0),
}


def run(serving, ours, requests, tolerances=TOLERANCES):
    check = SelfCheck(serving.model, serving.geometry, serving.weights, tolerances)
    return check.run(serving.standard, ours, serving.batch(requests), serving.kv)


@pytest.mark.parametrize("rows, page_size", [(1, 1), (3, 1), (16, 1), (2, 16), (4, 64)])
def test_the_kernel_passes(make_serving, rows, page_size):
    serving = make_serving(page_size=page_size, num_slots=8192)
    report = run(serving, serving.kernel(rows=rows), rows)
    assert report.misses == [], str(report)
    assert set(report.figures) == set(FIGURES)
    assert 0 < report.figures["first_layer_kv.relative_l2"] < report.figures["kv.relative_l2"] < 0.03
    assert {1, 63, 64, 65, 1000} <= set(report.lengths) and len(report.lengths) % rows == 0


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("bug", PLANTED)
def test_every_planted_bug_fails(serving, bug, rows):
    report = run(serving, serving.kernel(PLANTED[bug], rows=rows), rows)
    assert report.misses, f"{bug} passed: {report}"
    # by twice the bound or more (or a NaN), so that the verdict does not hang on a rounding
    assert any(not report.figures[name] <= 2 * bound for name, bound in TOLERANCES.items()), str(report)


@pytest.mark.parametrize("requests, drafts, page_size", [(1, 2, 1), (1, 4, 1), (4, 4, 1), (2, 5, 16), (1, 16, 1), (3, 4, 64)])
def test_the_kernel_passes_verify(make_serving, requests, drafts, page_size):
    serving = make_serving(page_size=page_size, num_slots=8192, drafts=drafts)
    report = run(serving, serving.kernel(rows=requests * drafts), requests)
    assert report.misses == [], str(report)
    assert 0 < report.figures["first_layer_kv.relative_l2"] < report.figures["kv.relative_l2"] < 0.03
    assert {1, 63, 64, 65, 1000} <= set(report.lengths) and len(report.lengths) % requests == 0
    assert str(report).startswith(f"verify of {requests * drafts} rows, {drafts} a request, lengths [1, 2, 3, ")


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("bug", CHAIN_BUGS)
def test_every_bug_of_the_chain_fails(make_serving, bug, requests):
    serving = make_serving(drafts=DRAFTS)
    sees, by = CHAIN_BUGS[bug]
    report = run(serving, serving.verify(sees), requests)
    assert report.misses, f"{bug} passed: {report}"
    assert any(not report.figures[name] <= by * bound for name, bound in TOLERANCES.items()), str(report)


@pytest.mark.parametrize("bug", PLANTED)
def test_every_planted_bug_fails_verify(make_serving, bug):
    serving = make_serving(drafts=4)
    report = run(serving, serving.kernel(PLANTED[bug], rows=8), 2)
    assert any(not report.figures[name] <= 2 * bound for name, bound in TOLERANCES.items()), f"{bug} passed: {report}"


@pytest.mark.parametrize("bug", PLANTED_IN_VERIFY)
def test_every_planted_bug_among_the_rows_of_a_request_fails(make_serving, bug):
    serving = make_serving(drafts=4)
    report = run(serving, serving.kernel(PLANTED_IN_VERIFY[bug], rows=8), 2)
    assert any(not report.figures[name] <= 2 * bound for name, bound in TOLERANCES.items()), f"{bug} passed: {report}"


def test_positions_are_taken_as_given_not_counted(make_serving):
    """NGRAM's padding tokens have the position of the chain's second token."""
    serving = make_serving(drafts=4)

    def counts(input_ids, positions, forward_batch):
        counted = (forward_batch.seq_lens[:, None] + torch.arange(4)).flatten()
        return serving.standard(input_ids, counted, forward_batch)

    report = run(serving, counts, 1)
    assert report.figures["first_layer_kv.relative_l2"] > 2 * TOLERANCES["first_layer_kv.relative_l2"], str(report)


def test_identical_outputs_pass_with_zero_error(serving):
    report = run(serving, serving.standard, 2)
    assert report.figures == dict.fromkeys(FIGURES, 0.0)


def test_capture_data_would_pass_a_broken_kernel(serving):
    """Why the check makes its own inputs: on SGLang's warm-up batch (length 1, slot 0) a wrong mask changes nothing we see."""
    batch = serving.batch(1)
    expected = serving.standard(batch.input_ids, batch.positions, batch).next_token_logits
    wrong_norm = serving.kernel(6, rows=1)(batch.input_ids, batch.positions, batch).next_token_logits
    assert float((wrong_norm - expected).norm() / expected.norm()) < TOLERANCES["logits.relative_l2"]


def test_a_row_left_unwritten_is_a_miss(serving):
    def writes_no_value_rows(input_ids, positions, forward_batch):
        kept = [v[forward_batch.out_cache_loc].clone() for v in serving.kv.v]
        output = serving.standard(input_ids, positions, forward_batch)
        for v, rows in zip(serving.kv.v, kept):
            v[forward_batch.out_cache_loc] = rows
        return output

    report = run(serving, writes_no_value_rows, 1)
    assert math.isnan(report.figures["kv.relative_l2"])
    assert any(miss.startswith("kv.relative_l2 nan") for miss in report.misses), report.misses


def test_a_nan_in_one_logit_is_a_miss_even_when_later_batches_pass(serving):
    calls = []

    def one_nan(input_ids, positions, forward_batch):
        output = serving.standard(input_ids, positions, forward_batch)
        if not calls:
            output.next_token_logits[0, 7] = float("nan")
        calls.append(1)
        return output

    report = run(serving, one_nan, 1)
    assert len(calls) > 1 and math.isnan(report.figures["logits.relative_l2"]) and report.misses


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_touched_is_put_back(make_serving, fails, drafts):
    serving = make_serving(drafts=drafts)
    before = [buffer.clone() for buffer in (*serving.kv.k, *serving.kv.v, serving.kv.req_to_token)]
    template = serving.batch(3)
    fields = {name: value.clone() for name, value in vars(template).items() if isinstance(value, torch.Tensor)}
    spec_info = template.spec_info and dict(vars(template.spec_info))
    seen = []

    def ours(input_ids, positions, forward_batch):
        seen.append((serving.kv.k[0].clone(), serving.backend.forward_metadata))
        if fails:
            raise RuntimeError("the kernel stopped")
        return serving.standard(input_ids, positions, forward_batch)

    if fails:
        with pytest.raises(RuntimeError, match="the kernel stopped"):
            run(serving, ours, 3)
    else:
        assert SelfCheck(serving.model, serving.geometry, serving.weights, TOLERANCES).run(serving.standard, ours, template, serving.kv).misses == []
    assert not torch.equal(seen[0][0], before[0]), "the check wrote no context of its own"
    assert seen[0][1] != "of the running forward"
    after = (*serving.kv.k, *serving.kv.v, serving.kv.req_to_token)
    assert all(torch.equal(a, b) for a, b in zip(after, before))
    assert serving.backend.forward_metadata == "of the running forward"
    assert all(torch.equal(getattr(template, name), value) for name, value in fields.items())
    assert template.spec_info is None or vars(template.spec_info) == spec_info


def test_both_sides_get_the_same_batch_and_fresh_metadata(serving):
    batches = []

    def record(input_ids, positions, forward_batch):
        batches.append((forward_batch, serving.backend.forward_metadata))
        assert forward_batch.next_token_logits_buffer is None and int(forward_batch.seq_lens_cpu.sum()) == forward_batch.seq_lens_sum
        assert torch.equal(positions, forward_batch.seq_lens - 1)
        return serving.standard(input_ids, positions, forward_batch)

    SelfCheck(serving.model, serving.geometry, serving.weights, TOLERANCES).run(record, record, serving.batch(2), serving.kv)
    for ours, theirs in zip(batches[::2], batches[1::2]):
        assert ours[0] is theirs[0] and ours[1] != theirs[1]


def test_an_unknown_tolerance_is_refused(serving):
    with pytest.raises(ValueError, match="no figure 'logits.max_abs'"):
        SelfCheck(serving.model, serving.geometry, serving.weights, {"logits.max_abs": 1.0})
