"""The oracle of attention_in: its formulas against their sums written out, and its KV rows against a page made byte by byte."""

import cmath
import math
import struct

import pytest
import torch
from attention_in_cases import SMALL, Layer, empty_cache

from sgl_lowlatency.reference import attention_in as oracle


@pytest.mark.parametrize("has_pre", [True, False])
def test_outputs_of_one_row(has_pre):
    layer = Layer()
    w, (streams, pre, positions, _) = layer.weights, layer.inputs(2, has_pre=has_pre)
    factors = pre[1].tolist() if has_pre else [1.0, 0.0, 0.0, 0.0]
    combined = sum(factor * stream.double() for factor, stream in zip(factors, streams[1]))
    x = combined / math.sqrt(float(combined.square().mean()) + 1e-6) * w.norm.double()

    def product(weight, scale, vector):
        blocks = [slice(32 * k, 32 * k + 32) for k in range(scale.shape[1])]
        return torch.stack([
            sum(float(scale[n // 32, k]) * (weight[n, of].double() @ vector[of]) for k, of in enumerate(blocks)) for n in range(weight.shape[0])
        ])  # fmt: skip

    both = product(w.wqkv_a, w.wqkv_a_scale, x)
    latent, kv = both[:128], both[128:]
    q_lora = latent / math.sqrt(float(latent.square().mean()) + 2e-6) * w.q_norm.double()
    q = product(w.wq_b[:512], w.wq_b_scale[:16], q_lora)
    kv = kv / math.sqrt(float(kv.square().mean()) + 3e-6) * w.kv_norm.double()
    found, standard = oracle.outputs(SMALL, w, streams, pre, positions)
    for vector, of in ((q, found.q[1, 0]), (kv, found.kv[1])):
        for i in range(32):
            turned = complex(*vector[448 + 2 * i : 450 + 2 * i].tolist()) * cmath.exp(1j * float(positions[1]) * 0.7**i)
            assert abs(complex(*of[448 + 2 * i : 450 + 2 * i].tolist()) - turned) < 1e-4  # of fp32's frequencies
        assert torch.allclose(of[:448], vector[:448], rtol=1e-9)
    assert torch.allclose(found.x[1], x, rtol=1e-12) and torch.allclose(found.q_lora[1], q_lora, rtol=1e-9)
    assert 1e-3 < float((standard.q - found.q).norm() / found.q.norm()) < 1e-2 < float((standard.kv - found.kv).norm() / found.kv.norm()) < 0.04


def test_a_slot_is_read_from_its_bytes():
    """448 codes, 64 bf16, and far behind all slots' data 7 exponents."""
    cache = empty_cache("cpu", pages=2, page_size=4)
    slot = 6  # of page 1, number 2
    codes = bytes(i % 119 for i in range(448))  # 0x77 and more are never reached: 240
    rope = b"".join(struct.pack("<H", struct.unpack("<I", struct.pack("<f", float(i)))[0] >> 16) for i in range(64))
    page = cache.pages[1]
    page[2 * 576 : 3 * 576] = torch.tensor(list(codes + rope), dtype=torch.uint8)
    page[4 * 576 + 2 * 8 : 4 * 576 + 2 * 8 + 7] = torch.tensor([127, 128, 126, 127, 120, 130, 127], dtype=torch.uint8)
    (found,) = oracle.read_slots(cache, torch.tensor([slot]))

    def e4m3(code):
        return code * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10)

    scales = [1.0, 2.0, 0.5, 1.0, 2.0**-7, 8.0, 1.0]
    assert found.tolist() == [e4m3(code) * scales[i // 64] for i, code in enumerate(codes)] + [float(i) for i in range(64)]


def test_what_the_cache_keeps():
    """A scale is the least power of two with which nothing exceeds 448, of 1e-4 at least."""
    kv = torch.zeros(1, 512, dtype=torch.float64)
    kv[0, 0], kv[0, 1], kv[0, 64], kv[0, 128], kv[0, 500] = 448.0, 1.0, 449.0, 1e-7, 1.00390625
    found = oracle.stored(kv)[0]
    assert found[[0, 1, 64]].tolist() == [448.0, 1.0, 448.0]  # 449 at scale 2 has steps of 32
    assert found[128] == pytest.approx(1e-7, rel=0.07) and found[500] == 1.0
