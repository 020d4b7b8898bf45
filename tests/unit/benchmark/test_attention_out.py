"""The bench of attention_out without a GPU: its floor, and the row it writes."""

import pytest

torch = pytest.importorskip("torch")

from benchmark.kernels import attention_out  # noqa: E402
from sgl_lowlatency.bench.results import Results  # noqa: E402


def test_the_floor_reads_everything_once():
    """wo_a is 67.1 MB, wo_b 41.9 and 0.16 of scales, the mix 2.0; a row has 64 KiB of heads, 80 of streams and 10 of its next input."""
    assert attention_out.floor_bytes(1) == 8192 * 4096 * 2 + 5120 * 8192 + 160 * 256 * 4 + 24 * 20480 * 4 + 65536 + 81920 + 10240
    assert attention_out.floor_bytes(48) - attention_out.floor_bytes(47) == 65536 + 81920 + 10240


def test_a_row_has_what_a_results_file_needs():
    points = {name: [i / 2, float(i)] for i, name in enumerate(attention_out.POINTS)}
    row = attention_out.row_of(1, [0.048, 0.05, 0.048], 4640.0, points, ["MISS out"])
    results = Results(None, what="kernel", name="x", weights=attention_out.WEIGHTS, command=[], commit="0" * 40)
    assert results.add(**row)["on_floor_share"] == pytest.approx(0.5, abs=0.01)
    text = attention_out.table(results.content)
    assert "   1    48.00" in text and text.endswith("post 2.0 4.0, norm 2.5 5.0") and "MISS out" in text
