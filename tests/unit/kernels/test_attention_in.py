"""attention_in's shares and layouts: every unit once, in order; both ops together even, in bytes; shared memory at DeepSeek-V4.1's sizes."""

import pytest
from attention_in_cases import REAL, SMALL

from sgl_lowlatency import _C

A, B = _C.abi.kAttnInA, _C.abi.kAttnInB


def geometry(z):
    return _C.abi.AttnInGeometry(z.hidden, z.lora, z.heads)


@pytest.mark.parametrize("grid", [1, 3, 104, 132, 148])
@pytest.mark.parametrize("sizes", [REAL, SMALL])
def test_shares(sizes, grid):
    splits, columns = -(-sizes.hidden // 1024), {A: min(sizes.hidden, 1024), B: sizes.lora}
    totals = {A: (sizes.lora + 512) // 16 * splits, B: sizes.heads * 32}
    work = [0] * grid
    for op, total in totals.items():
        end = 0
        for block in range(grid):
            begin, count = _C.attn_in_share(geometry(sizes), op, block, grid)
            assert begin == end and count >= 0
            end, work[block] = begin + count, work[block] + count * columns[op] // 128
        assert end == total
    if sizes is REAL:
        assert max(work) - sum(work) / grid < 10  # one unit of wq_b, of 189 on 132 blocks


def test_shared_memory_at_the_served_sizes():
    found = [_C.attn_in_smem(geometry(REAL), rows) for rows in (1, 8, 16, 32, 40, 48)]
    assert all(smem.total_bytes <= 232448 and smem.panel_k == 1280 for smem in found)
    assert [smem.num_stages for smem in found] == [8, 8, 8, 6, 4, 3]


@pytest.mark.parametrize("rows", [1, 5, 48])
def test_hand_over(rows):
    """Words in the order of the struct, each section as large as its formula, in whole vectors."""
    at = _C.attn_in_handover(geometry(REAL), rows)
    begin = 0
    for name, size in (("combined", rows * 2560), ("squares", rows * 40), ("partial", 5 * rows * 1792), ("latent", rows * 640),
                       ("latent_squares", rows * 10)):  # fmt: skip
        assert getattr(at, name) == begin, name
        begin = -(-(begin + size) // 4) * 4
    assert at.total_words == begin
