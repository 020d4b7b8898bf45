"""The self-check of auxiliary hidden states passes the kernel and finds the wrong layer, the wrong order and the wrong rows."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.self_check import FIGURES, SelfCheck
from sgl_lowlatency.runtime.self_check_aux import AUX_FIGURES, AUX_L2, AUX_LAYER_RATIO, aux_errors, split_layers, with_neighbours
from tiny_serving import TOLERANCES

LAYERS, CAPTURES_OUTPUT = 4, 20  # the latter: dialect::Planted


@pytest.fixture
def capturing(make_serving):
    """capturing(layers, **sizes) -> TinyServing of a model that captures them."""

    def make(layers, **sizes):
        serving = make_serving(num_layers=LAYERS, **sizes)
        serving.model.capture(layers)
        return serving

    return make


def run(serving, ours, requests):
    check = SelfCheck(serving.model, serving.geometry, serving.weights, TOLERANCES)
    return check.run(serving.standard, ours, serving.batch(requests), serving.kv)


@pytest.mark.parametrize("requests, drafts", [(1, 1), (5, 1), (2, 4)])
@pytest.mark.parametrize("layers", [[0], [2], [0, 1, 3]], ids=str)
def test_the_kernel_passes(capturing, layers, requests, drafts):
    serving = capturing(layers, drafts=drafts)
    report = run(serving, serving.kernel(rows=requests * drafts), requests)
    assert report.misses == [], str(report)
    assert set(report.figures) == {*FIGURES, *AUX_FIGURES}
    assert report.figures[AUX_L2] < 0.03 and report.figures[AUX_LAYER_RATIO] < 0.1, str(report)
    assert (report.figures[AUX_L2] == 0) == (layers == [0]), "the embedding is copied"


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_channel"])
def test_the_kernel_passes_with_fp8_weights(capturing, weight_format):
    serving = capturing([1, 3], weight_format=weight_format)
    report = run(serving, serving.kernel(rows=2), 2)
    assert report.misses == [], str(report)
    assert 0 < 3 * report.figures[AUX_L2] < report.sglang_fp8[AUX_L2], str(report)


@pytest.mark.parametrize("requests, drafts", [(1, 1), (2, 4)])
@pytest.mark.parametrize("layers", [[0], [1], [2], [3], [0, 1, 3]], ids=str)
def test_a_kernel_that_captures_what_leaves_a_layer_fails(capturing, layers, requests, drafts):
    serving = capturing(layers, drafts=drafts)
    report = run(serving, serving.kernel(CAPTURES_OUTPUT, rows=requests * drafts), requests)
    assert report.figures[AUX_L2] > 2 * TOLERANCES[AUX_L2], str(report)
    if layers != [3]:  # nothing lies behind the last layer to be taken for
        assert report.figures[AUX_LAYER_RATIO] > 2 * TOLERANCES[AUX_LAYER_RATIO], str(report)
    others = [name for name in FIGURES if report.figures[name] > TOLERANCES[name]]
    assert others == [] and report.misses[0].startswith(AUX_L2), str(report)


def test_figures_are_asked_for_where_layers_are_captured_only(make_serving):
    serving = make_serving()
    report = run(serving, serving.kernel(rows=1), 1)
    assert report.misses == [] and set(report.figures) == set(FIGURES)


@pytest.mark.parametrize("fails", [False, True])
def test_the_models_own_layers_come_back_before_ours_runs(capturing, fails):
    serving, seen = capturing([3, 1]), []

    def ours(input_ids, positions, forward_batch):
        seen.append(list(serving.model.model.layers_to_capture))
        if fails:
            raise RuntimeError("the kernel stopped")
        return serving.standard(input_ids, positions, forward_batch)

    if fails:
        with pytest.raises(RuntimeError, match="the kernel stopped"):
            run(serving, ours, 2)
    else:
        assert run(serving, ours, 2).misses == []
    assert {tuple(layers) for layers in seen} == {(3, 1)} and serving.model.model.layers_to_capture == [3, 1]


def test_another_number_of_layers_is_named(capturing):
    serving = capturing([1, 3])

    def forgets_one(input_ids, positions, forward_batch):
        output = serving.standard(input_ids, positions, forward_batch)
        return SimpleNamespace(next_token_logits=output.next_token_logits, hidden_states=output.hidden_states[:, :128])

    with pytest.raises(RuntimeError, match=r"^auxiliary hidden states have 128 columns, those of layers \[1, 3\] have 256$"):
        run(serving, forgets_one, 1)


def swapped(states):
    return torch.cat(states.chunk(2, dim=1)[::-1], dim=1)


def other_rows(states):
    return states.roll(1, 0)


def one_nan(states):
    states[0, 3] = float("nan")
    return states


@pytest.mark.parametrize("change", [swapped, other_rows, one_nan])
def test_wrong_states_beside_right_logits_fail(capturing, change):
    serving = capturing([1, 2])

    def ours(input_ids, positions, forward_batch):
        output = serving.standard(input_ids, positions, forward_batch)
        return SimpleNamespace(next_token_logits=output.next_token_logits, hidden_states=change(output.hidden_states.clone()))

    report = run(serving, ours, 3)
    assert not report.figures[AUX_L2] <= 2 * TOLERANCES[AUX_L2], str(report)


def test_hidden_states_are_asked_of_every_row(capturing):
    serving, modes = capturing([1]), []

    def record(input_ids, positions, forward_batch):
        modes.append(forward_batch.capture_hidden_mode.name)
        return serving.standard(input_ids, positions, forward_batch)

    SelfCheck(serving.model, serving.geometry, serving.weights, TOLERANCES).run(record, record, serving.batch(1), serving.kv)
    assert set(modes) == {"FULL"}


def test_layers_are_named_as_sglangs_loop_takes_them(capturing):
    serving = capturing([3, 9, 0, 3, -1])
    assert sglang_state.captured_layers(serving.model) == (0, 3)
    serving.model.capture_aux_hidden_states = False
    assert sglang_state.captured_layers(serving.model) == ()


def test_neighbours_lie_in_the_model():
    assert with_neighbours([0, 3], 4) == [0, 1, 2, 3]
    assert with_neighbours([3], 8) == [2, 3, 4]
    assert with_neighbours([], 4) == [] and with_neighbours([0], 1) == [0]


def test_packed_states_are_split_by_layer():
    packed = torch.arange(12.0).view(2, 6).bfloat16()
    split = split_layers(packed, [4, 7], 3)
    assert list(split) == [4, 7] and split[7].tolist() == [[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]] and split[4].dtype == torch.float32


def streams(change, noise, rows=6, hidden=4096, layers=3):
    """SGLang's streams at three layers, each `change` from the one before, and ours at the middle one, off by `noise`; a channel of all is a
    thousand times louder, and ours rounds it differently."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(rows, hidden, generator=generator)  # noqa: E731
    expected = [draw()]
    for _ in range(layers - 1):
        expected.append(expected[-1] + change * draw())
    ours = [stream + noise * draw() for stream in expected]
    for stream in (*expected, *ours):
        stream[:, 7] = 1000.0
    for stream in ours:
        stream[:, 7] += 4.0
    return dict(enumerate(ours)), dict(enumerate(expected))


@pytest.mark.parametrize("change, noise", [(0.1, 0.001), (0.1, 0.05), (0.05, 0.1), (0.02, 0.002)])
def test_the_ratio_tells_the_layer_whatever_the_noise(change, noise):
    ours, expected = streams(change, noise)
    right = float(aux_errors(ours, expected, [1])[AUX_LAYER_RATIO])
    before = float(aux_errors({1: ours[0]}, expected, [1])[AUX_LAYER_RATIO])
    behind = float(aux_errors({1: ours[2]}, expected, [1])[AUX_LAYER_RATIO])
    expected_ratio = noise / math.hypot(noise, change)  # noise is orthogonal to the change
    assert right == pytest.approx(expected_ratio, rel=0.1) and right < 0.95
    assert before == pytest.approx(1 / expected_ratio, rel=0.1) and behind == pytest.approx(1 / expected_ratio, rel=0.1)


def test_a_loud_channel_hides_the_wrong_layer_from_the_relative_distance():
    """Why there are two figures."""
    ours, expected = streams(change=0.02, noise=0.002)
    wrong = aux_errors({1: ours[2]}, expected, [1])
    assert float(wrong[AUX_L2].max()) < TOLERANCES[AUX_L2] and float(wrong[AUX_LAYER_RATIO]) > TOLERANCES[AUX_LAYER_RATIO]


def test_equal_streams_have_no_ratio_to_fail():
    stream = torch.ones(1, 8)
    assert float(aux_errors({1: stream}, {0: stream, 1: stream}, [1])[AUX_LAYER_RATIO]) == 0.0
    assert float(aux_errors({0: stream + 1}, {0: stream}, [0])[AUX_LAYER_RATIO]) == 0.0
