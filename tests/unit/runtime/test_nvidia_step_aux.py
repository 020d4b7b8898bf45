"""Auxiliary hidden states of a served step: what the model's logits processor gets, and steps that are left to SGLang. Oracle: the
model's own forward."""

from __future__ import annotations

import logging

import pytest
import torch
from test_nvidia_step import build, environment, live_batch, run  # noqa: F401

LAYERS = 4


def relative(actual, expected):
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("named, captured", [([3, 0, 2], [0, 2, 3]), ([1], [1]), ([2, 4, 2, -1], [2])], ids=str)
def test_a_live_step_hands_over_what_the_model_would(make_serving, environment, caplog, named, captured, drafts):  # noqa: F811
    """Ascending whatever order they are named in, each once, and none that the model lacks, as SGLang's loop over layers takes them."""
    serving = make_serving(drafts=drafts, num_layers=LAYERS)
    built = build(serving, 3 * drafts)
    serving.model.capture(named)  # SGLang names them after the build
    batch = live_batch(serving, [70, 5, 33])
    with caplog.at_level(logging.INFO):
        ours = run(built, serving, batch)
    said = f"decode_step hands over the inputs of layers {', '.join(map(str, captured))} as auxiliary hidden states"
    assert [record.message for record in caplog.records].count(said) == 1
    theirs = serving.standard(batch.input_ids, batch.positions, batch)
    rows, hidden = 3 * drafts, serving.geometry.hidden
    assert ours.hidden_states.shape == theirs.hidden_states.shape == (rows, len(captured) * hidden)
    assert ours.hidden_states.dtype == torch.bfloat16 and ours.hidden_states.is_contiguous()
    for layer, a, b in zip(captured, ours.hidden_states.split(hidden, 1), theirs.hidden_states.split(hidden, 1)):
        assert torch.equal(a, b) if layer == 0 else relative(a, b) < 0.03, layer
    assert relative(ours.next_token_logits, theirs.next_token_logits) < 0.03
    assert serving.model.model.layers_to_capture == named, "the self-check puts its own layers back"
    assert built.coverage.counts().executed == {rows: 1} and built.coverage.counts().fallbacks == {}


def test_what_a_step_hands_over_survives_the_next(make_serving, environment):  # noqa: F811
    serving = make_serving(num_layers=LAYERS)
    serving.model.capture([1, 3])
    built = build(serving, 1)
    first = run(built, serving, live_batch(serving, [9])).hidden_states
    kept = first.clone()
    second = run(built, serving, live_batch(serving, [40])).hidden_states
    assert torch.equal(first, kept) and not torch.equal(first, second)


@pytest.mark.parametrize("named", [[], [LAYERS, -1]])
def test_a_model_that_captures_no_layer_it_has_is_left_to_sglang(make_serving, environment, named):  # noqa: F811
    serving = make_serving(num_layers=LAYERS)
    built, batch = build(serving, 1), serving.batch(1)
    serving.model.capture(named)
    assert built.plan(batch.input_ids, batch) is None
    assert built.coverage.counts().fallbacks == {"auxiliary hidden states of no layer": 1}


@pytest.mark.parametrize("before, after", [([1], [2]), ([1], None), (None, [1])])
def test_layers_that_change_after_the_first_step_are_left_to_sglang(make_serving, environment, before, after):  # noqa: F811
    serving = make_serving(num_layers=LAYERS)
    built = build(serving, 1)

    def capture(layers):
        serving.model.capture_aux_hidden_states, serving.model.model.layers_to_capture = layers is not None, layers or []

    capture(before)
    run(built, serving, live_batch(serving, [9]))
    capture(after)
    batch = serving.batch(1)
    assert built.plan(batch.input_ids, batch) is None
    assert built.coverage.counts().fallbacks == {"auxiliary hidden states of other layers than at the first step": 1}
    capture(before)
    assert built.plan(batch.input_ids, batch) is not None


@pytest.mark.parametrize("drafts", [1, 4])
def test_a_kernel_that_captures_what_leaves_a_layer_is_refused(make_serving, environment, drafts):  # noqa: F811
    serving = make_serving(drafts=drafts, num_layers=LAYERS)
    serving.model.capture([1, 2])
    built = build(serving, drafts, planted=20)
    with pytest.raises(RuntimeError, match=r"self-check failed, the server is refused: .* FAILED: aux\.relative_l2 .* aux\.layer_ratio"):
        run(built, serving, live_batch(serving, [20]))


def test_what_the_kernel_leaves_unwritten_cannot_pass_the_check(make_serving, environment, monkeypatch):  # noqa: F811
    """Memory that is handed out again may hold the right values of the forward before."""
    serving = make_serving(num_layers=LAYERS)
    serving.model.capture([1, 2])
    built = build(serving, 1)
    launch = built._step.launch

    def without_last_column(*args, aux_out, **kwargs):
        scratch = aux_out.clone()
        launch(*args, aux_out=scratch, **kwargs)
        aux_out[:, :-1] = scratch[:, :-1]

    monkeypatch.setattr(built._step, "launch", without_last_column)
    with pytest.raises(RuntimeError, match=r"self-check failed, .* aux\.relative_l2 nan is not within"):
        run(built, serving, live_batch(serving, [20]))
