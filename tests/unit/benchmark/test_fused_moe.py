"""The bench of fused_moe without a GPU: its floor, and the row it writes."""

import pytest

torch = pytest.importorskip("torch")

from benchmark.kernels import fused_moe  # noqa: E402
from sgl_lowlatency.bench.results import Results  # noqa: E402


def test_the_floor_reads_everything_once():
    """Of one row: six experts of 18.8 MB, the shared one of 35.5, a router of 3.9."""
    assert fused_moe.expert_bytes() == 4608 * 2560 + 5120 * 1152 + 4608 * 160 + 5120 * 72
    router, shared = 384 * 5120 * 2, 4608 * 5120 + 5120 * 2304 + (144 * 160 + 160 * 72) * 4
    assert fused_moe.floor_bytes(1, 6) == router + shared + 6 * fused_moe.expert_bytes() + 2 * 5120 * 2
    assert fused_moe.floor_bytes(48, 7) - fused_moe.floor_bytes(48, 6) == fused_moe.expert_bytes()


POINTS_US = {name: [i / 2, float(i)] for i, name in enumerate(fused_moe.POINTS)}


def test_a_row_has_what_a_results_file_needs():
    row = fused_moe.row_of(1, 6.0, [], [0.05, 0.051, 0.05], [0.06], 4640.0, POINTS_US, ["MISS out"])
    results = Results(None, what="kernel", name="x", weights=fused_moe.WEIGHTS, command=[], commit="0" * 40)
    added = results.add(**row)
    assert added["on_floor_share"] == pytest.approx(0.65, abs=0.01) and "ratio" not in added
    assert "   1     6.0              -    50.00    60.00" in fused_moe.table(results.content)
    results.add(**fused_moe.row_of(6, 34.5, [0.2], [0.2], [0.21], 4640.0, POINTS_US, []))
    assert fused_moe.table(results.content).endswith("down 3.0 6.0, sums 3.5 7.0")
    assert fused_moe.table(results.content).splitlines()[-2].split()[:5] == ["6", "34.5", "200.00", "200.00", "210.00"]
