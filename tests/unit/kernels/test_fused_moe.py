"""Shares of fused_moe's routed units: all of them once, in order, and even together with the static ones. The ring's depth."""

import pytest

from sgl_lowlatency import _C


@pytest.mark.parametrize("grid", [1, 3, 104, 132])
@pytest.mark.parametrize(("shared", "tiles"), [(144, 144), (80, 80), (7, 3), (864, 144)])
def test_routed_shares(grid, shared, tiles):
    cost = _C.abi.kMoeSharedCost
    for jobs in (0, 1, 2, 6, 35, 200):
        total = jobs * tiles
        shares = [_C.moe_routed_share(total, shared, block, grid) for block in range(grid)]
        end = 0
        for begin, count in shares:
            assert begin == end and count >= 0
            end = begin + count
        assert end == total
        work = [cost * _C.even_share(shared, block, grid)[1] + count for block, (_, count) in enumerate(shares)]
        mean = (total + cost * shared) / grid
        if mean > cost * (-(-shared // grid)) + 2:  # no block has more static work than its part
            assert max(work) - mean < 1


def test_the_ring_takes_what_is_left():
    """Of DeepSeek-V4.1: seven stages at one row, where the panel is one row, four where it is eight; a DSpark stage's experts the same."""
    geometry = _C.abi.MoeGeometry(5120, 2304, 384, 6)
    layouts = [_C.moe_smem(geometry, rows) for rows in range(1, 49)]
    assert [at.num_stages for at in layouts[:8]] == [7, 7, 6, 6, 5, 5, 5, 4] and {at.num_stages for at in layouts[8:]} == {4}
    assert all(at.total_bytes <= _C.abi.kMoeBlockBytes for at in layouts)
    assert _C.moe_smem(_C.abi.MoeGeometry(128, 128, 32, 2), 48).num_stages == 7
