"""attention_in's shares and layouts: every unit once, in order; units even; shared memory at DeepSeek-V4.1's sizes."""

import pytest
from attention_in_cases import REAL, SMALL

from sgl_lowlatency import _C

A, B = _C.abi.kAttnInA, _C.abi.kAttnInB


def geometry(z):
    return _C.abi.AttnInGeometry(z.hidden, z.lora, z.heads)


def splits(z, grid):
    """Of wqkv_a: as many as make no more units than blocks."""
    return min(max(grid // ((z.lora + 512) // 128), 1), z.hidden // 128)


@pytest.mark.parametrize("grid", [1, 3, 104, 132, 148])
@pytest.mark.parametrize("sizes", [REAL, SMALL])
def test_shares(sizes, grid):
    totals = {A: (sizes.lora + 512) // 128 * splits(sizes, grid), B: sizes.heads * 4}
    for op, total in totals.items():
        end, most = 0, 0
        for block in range(grid):
            begin, count = _C.attn_in_share(geometry(sizes), op, block, grid)
            assert begin == end and count >= 0
            end, most = begin + count, max(most, count)
        assert end == total and most == -(-total // grid)
    if sizes is REAL and grid == 132:  # stages of 128 x 128: 5 of 4.24 on average, 20 of 19.4
        assert -(-40 // splits(sizes, grid)) == 5 and splits(sizes, grid) == 9


def test_shared_memory_at_the_served_sizes():
    found = [_C.attn_in_smem(geometry(REAL), rows) for rows in (1, 8, 16, 32, 40, 48)]
    assert all(smem.total_bytes <= 232448 and smem.panel_k == 1280 for smem in found)
    assert [smem.num_stages for smem in found] == [12, 12, 11, 9, 7, 6]


@pytest.mark.parametrize("rows", [1, 5, 48])
def test_hand_over(rows):
    """Words in the order of the struct, each section as large as its formula, in whole vectors."""
    at = _C.attn_in_handover(geometry(REAL), rows, 132)
    begin = 0
    for name, size in (("combined", rows * 2560), ("squares", rows * 40), ("partial", 9 * rows * 1792), ("latent", rows * 640),
                       ("latent_squares", rows * 10)):  # fmt: skip
        assert getattr(at, name) == begin, name
        begin = -(-(begin + size) // 4) * 4
    assert at.total_words == begin
