"""attention_out's shares and layouts: every unit once, in order; units even; shared memory at DeepSeek-V4.1's sizes."""

import pytest
from attention_out_cases import REAL, SMALL

from sgl_lowlatency import _C

A, B = _C.abi.kAttnOutA, _C.abi.kAttnOutB


def geometry(z):
    return _C.abi.AttnOutGeometry(z.hidden, z.heads, z.head_dim, z.rope_dim, z.groups, z.lora)


def splits(z, op, rows, grid):
    """Of wo_a one a panel; of wo_b as many as make no more units than blocks."""
    if op == B:
        return min(max(grid // (z.hidden // 128), 1), z.latent // 128)
    return -(-z.group_width // (4096 if rows <= 8 else 2048 if rows <= 16 else 1024))


@pytest.mark.parametrize("grid", [1, 3, 104, 132, 148])
@pytest.mark.parametrize("rows", [1, 9, 48])
@pytest.mark.parametrize("sizes", [REAL, SMALL])
def test_shares(sizes, rows, grid):
    totals = {A: sizes.latent // 16 * splits(sizes, A, rows, grid), B: sizes.hidden // 128 * splits(sizes, B, rows, grid)}
    for op, total in totals.items():
        end, most = 0, 0
        for block in range(grid):
            begin, count = _C.attn_out_share(geometry(sizes), op, rows, block, grid)
            assert begin == end and count >= 0
            end, most = begin + count, max(most, count)
        assert end == total and most == -(-total // grid)


def test_shared_memory_at_the_served_sizes():
    """A panel of all the columns that fit, and a ring that covers what is on its way: 64 KB and more."""
    found = {rows: _C.attn_out_smem(geometry(REAL), rows) for rows in (1, 6, 8, 9, 16, 17, 32, 33, 48)}
    assert [smem.panel_k for smem in found.values()] == [4096] * 3 + [2048] * 2 + [1024] * 4
    assert all(smem.total_bytes <= 232448 for smem in found.values())
    assert [smem.num_stages for smem in found.values()] == [12, 10, 9, 11, 9, 10, 7, 7, 4]


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 48])
def test_hand_over(rows):
    """Words in the order of the struct, each section as large as its formula."""
    at, z = _C.attn_out_handover(geometry(REAL), rows, 132), REAL
    a, b = splits(z, A, rows, 132), splits(z, B, rows, 132)
    assert b == 3
    sizes = (160 * rows * 28, rows * 24, a * rows * z.latent if a > 1 else 0, rows * z.latent // 2, b * rows * z.hidden, rows * 40)
    begin = 0
    for name, size in zip(("mix", "coefficients", "partial", "latent", "output", "squares"), sizes, strict=True):
        assert getattr(at, name) == begin, name
        begin += size
    assert at.total_words == begin
