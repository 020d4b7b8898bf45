"""Shares of fused_moe's routed units: all of them once, in order, and even together with the static ones."""

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
