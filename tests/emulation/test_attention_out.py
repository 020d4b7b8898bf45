"""attention_out in emulation: coefficients to fp32 rounding, streams and the next input through the numerics gate. Oracle:
reference/attention_out.py."""

import dataclasses

import pytest
import torch
from attention_out_cases import SMALL, Layer, random_weights

from sgl_lowlatency.kernels.attention_out import AttentionOut, AttentionOutSizes
from sgl_lowlatency.kernels.fault import AttentionOutFault

SHAPES = [  # sizes, grid
    (SMALL, 4),
    (AttentionOutSizes(128, 6, 384, 64, 2, 576), 5),  # above 16 rows two splits of K, both times with a short second one
    (AttentionOutSizes(384, 8, 16, 16, 2, 64), 40),  # heads that are rotated whole; more blocks than units of most ops
    (AttentionOutSizes(256, 3, 64, 8, 1, 128), 1),  # a block alone, one group
    (AttentionOutSizes(5120, 8, 8, 8, 1, 128), 3),  # DeepSeek-V4.1's width
    (AttentionOutSizes(128, 8, 512, 64, 1, 128), 3),  # a panel of 4,096 columns: four splits above 16 rows, two above 8
]


@pytest.mark.parametrize(("sizes", "grid"), SHAPES)
def test_rows(sizes, grid):
    """Launches of different rows, of every instance of the kernel, alternate on one workspace."""
    layer = Layer(sizes, grid=grid)
    for seed, rows in enumerate((1, 6, 12, 48, 9, 17, 1) if sizes is SMALL else (1, 12, 48, 6)):
        layer.kernel.emulation.seed = seed
        inputs = layer.inputs(rows, seed)
        layer.run(*inputs)
        assert layer.problems(*inputs) == [], rows


def test_rows_of_x_may_be_apart():
    layer = Layer()
    x, positions, streams = layer.inputs(5, padding=24)
    assert not x.is_contiguous()
    layer.run(x, positions, streams)
    assert layer.problems(x, positions, streams) == []
    apart = layer.out
    layer.run(x.contiguous(), positions, streams)
    assert torch.equal(layer.out, apart)


def test_a_row_does_not_depend_on_the_others():
    """Within an instance's rows bit by bit; the others take sums in another order."""
    layer = Layer()
    inputs = layer.inputs(48)
    layer.run(*inputs)
    streams, out, coefficients = layer.streams, layer.out, layer.coefficients
    for rows in (slice(0, 33), slice(11, 44)):
        layer.run(*(t[rows].contiguous() for t in inputs))
        assert torch.equal(layer.streams, streams[rows]) and torch.equal(layer.out, out[rows])
    layer.run(*(t[5:6].contiguous() for t in inputs))
    assert torch.equal(layer.coefficients, coefficients[5:6])  # the mix takes no notice of the instance


def test_the_mix_is_doubly_stochastic():
    layer = Layer()
    inputs = layer.inputs(7)
    layer.run(*inputs)
    comb = layer.coefficients[:, 8:].unflatten(1, (4, 4))
    assert (comb.sum(1) - 1).abs().max() < 1e-4 and (comb.sum(2) - 1).abs().max() < 1e-4 and comb.min() > 0


def test_coefficients_of_extreme_streams_are_finite():
    """Streams of zeros, whose rms is that of eps alone, and of large values."""
    layer = Layer()
    x, positions, streams = layer.inputs(3)
    streams[0] = 0.0
    streams[1] *= 1e15
    layer.run(x, positions, streams)
    assert layer.coefficients.isfinite().all() and layer.streams[[0, 2]].isfinite().all()
    assert not [problem for problem in layer.problems(x, positions, streams) if problem.startswith("coefficients")]


@pytest.mark.parametrize(("change", "words"), [
    ({"hidden": 192}, "hidden 192 is not a positive multiple of 128"),
    ({"heads": 5}, "heads 5 is not a positive multiple of 2"),
    ({"heads": 260}, "a group's width 8320 is not a positive multiple of 64 up to 4096"),
    ({"rope_dim": 72}, "rope_dim 72 is not a positive multiple of 8 up to 64"),
    ({"lora": 40}, "lora 40 is not a positive multiple of 16"),
    ({"lora": 4160}, "latent 8320 is not a positive multiple of 128 up to 8192"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        AttentionOut(dataclasses.replace(SMALL, **change), 8, torch.device("cpu"), 4, 2.0)


@pytest.mark.parametrize(("field", "change", "words"), [
    ("wo_b_scale", lambda t: t.fill_(3.0), "wo_b_scale: 3.0 is no power of two"),
    ("wo_a", lambda t: t[:, :-64], r"wo_a: shape \(128, 64\) is not \(128, 128\)"),
    ("freqs_cis", lambda t: t[:, :4], "freqs_cis: shape"),
    ("hyper", lambda h: dataclasses.replace(h, mix=h.mix.bfloat16()), "mix: dtype torch.bfloat16 is not torch.float32"),
    ("hyper", lambda h: dataclasses.replace(h, sinkhorn_iterations=0), "sinkhorn_iterations 0 is below 1"),
    ("hyper", lambda h: dataclasses.replace(h, mix_eps=-1e-6), "mix_eps -1e-06 is negative or no number"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(field, change, words):
    layer, weights = Layer(), random_weights(SMALL)
    with pytest.raises(ValueError, match=words):
        layer.kernel.prepare(dataclasses.replace(weights, **{field: change(getattr(weights, field))}))


def test_launches_that_do_not_fit_are_refused():
    layer = Layer(max_rows=8)
    x, positions, streams = layer.inputs(9)
    out = torch.empty(9, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"rows 9 is outside 1\.\.8"):
        layer.kernel.launch(layer.layer, x, positions, streams, torch.empty_like(streams), out)
    with pytest.raises(ValueError, match="streams_out is streams"):
        layer.kernel.launch(layer.layer, x[:8], positions[:8], streams[:8], streams[:8], out[:8])
    with pytest.raises(ValueError, match="heads of a row must lie together"):
        apart = x[:8].transpose(1, 2).contiguous().transpose(1, 2)
        layer.kernel.launch(layer.layer, apart, positions[:8], streams[:8], torch.empty_like(streams[:8]), out[:8])


@pytest.mark.parametrize("position", [-1, 97])
def test_a_position_without_frequencies_ends_the_launch(position):
    layer = Layer()
    x, positions, streams = layer.inputs(4)
    positions[2] = position
    with pytest.raises(AttentionOutFault, match=rf"attention_out stopped: .* row 2 has position {position}, outside 0\.\.96"):
        layer.run(x, positions, streams)
