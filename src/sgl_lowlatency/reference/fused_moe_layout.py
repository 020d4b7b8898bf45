"""How SGLang holds FP4 experts on sm_90 after load, which `fused_moe` reads in place, and its inverse, in torch.

FP4 is e2m1, two columns a byte. FlashInfer interleaves it for a mixed-input GEMM: of each block of 16 rows and 64 columns, a word of 32 bits is one
lane's A fragment of m16n8k16. Scales are e8m0 of 32 columns, folded into blocks of 64 rows and 128 columns.
"""

from __future__ import annotations

import torch

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of one half of a word, by fragment register: shifts of the sign, and of the bits of the magnitude code, from the highest.
_BITS = ((15, (8, 7, 6)), (12, (5, 4, 3)), (9, (2, 1, 0)), (14, (11, 10, 13)))


def interleave_weights(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., rows, columns / 2] as SGLang holds it, from e2m1 codes uint8 [..., rows, columns] (bit 3: the sign). rows % 16 = columns % 64 =
    0."""
    *lead, rows, columns = codes.shape
    # row 16 a + 8 r + g, column 64 p + 32 h + 16 o + 8 q + 2 t + i: register 2 q + r, half i, of the word of row 16 a + 8 o + g, lane t, chunk h of
    # block p
    parts = codes.reshape(-1, rows // 16, 2, 8, columns // 64, 2, 2, 2, 4, 2).int()
    parts = torch.einsum("narcpdoqte->naocpdtqre", parts)
    word = torch.zeros(parts.shape[:-3], dtype=torch.int64, device=codes.device)
    for register, (sign, magnitude) in enumerate(_BITS):
        for half in range(2):
            code = parts[..., register // 2, register % 2, half].long()
            word |= (code >> 3 & 1) << sign + 16 * half
            for bit, shift in zip((2, 1, 0), magnitude, strict=True):
                word |= (code >> bit & 1) << shift + 16 * half
    return torch.stack([word >> 8 * i & 0xFF for i in range(4)], -1).to(torch.uint8).reshape(*lead, rows, columns // 2)


def deinterleave_weights(stored: torch.Tensor) -> torch.Tensor:
    """The inverse: e2m1 codes uint8 [..., rows, columns]."""
    *lead, rows, half_columns = stored.shape
    word = stored.contiguous().view(torch.int32).view(-1, rows // 16, 2, 8, half_columns // 32, 2, 4)
    codes = []
    for sign, magnitude in _BITS:
        for half in range(2):
            code = (word >> sign + 16 * half & 1) << 3
            for bit, shift in zip((2, 1, 0), magnitude, strict=True):
                code |= (word >> shift + 16 * half & 1) << bit
            codes.append(code.to(torch.uint8))
    parts = torch.stack(codes, -1).view(*word.shape, 2, 2, 2)
    return torch.einsum("naocpdtqre->narcpdoqte", parts).reshape(*lead, rows, 2 * half_columns)


def interleave_scales(scales: torch.Tensor) -> torch.Tensor:
    """uint8 [experts, rows / 64, groups / 4, 16, 16] as SGLang holds it, from e8m0 bytes [experts, rows, groups] of 32 columns each:
    byte [m, 4 s + j] of a block is that of its row 16 s + m and group j."""
    experts, rows, groups = scales.shape
    blocks = scales.view(experts, rows // 64, 4, 16, groups // 4, 4)
    return torch.einsum("ebsmcj->ebcmsj", blocks).reshape(experts, rows // 64, groups // 4, 16, 16).contiguous()


def deinterleave_scales(stored: torch.Tensor) -> torch.Tensor:
    """The inverse: [experts, rows, groups]."""
    experts, blocks, chunks, _, _ = stored.shape
    return torch.einsum("ebcmsj->ebsmcj", stored.view(experts, blocks, chunks, 16, 4, 4)).reshape(experts, blocks * 64, chunks * 4)


def decode_values(codes: torch.Tensor) -> torch.Tensor:
    """float64 values of e2m1 codes."""
    table = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], dtype=torch.float64, device=codes.device)
    return table[codes.long()]
