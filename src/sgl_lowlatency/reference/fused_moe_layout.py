"""How SGLang holds FP4 experts on sm_90 after load, which `fused_moe` reads in place, and its inverse, in torch.

FP4 is e2m1, two columns a byte. FlashInfer interleaves it for a mixed-input GEMM: of each block of 16 rows and 64 columns, a word of 32 bits is one
lane's A fragment of m16n8k16. Scales are e8m0 of 32 columns, folded into blocks of 64 rows and 128 columns.
"""

from __future__ import annotations

import torch

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of one half of a word, by fragment register: shifts of the sign, and of the bits of the magnitude code, from the highest.
_BITS = ((15, (8, 7, 6)), (12, (5, 4, 3)), (9, (2, 1, 0)), (14, (11, 10, 13)))


def _words(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the words of a matrix lie: int64 [rows, columns / 8], for word w of a stored row the row g and the first column of its fragment."""
    stored = torch.arange(rows, device=device)[:, None]
    word = torch.arange(columns // 8, device=device)[None, :]
    block, chunk, lane = word // 8, word % 8 // 4, word % 4
    step = 2 * chunk + stored % 16 // 8
    return stored // 16 * 16 + stored % 8, block * 64 + step * 16 + lane * 2


def interleave_weights(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., rows, columns / 2] as SGLang holds it, from e2m1 codes uint8 [..., rows, columns] (bit 3: the sign). rows % 16 = columns % 64 = 0."""
    *_, rows, columns = codes.shape
    row, column = _words(rows, columns, codes.device)
    word = torch.zeros(*codes.shape[:-1], columns // 8, dtype=torch.int64, device=codes.device)
    for register, (sign, magnitude) in enumerate(_BITS):
        for half in range(2):
            code = codes[..., row + register % 2 * 8, column + register // 2 * 8 + half].long()
            word |= (code >> 3 & 1) << sign + 16 * half
            for bit, shift in zip((2, 1, 0), magnitude, strict=True):
                word |= (code >> bit & 1) << shift + 16 * half
    return torch.stack([word >> 8 * i & 0xFF for i in range(4)], -1).to(torch.uint8).flatten(-2)


def deinterleave_weights(stored: torch.Tensor) -> torch.Tensor:
    """The inverse: e2m1 codes uint8 [..., rows, columns]."""
    *_, rows, half_columns = stored.shape
    row, column = _words(rows, half_columns * 2, stored.device)
    word = (stored.view(*stored.shape[:-1], half_columns // 4, 4).long() << torch.tensor([0, 8, 16, 24], device=stored.device)).sum(-1)
    codes = torch.zeros(*stored.shape[:-1], half_columns * 2, dtype=torch.uint8, device=stored.device)
    for register, (sign, magnitude) in enumerate(_BITS):
        for half in range(2):
            code = (word >> sign + 16 * half & 1) << 3
            for bit, shift in zip((2, 1, 0), magnitude, strict=True):
                code |= (word >> shift + 16 * half & 1) << bit
            codes[..., row + register % 2 * 8, column + register // 2 * 8 + half] = code.to(torch.uint8)
    return codes


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
