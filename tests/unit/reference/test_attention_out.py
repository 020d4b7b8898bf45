"""The oracle of attention_out: its formulas against their sums written out element by element, and how much the standard path rounds."""

import cmath

import torch
from attention_out_cases import SMALL, Layer, random_weights

from sgl_lowlatency.reference import attention_out as oracle


def test_a_head_is_rotated_back():
    weights = random_weights(SMALL)
    x, positions, _ = Layer().inputs(3)
    found = oracle.rotate_back(x, weights.freqs_cis, positions)
    for row in range(3):
        assert torch.equal(found[row, 1, :48], x[row, 1, :48].double())
        for i in range(8):
            a, b = x[row, 1, 48 + 2 * i : 50 + 2 * i].tolist()
            turned = complex(a, b) * cmath.exp(-1j * float(positions[row]) * 0.7**i)
            assert abs(complex(*found[row, 1, 48 + 2 * i : 50 + 2 * i].tolist()) - turned) < 1e-4  # of fp32's frequencies


def test_outputs_of_one_row():
    """From latent rows group by group to the normed input; and what the standard path's roundings cost."""
    layer = Layer()
    w, (x, positions, streams) = layer.weights, layer.inputs(1)
    heads = oracle.rotate_back(x, w.freqs_cis, positions)[0]
    latent = torch.cat([w.wo_a[g * 64 : (g + 1) * 64].double() @ heads[2 * g : 2 * g + 2].flatten() for g in range(2)])
    blocks = [[w.wo_b[n, 32 * k : 32 * k + 32].double() * float(w.wo_b_scale[n // 32, k]) for k in range(4)] for n in range(256)]
    wo_b = torch.stack([torch.cat(row) for row in blocks])
    y, c = wo_b @ latent, oracle.coefficients(w.hyper, streams)[0]
    next_streams = torch.stack([c[4 + i] * y + sum(c[8 + 4 * j + i] * streams[0, j].double() for j in range(4)) for i in range(4)])
    combined = sum(c[k] * next_streams[k] for k in range(4))
    out = combined / (combined.square().mean() + 1e-6).sqrt() * w.norm.double()
    found, standard = oracle.outputs(SMALL, w, x, positions, streams)
    assert torch.allclose(found.streams[0], next_streams, rtol=1e-12) and torch.allclose(found.out[0], out, rtol=1e-12)
    assert 1e-3 < float((standard.out[0].double() - out).norm() / out.norm()) < 1e-2
