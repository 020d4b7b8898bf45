"""The routing bench without a GPU: what it compares, on emulated outputs and the oracle's alignment, and the row it writes."""

import pytest

torch = pytest.importorskip("torch")

from benchmark.kernels import bitmap_routing  # noqa: E402
from sgl_lowlatency.bench.results import Results  # noqa: E402
from sgl_lowlatency.kernels.bitmap_routing import BitmapRouting  # noqa: E402
from sgl_lowlatency.kernels.decode_step import EmulationOptions  # noqa: E402
from sgl_lowlatency.reference import routing as oracle  # noqa: E402

CPU = torch.device("cpu")


def compared(planted=0, change=lambda ids, weights, tokens, experts: None):
    """The bench's problems of emulated outputs against the oracle's, of which `change` may change some."""
    (logits,) = bitmap_routing.layer_logits(8, 128, 1, CPU)
    router = BitmapRouting(128, 8, CPU, emulation=EmulationOptions(planted=planted))
    out = router.outputs(8)
    router.route(logits, out)
    choices = oracle.choose(logits, 8, True)
    tokens, experts = oracle.aligned(choices.ids, 128, bitmap_routing.TILE_ROWS)
    ids, weights = choices.ids, choices.weights.float()
    change(ids, weights, tokens, experts)
    return bitmap_routing.problems(out, ids, weights, tokens, experts)


def test_equal_outputs_have_no_problems():
    assert compared() == []


def test_each_difference_is_named():
    def shift(ids, weights, tokens, experts):
        experts[-1] -= 1

    def swap(ids, weights, tokens, experts):
        ids[3, [0, 1]] = ids[3, [1, 0]]

    def scale(ids, weights, tokens, experts):
        weights[2, 2] /= 1.001

    def move(ids, weights, tokens, experts):
        tokens[0], tokens[bitmap_routing.TILE_ROWS] = tokens[bitmap_routing.TILE_ROWS], tokens[0]

    assert "active experts differ" in compared(change=shift)
    assert compared(change=swap) == ["ids differ"]
    assert compared(change=scale) == ["weights differ by 0.001"]
    assert compared(change=move) == ["rows of experts differ"]


def test_planted_bugs_are_problems():
    assert compared(planted=17) == ["rows of experts differ"]  # kShiftedRowBits
    assert "active experts differ" in compared(planted=18)  # kPlaceCountsItself


def test_a_row_has_what_a_results_file_needs():
    row = bitmap_routing.row_of(4, 128, 8, 48, [0.006, 0.0061, 0.006], [0.003, 0.003, 0.0031], [])
    results = Results(None, what="kernel", name="x", weights=bitmap_routing.WEIGHTS, command=[], commit="0" * 40)
    added = results.add(**row)
    assert added["ratio"] == 2.0 and added["kernel"] == "bitmap_routing" and added["rows"] == 4
    text = bitmap_routing.table(results.content)
    assert "    128     8    4     6.00     3.00   2.00" in text and text.endswith("  -")
