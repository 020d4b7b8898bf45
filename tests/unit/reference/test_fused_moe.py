"""The oracle of fused_moe: its layout against the interleave of FlashInfer, written out byte by byte, its sums against plain torch."""

import pytest
import torch
from fused_moe_cases import random_weights

from sgl_lowlatency.reference import fused_moe as oracle
from sgl_lowlatency.reference import fused_moe_layout as layout


def bytes_of_flashinfer(packed):
    """What its kernel stores for one matrix [rows, columns / 2], two columns a byte, low nibble first: for each lane of 16, four bytes become a
    word whose bits move as listed (mask, shift to the left)."""
    moves = [(0x80, 24), (0x70, 18), (0x08, 12), (0x07, 6), (0x8000, 13), (0x7000, 7), (0x0800, 1), (0x0700, -5), (0x800000, 2), (0x700000, -4),
             (0x080000, -10), (0x070000, -16), (0x80000000, -1), (0x10000000, 1), (0x60000000, -3), (0x08000000, -13), (0x01000000, -11),
             (0x06000000, -15)]  # fmt: skip
    rows, half = packed.shape
    out = torch.full_like(packed, 255)
    for block in range(rows // 2):
        row = block // 8 * 16 + block % 8
        for partition in range(half // 32):
            for lane in range(16):
                step = lane // 4
                column = partition * 32 + step * 8 + lane % 4
                source = [packed[row, column], packed[row + 8, column], packed[row, column + 4], packed[row + 8, column + 4]]
                raw = sum(int(byte) << 8 * i for i, byte in enumerate(source))
                word = 0
                for mask, shift in moves:
                    word |= (raw & mask) << shift if shift > 0 else (raw & mask) >> -shift
                at = partition * 32 + lane // 8 * 16 + lane % 4 * 4
                out[row + step % 2 * 8, at : at + 4] = torch.tensor([word >> 8 * i & 0xFF for i in range(4)], dtype=torch.uint8)
    return out


def test_weights_are_laid_out_as_flashinfer_does():
    codes = torch.randint(0, 16, (48, 192), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    stored = layout.interleave_weights(codes)
    assert torch.equal(stored, bytes_of_flashinfer(packed))
    assert torch.equal(layout.deinterleave_weights(stored), codes)


def test_scales_are_laid_out_as_flashinfer_does():
    flashinfer = pytest.importorskip("flashinfer.fused_moe.prepare")
    scales = torch.randint(0, 256, (3, 128, 24), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    stored = layout.interleave_scales(scales)
    assert torch.equal(stored, flashinfer.interleave_moe_scales_for_sm90_mixed_gemm(scales, group_size=32))
    assert torch.equal(layout.deinterleave_scales(stored), scales)


def test_values_of_codes():
    assert layout.decode_values(torch.arange(16)).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_the_router_against_sglangs_torch_code(monkeypatch):
    """vision_topk without CUDA: softplus, sqrt, topk, normalised and scaled in float32."""
    pytest.importorskip("sglang")
    import types

    from sglang.srt.multimodal.dsv41 import vl_routing

    weights = random_weights(128, 128, 64, 6, alt=True)
    values = torch.randn(20, 64, generator=torch.Generator().manual_seed(3)) * 4
    token_ids = torch.where(torch.arange(20) % 2 == 0, weights.alt_token_id, 5)
    ids, factors, is_decided = oracle.route(weights, values, token_ids)
    config = types.SimpleNamespace(
        top_k=6, num_shared_topk_slots=0, renormalize=True, routed_scaling_factor=1.5, apply_routed_scaling_factor_on_output=True
    )
    moe = types.SimpleNamespace(
        topk=types.SimpleNamespace(routing_inputs=lambda: (None, None), topk_config=config),
        gate=types.SimpleNamespace(e_score_correction_bias=weights.bias, e_score_correction_bias_vl=weights.bias_alt),
        config=types.SimpleNamespace(image_token_id=weights.alt_token_id), layer_id=0,
    )  # fmt: skip
    monkeypatch.setattr(vl_routing, "is_cuda", lambda: False)
    monkeypatch.setattr(vl_routing, "get_moe_a2a_backend", lambda: types.SimpleNamespace(is_megamoe=lambda: False))
    monkeypatch.setattr(vl_routing, "_finish_vision_topk", lambda moe, logits, weights, indices, *args, **kwargs: (weights, indices))
    output = vl_routing.vision_topk(moe, values, token_ids)
    assert bool(is_decided.all())
    assert torch.equal(output.topk_ids.long(), ids)
    assert torch.allclose(output.topk_weights.double(), factors, rtol=1e-5)


def test_the_output_against_plain_torch():
    """A layer whose matrices are taken apart here: codes, scales and products one row at a time."""
    weights = random_weights(128, 128, 16, 2)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    ids, factors, _ = oracle.route(weights, oracle.logits(weights, x))
    wanted = []
    for row in range(3):
        total = torch.zeros(128, dtype=torch.float64)
        for k in range(2):
            e = int(ids[row, k])
            matrices = []
            for stored, scale in ((weights.gate_up, weights.gate_up_scale), (weights.down, weights.down_scale)):
                values = layout.decode_values(layout.deinterleave_weights(stored[e : e + 1]))[0]
                exponent = layout.deinterleave_scales(scale[e : e + 1])[0].double() - 127
                matrices.append((values.view(values.shape[0], -1, 32) * 2**exponent[..., None]).flatten(1))
            up, gate = (matrices[0] @ x[row].double()).chunk(2)
            gate, up = gate.clamp(max=10.0), up.clamp(-10.0, 10.0)
            total += factors[row, k] * (matrices[1] @ (torch.nn.functional.silu(gate) * up))
        gate, up = (oracle.shared_matrix(weights.shared_gate_up, weights.shared_gate_up_scale) @ x[row].double()).chunk(2)
        shared = torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
        wanted.append(total + oracle.shared_matrix(weights.shared_down, weights.shared_down_scale) @ shared)
    found, standard = oracle.outputs(weights, x, ids, factors)
    assert torch.allclose(found, torch.stack(wanted), rtol=1e-12)
    assert 1e-4 < float((standard.double() - torch.stack(wanted)).norm() / torch.stack(wanted).norm()) < 1e-2


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_ranks_share_is_what_is_interleaved_of_its_part(num_ranks):
    """SGLang's loader cuts codes and scales, each half of gate_up by itself, and FlashInfer interleaves what is left."""
    generator, share = torch.Generator().manual_seed(5), 128
    intermediate = share * num_ranks
    whole = random_weights(256, intermediate, 16, 2)
    codes = {"gate_up": (2 * intermediate, 256), "down": (256, intermediate)}
    codes = {name: torch.randint(0, 16, (16, *shape), generator=generator, dtype=torch.uint8) for name, shape in codes.items()}
    scales = {name: torch.randint(90, 120, (16, c.shape[1], c.shape[2] // 32), generator=generator, dtype=torch.uint8) for name, c in codes.items()}
    for name, values in codes.items():
        getattr(whole, name).copy_(torch.stack([layout.interleave_weights(one) for one in values]))
        getattr(whole, f"{name}_scale").copy_(layout.interleave_scales(scales[name]))
    for rank in range(num_ranks):
        own = slice(rank * share, (rank + 1) * share)
        part = oracle.shard(whole, rank, num_ranks)

        def halves(tensor):
            return torch.cat([half[:, own] for half in tensor.split(intermediate, 1)], 1)

        wanted = {"gate_up": (halves(codes["gate_up"]), halves(scales["gate_up"]))}
        wanted["down"] = codes["down"][:, :, own], scales["down"][:, :, rank * share // 32 : (rank + 1) * share // 32]
        for name, (of_codes, of_scales) in wanted.items():
            assert torch.equal(getattr(part, name), torch.stack([layout.interleave_weights(one.contiguous()) for one in of_codes])), name
            assert torch.equal(getattr(part, f"{name}_scale"), layout.interleave_scales(of_scales.contiguous())), name
        gate, up = oracle.shared_matrix(whole.shared_gate_up, whole.shared_gate_up_scale).chunk(2)
        assert torch.equal(oracle.shared_matrix(part.shared_gate_up, part.shared_gate_up_scale), torch.cat([gate[own], up[own]]))
        down = oracle.shared_matrix(whole.shared_down, whole.shared_down_scale)
        assert torch.equal(oracle.shared_matrix(part.shared_down, part.shared_down_scale), down[:, own])
        assert part.router is whole.router and part.bias is whole.bias


def test_the_shards_add_up_to_the_layer():
    whole = random_weights(128, 512, 16, 2)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(6)).bfloat16()
    ids, factors, _ = oracle.route(whole, oracle.logits(whole, x))
    wanted, standard = oracle.outputs(whole, x, ids, factors)
    found, standard_of_ranks = oracle.outputs_of_ranks([oracle.shard(whole, rank, 4) for rank in range(4)], x, ids, factors)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
    for one in (standard, standard_of_ranks):
        assert 1e-4 < float((one.double() - wanted).norm() / wanted.norm()) < 1e-2
