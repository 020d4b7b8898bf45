"""The oracle of a hyper-connection: its formulas against their sums written out element by element."""

import math

import torch
from attention_out_cases import SMALL, Layer, random_weights

from sgl_lowlatency.reference import hyper_connection as oracle


def test_coefficients_of_one_row():
    hyper = random_weights(SMALL).hyper
    r = Layer().inputs(1)[2][0].double().flatten()
    mixes = [sum(w * v for w, v in zip(row.tolist(), r.tolist())) / math.sqrt(float(r.square().mean()) + 1e-20) for row in hyper.mix.double()]
    scale, base = hyper.mix_scale.tolist(), hyper.mix_base.tolist()
    logits = [m * scale[0 if i < 4 else 1 if i < 8 else 2] + base[i] for i, m in enumerate(mixes)]
    wanted = [1 / (1 + math.exp(-v)) + 1e-6 for v in logits[:4]] + [2 / (1 + math.exp(-v)) for v in logits[4:8]]
    comb = [[math.exp(v - max(row)) for v in row] for row in (logits[8 + 4 * j : 12 + 4 * j] for j in range(4))]
    comb = [[v / sum(row) + 1e-6 for v in row] for row in comb]
    for n in range(20):
        if n:
            comb = [[v / (sum(row) + 1e-6) for v in row] for row in comb]
        columns = [sum(row[i] for row in comb) + 1e-6 for i in range(4)]
        comb = [[v / columns[i] for i, v in enumerate(row)] for row in comb]
    found = oracle.coefficients(hyper, r.view(1, 4, -1))[0]
    assert torch.allclose(found, torch.tensor(wanted + sum(comb, []), dtype=torch.float64), rtol=1e-9)


def test_streams_behind_an_output():
    generator = torch.Generator().manual_seed(7)
    mixed, y, streams = (torch.randn(*shape, generator=generator).double() for shape in ((2, 24), (2, 3), (2, 4, 3)))
    found = oracle.streams_behind(mixed, y, streams)
    for row in range(2):
        for i in range(4):
            for h in range(3):
                wanted = float(mixed[row, 4 + i] * y[row, h] + sum(mixed[row, 8 + 4 * j + i] * streams[row, j, h] for j in range(4)))
                assert math.isclose(float(found[row, i, h]), wanted, rel_tol=1e-12)
