"""The object SGLang installs on AMD: what it runs, checks, hands back and refuses. The kernels are emulated, the model's own forward is the reference
of SGLang's bf16 path."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.plugin_kernels.amd.spec import Plan, ShapeKey
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_nvidia_step import OtherRank, environment, live_batch  # noqa: F401  (a fixture)
from tiny_serving import MOE_GEOMETRY

from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import MonokernelFault
from sgl_lowlatency.kernels.monokernel import Monokernels
from sgl_lowlatency.reference.dense_decode import rms_norm
from sgl_lowlatency.reference.inputs import cos_sin_table
from sgl_lowlatency.runtime.amd_step import AmdStep
from sgl_lowlatency.runtime.coverage import PREFILL
from sgl_lowlatency.runtime.draft_step import AmdDraftStep
from sgl_lowlatency.specs.amd import qwen3, qwen3_moe

OFF_BY_ONE_PAGE, WITHHELD, SKIPPED_NORM, WRONG_ROPE, MASK_OFF_BY_ONE, NEXT_EXPERT = 4, 3, 6, 7, 8, 26  # dialect::Planted


def norm(serving):
    """SGLang's RMSNorm with a residual: both are written in place."""

    def forward(x, residual):
        residual.copy_((x.float() + residual.float()).bfloat16())
        x.copy_(rms_norm(residual.float(), serving.weights.final_norm, serving.geometry.rms_eps).bfloat16())
        return x, residual

    return forward


def build(serving, *widths, planted=0, exchange=None, deadline_s=30.0, longer_rope=None):
    """AmdStep over the tiny model, as build/monokernel.py puts it together. serving.standard is the model's own forward. longer_rope: what the
    model's table is after the build."""
    model, inner = serving.model, serving.model.model
    model.forward = lambda input_ids, positions, forward_batch, *args, **kwargs: serving.standard(input_ids, positions, forward_batch)
    inner.embed_tokens.forward = lambda ids: serving.weights.embedding[ids]
    inner.norm.forward = norm(serving)
    kernels = Monokernels(
        serving.geometry, serving.weights.layers, serving.weights.cos_sin, isa="gfx950", grid=2, widths=[(rows, serving.drafts) for rows in widths],
        deadline_s=deadline_s, emulation=EmulationOptions(planted=planted),
    )  # fmt: skip
    bounds = qwen3_moe.BOUNDS if serving.geometry.is_moe else qwen3.BOUNDS
    return AmdStep(
        model=model, geometry=serving.geometry, kernels=kernels, weights=serving.weights, bounds=bounds, tokens_per_request=serving.drafts,
        rope_table=lambda: serving.weights.cos_sin if longer_rope is None else longer_rope, exchange=exchange,
    )  # fmt: skip


def run(built, serving, batch):
    key = ShapeKey("decode" if serving.drafts == 1 else "target_verify", batch.batch_size, serving.drafts)
    return built.forward(Plan(key=key), batch.input_ids, batch.positions, batch, pp_proxy_tensors=None)


@pytest.mark.parametrize(("drafts", "geometry"), [(1, None), (4, None), (1, MOE_GEOMETRY)], ids=["decode", "verify", "moe"])
def test_a_live_step_gives_what_the_model_would(drafts, geometry, make_serving, environment):  # noqa: F811
    serving = make_serving(drafts=drafts, has_head=False, **({} if geometry is None else {"geometry": geometry}))
    built = build(serving, 2 * drafts)
    batch = live_batch(serving, [70, 33])
    ours = run(built, serving, batch)
    ours_kv = [buffer[batch.out_cache_loc].clone() for buffer in (*serving.kv.k, *serving.kv.v)]
    theirs = serving.standard(batch.input_ids, batch.positions, batch)
    theirs_kv = [buffer[batch.out_cache_loc] for buffer in (*serving.kv.k, *serving.kv.v)]
    assert ours.next_token_logits.shape == (2 * drafts, serving.geometry.vocab) and ours.next_token_logits.dtype == torch.float32
    for a, b in zip([ours.next_token_logits, ours.hidden_states, *ours_kv], [theirs.next_token_logits, theirs.hidden_states, *theirs_kv]):
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.03
    counts = built.coverage.counts()
    assert counts.executed == {2 * drafts: 1} and counts.mode == ("decode" if drafts == 1 else "verify")
    assert str(counts).startswith(f"monokernel ran 1 {counts.mode} steps ({2 * drafts} rows: 1); ")


def test_each_width_is_checked_once_before_it_serves(make_serving, environment, caplog):  # noqa: F811
    serving = make_serving(has_head=False)
    built = build(serving, 1, 2)
    with caplog.at_level(logging.INFO):
        kept = run(built, serving, live_batch(serving, [5])).hidden_states
        before = kept.clone()
        for lengths in ([6], [7, 8]):
            run(built, serving, live_batch(serving, lengths))
    checks = [record.message for record in caplog.records if record.message.startswith("monokernel self-check:")]
    assert [check.split(",")[0] for check in checks] == ["monokernel self-check: 1 rows", "monokernel self-check: 2 rows"]
    assert all(": passed (added.relative_l2 0.0" in check and ", stream.relative_l2 0.0" in check for check in checks), "layer by layer"
    assert built.coverage.counts().executed == {1: 2, 2: 1}, "the check's own launches serve nobody"
    assert torch.equal(kept, before), "hidden states outlast the next step"


@pytest.mark.parametrize("planted", [OFF_BY_ONE_PAGE, SKIPPED_NORM, WRONG_ROPE, MASK_OFF_BY_ONE])
def test_a_broken_kernel_is_refused_with_figures(planted, make_serving, environment):  # noqa: F811
    serving = make_serving(has_head=False)
    refusal = r"monokernel self-check failed, the server is refused: 1 rows, .* FAILED: .* is not within 0\.[01]"
    with pytest.raises(RuntimeError, match=refusal):
        run(build(serving, 1, planted=planted), serving, live_batch(serving, [20]))


def test_depth_adds_nothing_to_what_right_kernels_are_apart(make_serving, environment, caplog):  # noqa: F811
    serving = make_serving(has_head=False, num_layers=24)
    with caplog.at_level(logging.INFO):
        run(build(serving, 2), serving, live_batch(serving, [7, 90]))
    (line,) = [record.message for record in caplog.records if "self-check" in record.message]
    assert ": passed (" in line and float(line.split("logits.relative_l2 ")[1].split(",")[0]) < 0.02


def test_a_wrong_expert_is_refused_by_its_layer(make_serving, environment):  # noqa: F811
    serving = make_serving(has_head=False, geometry=MOE_GEOMETRY)
    with pytest.raises(RuntimeError, match=r"the server is refused: 1 rows, .* FAILED: .*stream\.relative_l2 \S+ is not within 0\.04"):
        run(build(serving, 1, planted=NEXT_EXPERT), serving, live_batch(serving, [20]))


def test_a_withheld_word_ends_the_step_with_its_record(make_serving, environment):  # noqa: F811
    environment(self_check=False)
    serving = make_serving(has_head=False)
    built = build(serving, 1, planted=WITHHELD, deadline_s=0.02)
    record = r"monokernel stopped: rank 0, SM \d, block \d waited 0\.0\d s for word \d+ of edge 'qkv' of layer 0 \(q, k and v\)"
    with pytest.raises(MonokernelFault, match=record):
        run(built, serving, live_batch(serving, [20]))
    with pytest.raises(MonokernelFault, match="an earlier step failed: monokernel stopped: "):
        run(built, serving, live_batch(serving, [20]))


def test_what_is_not_ours_runs_the_models_own_forward_and_is_counted(make_serving, environment):  # noqa: F811
    environment(self_check=False)
    serving = make_serving(has_head=False)
    built = build(serving, 1, 2, 4)
    own, batch = built.count_unrouted(), live_batch(serving, [9])
    expected = serving.standard(batch.input_ids, batch.positions, batch).next_token_logits
    prefill, three = serving.batch(2), live_batch(serving, [5, 6, 7])
    prefill.forward_mode = ForwardMode.EXTEND
    serving.standard = lambda *args: SimpleNamespace(next_token_logits=expected)  # the same whatever runs
    own(prefill.input_ids, prefill.positions, prefill)
    own(three.input_ids, three.positions, three, pp_proxy_tensors=None)
    handle = serving.model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert run(built, serving, batch).next_token_logits is expected
    handle.remove()
    given = dataclasses.replace(batch, input_embeds=torch.zeros(1))
    assert run(built, serving, given).next_token_logits is expected
    serving.model.capture([0])
    assert run(built, serving, batch).next_token_logits is expected
    assert built.coverage.counts().executed == {}
    assert built.coverage.counts().fallbacks == {
        PREFILL: 1, "3 rows, built for 1, 2, 4": 1, "a forward hook on model.layers.1.mlp": 1, "input embeddings": 1, "auxiliary hidden states": 1,
    }  # fmt: skip


def test_a_hook_on_what_is_called_as_ever_changes_nothing(make_serving, environment):  # noqa: F811
    environment(self_check=False)
    serving, seen = make_serving(has_head=False), []
    built = build(serving, 1)
    for module in (serving.model.model.embed_tokens, serving.model.model.norm, serving.model.logits_processor):
        module.register_forward_hook(lambda *call: seen.append(call))
    run(built, serving, live_batch(serving, [9]))
    assert len(seen) == 3 and built.coverage.counts().executed == {1: 1}


def test_warm_up_runs_are_not_counted_and_an_unchecked_width_is_not_captured(make_serving, environment):  # noqa: F811
    serving = make_serving(has_head=False)
    environment(capturing_graphs=True)
    built = build(serving, 1, 2)
    run(built, serving, live_batch(serving, [4]))
    environment()
    run(built, serving, live_batch(serving, [4]))
    assert built.coverage.counts().executed == {1: 1}
    environment(capturing_graphs=True, stream_captures=True)
    with pytest.raises(RuntimeError, match="monokernel: 2 rows are being captured before their self-check ran"):
        run(built, serving, live_batch(serving, [4, 5]))


def test_ranks_decide_together(make_serving, environment):  # noqa: F811
    """What another rank finds in its model, and what fails its self-check, is heeded here."""
    serving = make_serving(has_head=False)
    hooked = build(serving, 1, exchange=OtherRank(fallback="a forward hook on model.layers.0"))
    run(hooked, serving, live_batch(serving, [9]))
    assert hooked.coverage.counts().fallbacks == {"rank 1: a forward hook on model.layers.0": 1}
    other = OtherRank(failed="1 rows: FAILED")
    with pytest.raises(RuntimeError, match="^monokernel self-check failed, the server is refused: rank 1: 1 rows: FAILED$"):
        run(build(serving, 1, exchange=other), serving, live_batch(serving, [9]))
    assert other.told == [{"fallback": None}, {"failed": None}]


def test_the_summary_says_what_was_built(make_serving, environment):  # noqa: F811
    built = build(make_serving(has_head=False), 1)
    own = f"{built._kernels.extra_bytes / 2**20:.1f} MiB beside the model"
    assert built.summary() == f"monokernel: 2 layers of two launches, hidden 128, 4/2 heads of 64, intermediate 128; {own}; 2 workgroups, gfx950"


def test_a_draft_model_keeps_its_own_forward():
    model = SimpleNamespace(forward=lambda *args, **kwargs: (args, kwargs))
    assert AmdDraftStep(model).forward(None, 1, key=2) == ((1,), {"key": 2})


def test_the_rope_table_is_read_at_the_first_step(make_serving, environment):  # noqa: F811
    """SGLang makes its table longer behind the build: positions that it has only then are served."""
    environment(self_check=False)
    serving = make_serving(has_head=False)
    built = build(serving, 1, longer_rope=cos_sin_table(4096, serving.geometry.head_dim))
    batch = live_batch(serving, [9])
    batch.positions = torch.tensor([4095])
    ours, built_for = run(built, serving, batch), serving.geometry.max_position
    assert built_for == 1200 and bool(ours.next_token_logits.isfinite().all())
    serving.weights = dataclasses.replace(serving.weights, cos_sin=cos_sin_table(4096, serving.geometry.head_dim))
    theirs = serving.standard(batch.input_ids, batch.positions, batch)
    assert float((ours.next_token_logits - theirs.next_token_logits).norm() / theirs.next_token_logits.norm()) < 0.03


def test_a_step_takes_no_gradients(make_serving, environment):  # noqa: F811
    """As the models' own forwards: SGLang captures decode graphs with gradients on, and parameters require them."""
    environment(self_check=False)
    serving = make_serving(has_head=False)
    built, plain = build(serving, 1), norm(serving)
    weight = torch.nn.Parameter(torch.ones(serving.geometry.hidden, dtype=torch.bfloat16))
    serving.model.model.norm.forward = lambda x, residual: tuple(each * weight for each in plain(x, residual))
    with torch.enable_grad():
        output = run(built, serving, live_batch(serving, [9]))
    assert not output.hidden_states.requires_grad and not output.next_token_logits.requires_grad
