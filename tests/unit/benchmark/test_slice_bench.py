"""The benches of attention_in and attention_out without a GPU: their floors, and the rows they write."""

import pytest

torch = pytest.importorskip("torch")

from benchmark.common import slice_bench  # noqa: E402
from benchmark.kernels import attention_in, attention_out  # noqa: E402
from sgl_lowlatency.bench.results import Results  # noqa: E402


def test_the_floors_read_everything_once():
    """wo_a is 67.1 MB, wo_b 41.9 and 0.16 of scales, the mix 2.0; wqkv_a 9.2, wq_b 41.9 and 0.2 of scales. A row has 40 KiB of streams."""
    assert attention_out.floor_bytes(1) == 8192 * 4096 * 2 + 5120 * 8192 + 160 * 256 * 4 + 24 * 20480 * 4 + 65536 + 81920 + 10240
    assert attention_out.floor_bytes(48) - attention_out.floor_bytes(47) == 65536 + 81920 + 10240
    assert attention_in.floor_bytes(1) == 1792 * 5120 + 32768 * 1280 + (56 * 160 + 1024 * 40) * 4 + 40960 + 10240 + 2560 + 65536 + 584
    assert attention_in.floor_bytes(48) - attention_in.floor_bytes(47) == 40960 + 10240 + 2560 + 65536 + 584


@pytest.mark.parametrize("bench", [attention_in, attention_out])
def test_a_row_has_what_a_results_file_needs(bench):
    points = {name: [i / 2, float(i)] for i, name in enumerate(bench.POINTS)}
    floor = 111_000_000
    row = slice_bench.row_of("attention_x", 1, floor, [0.048, 0.05, 0.048], 4640.0, points, ["MISS out"])
    results = Results(None, what="kernel", name="x", weights=bench.WEIGHTS, command=[], commit="0" * 40)
    assert results.add(**row)["on_floor_share"] == pytest.approx(floor / 4640e9 / 48e-6, abs=0.01)
    text = slice_bench.table(results.content)
    assert "   1    48.00" in text and text.endswith(f"{bench.POINTS[-1]} 2.5 5.0") and "MISS out" in text


def test_the_case_of_a_bench_is_the_models():
    assert (attention_out.SIZES.latent, attention_out.SIZES.group_width) == (8192, 4096)
    assert attention_in.PAGE_BYTES % 576 == 0 and 0 <= attention_in.PAGE_BYTES - 256 * 584 < 576
