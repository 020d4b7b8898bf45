"""The benches of attention_in and attention_out without a GPU: their floors, the rows they write, and graphs that leave something out."""

from types import SimpleNamespace

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


class Ours:
    """Doubles what it has been given."""

    def __init__(self):
        self.results, self.given = [torch.zeros(3), torch.zeros(2)], [torch.ones(3), torch.ones(2)]

    def launch(self, num=2):
        for to, given in list(zip(self.results, self.given, strict=True))[:num]:
            to.copy_(2 * given)

    def problems(self):
        return [] if self.results[0].eq(2).all() else ["MISS"]


@pytest.mark.parametrize(("num_replayed", "problems"), [(2, []), (1, ["a replay leaves something else than the first launch"])])
def test_a_graph_that_leaves_out_a_result_is_a_problem(monkeypatch, num_replayed, problems):
    """Although the result of the launch before it is there still."""
    ours = Ours()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(slice_bench.timing, "capture", lambda launch: SimpleNamespace(replay=lambda: ours.launch(num_replayed)))

    def in_turn(runs, groups, target_ms):
        ours.launch()  # whatever the graph leaves
        return [[0.5] * groups for _ in runs]

    monkeypatch.setattr(slice_bench.timing, "in_turn", in_turn)
    assert slice_bench.measure(ours, 2, 3, 1.0) == ([0.25] * 3, problems)


def test_the_case_of_a_bench_is_the_models():
    assert (attention_out.SIZES.latent, attention_out.SIZES.group_width) == (8192, 4096)
    assert attention_in.PAGE_BYTES % 576 == 0 and 0 <= attention_in.PAGE_BYTES - 256 * 584 < 576
