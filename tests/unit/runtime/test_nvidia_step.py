"""The object SGLang installs: what it plans, checks, runs and refuses."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.plugin_kernels.nvidia.spec import Step
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_lowlatency import config
from sgl_lowlatency.runtime import nvidia_step, sglang_state, supervision
from sgl_lowlatency.runtime.coverage import DRAFT_MODEL, PREFILL, Coverage
from sgl_lowlatency.runtime.draft_step import DraftStep
from sgl_lowlatency.runtime.fault_watch import FaultWatch
from sgl_lowlatency.runtime.lm_head import ComputedLogits
from tiny_serving import TOLERANCES


@pytest.fixture
def environment(monkeypatch):
    """environment(**fields) sets the package's configuration and stands in for a GPU's capture state and SGLang's metrics."""

    def set_fields(*, stream_captures=False, capturing_graphs=False, **fields):
        monkeypatch.setattr(config, "get", lambda: config.Config(**fields))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream_captures)
        monkeypatch.setattr(sglang_state, "capturing_graphs", lambda: capturing_graphs)
        monkeypatch.setattr(sglang_state, "metrics_enabled", lambda: False)
        # its line at exit would go to a stream that pytest has closed
        monkeypatch.setattr(Coverage, "start_reporting", lambda self, interval_s, with_metrics: None)
        # 20 s behind a planted fault it would end the process of the tests
        monkeypatch.setattr(supervision, "FaultWatch", functools.partial(FaultWatch, on_overdue=lambda: None))

    set_fields()
    return set_fields


def build(serving, *widths, planted=0, exchange=None):
    return nvidia_step.NvidiaStep(
        model=serving.model,
        geometry=serving.geometry,
        step=serving.decode_step(*widths, planted=planted),
        plans=serving.plans(*widths),
        tolerances=TOLERANCES,
        device_name="host emulation",
        tokens_per_request=serving.drafts,
        head_reasons=() if serving.weights.lm_head is not None else ("lm_head has a bias",),
        exchange=exchange,
    )


def run(built, serving, batch):
    step = built.plan(batch.input_ids, batch)
    mode = "decode" if serving.drafts == 1 else "target_verify"
    assert step == Step(mode=mode, rows=batch.batch_size * serving.drafts)
    step = Step(mode=step.mode, rows=step.rows, view=serving.view)
    return built.forward(step, serving.standard, batch.input_ids, batch.positions, batch, pp_proxy_tensors=None)


def live_batch(serving, lengths):
    """A live batch over SGLang's own slots. `lengths` count the new token in decode, and leave the draft tokens out in verify."""
    requests, drafts = len(lengths), serving.drafts
    totals = [length + (drafts if drafts > 1 else 0) for length in lengths]
    batch = serving.batch(requests)
    generator = torch.Generator().manual_seed(7)
    scattered = 1 + torch.randperm(serving.kv.num_slots - 1, generator=generator)
    slots = scattered[: sum(totals)].split(totals)
    for row, taken in enumerate(slots):
        serving.kv.req_to_token[3 + row, : totals[row]] = taken.int()
    batch.input_ids = torch.randint(0, serving.geometry.vocab, (requests * drafts,), generator=generator)
    batch.seq_lens = torch.tensor(lengths)
    batch.positions = torch.cat([torch.arange(total - drafts, total) for total in totals])
    batch.req_pool_indices = torch.arange(3, 3 + requests)
    batch.out_cache_loc = torch.cat([taken[-drafts:] for taken in slots])
    return batch


def test_a_live_step_gives_what_the_model_would(serving, environment):
    built = build(serving, 1, 2, 3)
    batch = live_batch(serving, [70, 1, 33])
    ours = run(built, serving, batch)
    ours_kv = [buffer[batch.out_cache_loc].clone() for buffer in (*serving.kv.k, *serving.kv.v)]
    theirs = serving.standard(batch.input_ids, batch.positions, batch)
    theirs_kv = [buffer[batch.out_cache_loc] for buffer in (*serving.kv.k, *serving.kv.v)]
    error = (ours.next_token_logits - theirs.next_token_logits).norm() / theirs.next_token_logits.norm()
    assert ours.next_token_logits.dtype == torch.float32 and float(error) < 0.03
    for a, b in zip(ours_kv, theirs_kv):
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.03


def test_a_live_verify_step_gives_what_the_model_would(make_serving, environment):
    serving = make_serving(drafts=4)
    built = build(serving, 4, 8, 12)
    batch = live_batch(serving, [70, 1, 33])
    ours = run(built, serving, batch)
    ours_kv = [buffer[batch.out_cache_loc].clone() for buffer in (*serving.kv.k, *serving.kv.v)]
    theirs = serving.standard(batch.input_ids, batch.positions, batch)
    theirs_kv = [buffer[batch.out_cache_loc] for buffer in (*serving.kv.k, *serving.kv.v)]
    assert ours.next_token_logits.shape == (12, serving.geometry.vocab) and ours.next_token_logits.dtype == torch.float32
    for a, b in zip([ours.next_token_logits, ours.hidden_states, *ours_kv], [theirs.next_token_logits, theirs.hidden_states, *theirs_kv]):
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.03
    assert built.coverage.counts().executed == {12: 1} and built.coverage.counts().mode == "verify"
    assert built.summary().startswith("decode_step (verify, 4 tokens a request) for 2 layers")


def test_a_verify_width_that_fails_its_check_is_refused(make_serving, environment):
    serving = make_serving(drafts=4)
    built = build(serving, 4, planted=8)
    refusal = r"self-check failed, the server is refused: verify of 4 rows, 4 a request, .* FAILED: .* is not within 0\.12"
    with pytest.raises(RuntimeError, match=refusal):
        run(built, serving, live_batch(serving, [20]))


def test_a_speculative_server_falls_back_from_what_is_no_verify_step_of_its_width(make_serving, environment):
    serving = make_serving(drafts=4)
    built = build(serving, 4, 8)
    prefill, wide = serving.batch(2), serving.batch(3)
    prefill.forward_mode = ForwardMode.EXTEND
    assert built.plan(prefill.input_ids, prefill) is None
    assert built.plan(wide.input_ids, wide, pp_proxy_tensors=None) is None
    assert built.coverage.counts().fallbacks == {PREFILL: 1, "12 rows, built for 4 to 8": 1}


def test_a_draft_model_keeps_its_own_forward(environment):
    built = DraftStep((4, 8))
    assert built.widths == (4, 8) and built.draft_sampler is None
    environment(capturing_graphs=True)
    assert built.plan(None, None) is None
    environment()
    assert built.plan(None, None) is None
    assert built.coverage.counts().fallbacks == {DRAFT_MODEL: 1}
    assert built.forward(None, lambda *args, **kwargs: (args, kwargs), 1, key=2) == ((1,), {"key": 2})


def test_hidden_states_of_a_step_survive_the_next(serving, environment):
    built = build(serving, 1)
    first = run(built, serving, live_batch(serving, [9])).hidden_states
    kept = first.clone()
    second = run(built, serving, live_batch(serving, [40])).hidden_states
    assert torch.equal(first, kept) and not torch.equal(first, second)


def test_each_width_is_checked_once_before_it_serves(serving, environment, caplog):
    built = build(serving, 1, 2)
    with caplog.at_level(logging.INFO):
        for lengths in ([5], [6], [7, 8], [9]):
            run(built, serving, live_batch(serving, lengths))
    checks = [record.message for record in caplog.records if record.message.startswith("decode_step self-check:")]
    assert [check.split(",")[0] for check in checks] == ["decode_step self-check: 1 rows", "decode_step self-check: 2 rows"]
    assert all(": passed (" in check for check in checks)
    assert built.coverage.counts().executed == {1: 3, 2: 1}, "the check's own launches serve nobody"


@pytest.mark.parametrize("planted", [4, 7, 8, 21])
def test_a_broken_kernel_is_refused_with_figures(serving, environment, planted):
    built = build(serving, 1, planted=planted)
    with pytest.raises(RuntimeError, match=r"self-check failed, the server is refused: 1 rows, .* FAILED: .* is not within 0\.12"):
        run(built, serving, live_batch(serving, [20]))


def test_switching_the_check_off_is_logged_and_serves_anything(serving, environment, caplog):
    environment(self_check=False)
    built = build(serving, 1, planted=8)
    assert ["SGL_LOWLATENCY_SELF_CHECK=0" in record.message for record in caplog.records] == [True]
    assert caplog.records[0].levelno == logging.WARNING
    run(built, serving, live_batch(serving, [20]))
    assert built.coverage.counts().executed == {1: 1}


def test_an_unchecked_width_is_not_captured(serving, environment):
    environment(capturing_graphs=True, stream_captures=True)
    built = build(serving, 1)
    with pytest.raises(RuntimeError, match="1 rows are being captured before their self-check ran"):
        run(built, serving, live_batch(serving, [4]))


def test_the_check_refuses_a_pool_without_memory(serving, environment):
    serving.view.kv_pool.pool.post_capture_active = True
    with pytest.raises(RuntimeError, match="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"):
        run(build(serving, 1), serving, live_batch(serving, [4]))


def test_warm_up_launches_are_not_counted(serving, environment):
    environment(capturing_graphs=True)
    built = build(serving, 1)
    run(built, serving, live_batch(serving, [4]))
    environment()
    run(built, serving, live_batch(serving, [4]))
    assert built.coverage.counts().executed == {1: 1}


def test_what_is_not_ours_falls_back_and_is_counted(serving, environment):
    built = build(serving, 1, 2)
    prefill, wide = serving.batch(2), serving.batch(3)
    prefill.forward_mode = ForwardMode.EXTEND
    assert built.plan(prefill.input_ids, prefill) is None
    assert built.plan(wide.input_ids, wide, pp_proxy_tensors=None) is None
    batch = serving.batch(1)
    handle = serving.model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert built.plan(batch.input_ids, batch) is None
    handle.remove()
    assert built.plan(batch.input_ids, batch) is not None
    assert built.coverage.counts().fallbacks == {
        PREFILL: 1,
        "3 rows, built for 1 to 2": 1,
        "a forward hook on model.layers.1.mlp": 1,
    }


def test_declining_a_graph_size_at_capture_is_no_fallback(serving, environment):
    built = build(serving, 1)
    wide = serving.batch(24)
    environment(capturing_graphs=True)
    assert built.plan(wide.input_ids, wide) is None
    environment()
    assert built.plan(wide.input_ids, wide) is None
    assert built.coverage.counts().fallbacks == {"24 rows, built for 1 to 1": 1}


def test_the_summary_says_what_was_built(serving, environment):
    built = build(serving, 1, 2)
    own = f"{built._step.extra_bytes / 2**20:.1f} MiB beside the model"
    start = f"decode_step for 2 layers, hidden 128, 4/2 heads of 64, intermediate 128; LM head inside; {own}; 2 blocks on host emulation"
    assert built.summary().startswith(start) and not own.startswith("0.0")


def test_the_summary_says_why_the_head_is_sglangs(make_serving, environment):
    assert "; LM head SGLang's (lm_head has a bias); " in build(make_serving(has_head=False), 1).summary()


@pytest.fixture
def products(monkeypatch):
    """Hidden states that something else than the kernel was multiplied for, in order."""
    seen, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *args: seen.append(x) or linear(x, *args))
    matmul = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, y: seen.append(x) or matmul(x, y))
    return seen


def test_logits_are_the_kernels_in_the_buffer_of_the_graphs(serving, environment, products):
    """Where SGLang would copy its own to, so that nothing is left to do; rounded to bf16 as its are."""
    environment(self_check=False)
    built, batch = build(serving, 3), live_batch(serving, [70, 1, 33])
    batch.next_token_logits_buffer = torch.full((3, serving.geometry.vocab), float("nan"))
    output = run(built, serving, batch)
    assert output.next_token_logits is batch.next_token_logits_buffer and products == []
    assert torch.equal(output.next_token_logits, output.next_token_logits.bfloat16().float())
    expected = (output.hidden_states @ serving.model.lm_head.weight.T).float()
    assert float((output.next_token_logits - expected).norm() / expected.norm()) < 0.01
    batch.next_token_logits_buffer = None
    again = run(built, serving, batch).next_token_logits
    assert torch.equal(again, output.next_token_logits) and again.data_ptr() != output.next_token_logits.data_ptr() and len(products) == 1


@pytest.mark.parametrize("case", ["no head", "a hook before the processor", "another weight"])
def test_a_step_whose_logits_the_kernel_cannot_give_ends_at_the_final_norm(case, make_serving, environment, products):
    """The LM head is then SGLang's own, on our hidden states: its bits."""
    environment(self_check=False)
    serving = make_serving(has_head=case != "no head")
    built, batch = build(serving, 2), live_batch(serving, [70, 1])
    if case == "a hook before the processor":
        serving.model.logits_processor.register_forward_pre_hook(lambda module, args: None)
    if case == "another weight":
        serving.model.lm_head.weight = torch.nn.Parameter(serving.model.lm_head.weight * 2, requires_grad=False)
    output = run(built, serving, batch)
    assert products == [output.hidden_states]
    assert torch.equal(output.next_token_logits, (output.hidden_states @ serving.model.lm_head.weight.T).float())


def test_logits_of_other_hidden_states_are_computed(serving, environment):
    hidden, logits = torch.randn(2, serving.geometry.hidden).bfloat16(), torch.zeros(2, serving.geometry.vocab)
    head, weight = ComputedLogits(serving.model.lm_head, hidden, logits), serving.model.lm_head.weight
    assert head.apply(head, hidden) is logits
    assert torch.equal(head.apply(head, hidden[:1]), hidden[:1] @ weight.T)
    assert torch.equal(head.apply(head, hidden, weight[:, 0]), torch.nn.functional.linear(hidden, weight, weight[:, 0]))


class OtherRank:
    """The exchange with a second rank, which says `failed` of its self-check and `fallback` of its model. told: what this one said."""

    def __init__(self, failed=None, fallback=None, is_first=False):
        self.says, self.is_first, self.told = {"failed": failed, "fallback": fallback}, is_first, []

    def __call__(self, claim):
        self.told.append(claim)
        both = [claim, {name: self.says[name] for name in claim}]
        return both[::-1] if self.is_first else both


def test_ranks_refuse_together_what_one_of_them_finds_wrong(serving, environment):
    """This rank's self-check passes; the other one's did not, or both did."""
    other = OtherRank(failed="2 rows: FAILED")
    with pytest.raises(RuntimeError, match="^decode_step self-check failed, the server is refused: rank 1: 2 rows: FAILED$"):
        run(build(serving, 2, exchange=other), serving, live_batch(serving, [70, 1]))
    run(build(serving, 2, exchange=OtherRank()), serving, live_batch(serving, [70, 1]))
    assert other.told == [{"fallback": None}, {"failed": None}]


def test_a_rank_tells_the_others_what_it_finds_wrong(serving, environment):
    other = OtherRank(is_first=True)
    with pytest.raises(RuntimeError, match="the server is refused: rank 1: 2 rows, .*FAILED"):
        run(build(serving, 2, planted=8, exchange=other), serving, live_batch(serving, [70, 1]))
    assert len(other.told) == 2 and "FAILED" in other.told[1]["failed"]


def test_ranks_agree_on_verify_steps_before_their_first(make_serving, environment):
    """Who runs them, then what the self-check of a chain says, of each number of rows."""
    serving = make_serving(drafts=4)
    other, batch = OtherRank(failed="verify of 8 rows: FAILED"), live_batch(serving, [70, 1])
    with pytest.raises(RuntimeError, match="^decode_step self-check failed, the server is refused: rank 1: verify of 8 rows: FAILED$"):
        run(build(serving, 4, 8, exchange=other), serving, batch)
    assert other.told == [{"fallback": None}, {"failed": None}]
    wrong = OtherRank(is_first=True)
    with pytest.raises(RuntimeError, match="the server is refused: rank 1: verify of 8 rows, 4 a request, .*FAILED"):
        run(build(serving, 8, planted=8, exchange=wrong), serving, batch)
    built = build(serving, 4, 8, exchange=OtherRank(fallback="a forward hook on model.layers.0"))
    assert built.plan(batch.input_ids, batch) is None
    assert built.coverage.counts().fallbacks == {"rank 1: a forward hook on model.layers.0": 1}


def test_ranks_fall_back_together(serving, environment):
    """What one rank finds in its model all of them heed, at every step of as many rows; each asks once a number of rows."""
    other = OtherRank(fallback="a forward hook on model.layers.0")
    built, batch = build(serving, 2, exchange=other), live_batch(serving, [70, 1])
    assert [built.plan(batch.input_ids, batch) for _ in range(3)] == [None] * 3
    assert built.coverage.counts().fallbacks == {"rank 1: a forward hook on model.layers.0": 3} and other.told == [{"fallback": None}]


def test_a_rank_tells_the_others_why_it_falls_back(serving, environment):
    other = OtherRank()
    built, batch = build(serving, 2, exchange=other), live_batch(serving, [70, 1])
    handle = serving.model.model.norm.register_forward_hook(lambda *_: None)
    try:
        assert built.plan(batch.input_ids, batch) is None
    finally:
        handle.remove()
    (told,) = other.told
    assert told["fallback"].startswith("a forward hook on model.norm")


def test_a_reason_that_comes_after_the_agreement_ends_the_rank(serving, environment):
    built, batch = build(serving, 2, exchange=OtherRank()), live_batch(serving, [70, 1])
    run(built, serving, batch)
    handle = serving.model.model.norm.register_forward_hook(lambda *_: None)
    try:
        with pytest.raises(RuntimeError, match="a forward hook on model.norm.* on this rank, after all ranks agreed to run steps of 2 rows"):
            built.plan(batch.input_ids, batch)
    finally:
        handle.remove()


def test_a_shard_of_the_logits_is_gathered_in_bf16():
    """As SGLang gathers its own products: the shard is rounded to bf16, nothing is lost."""
    hidden, shard = torch.zeros(2, 8, dtype=torch.bfloat16), torch.randn(2, 32).bfloat16().float()
    head = SimpleNamespace(weight=torch.zeros(32, 8, dtype=torch.bfloat16))
    handed = ComputedLogits(head, hidden, shard, is_shard=True).apply(head, hidden)
    assert handed.dtype == torch.bfloat16 and torch.equal(handed.float(), shard)
    assert ComputedLogits(head, hidden, shard).apply(head, hidden) is shard
