"""The draft bench without a GPU: its shapes, its floor, and the row it writes."""

import argparse

import pytest

torch = pytest.importorskip("torch")

from benchmark.kernels import draft_sampler  # noqa: E402
from sgl_lowlatency.bench.results import Results  # noqa: E402


def test_shapes():
    assert draft_sampler.parse_shapes("129280x1,32320x4") == ((129280, 1), (32320, 4))
    for text in ("129280", "32320x0", "32320x9", "32322x4", "x4", "0x1"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not VOCABxRANKS with 1 to 8 ranks"):
            draft_sampler.parse_shapes(text)


def test_walks():
    assert draft_sampler.parse_walks("long,short") == ("long", "short")
    for text in ("", "longer", "long,"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a list of long and short"):
            draft_sampler.parse_walks(text)


def test_the_floor_is_the_head_and_markov_w2_once():
    """331 MB of LM head, 16.5 MB of markov_w2, and five rows of each request."""
    assert draft_sampler.floor_bytes(32320, 1) == 32320 * 5120 * 2 + 32320 * 256 * 2 + 5 * (5120 + 256) * 2
    assert draft_sampler.floor_bytes(32320, 2) - draft_sampler.floor_bytes(32320, 1) == 5 * (5120 + 256) * 2


def test_a_row_has_what_a_results_file_needs():
    row = draft_sampler.row_of(32320, 4, 2, False, "short", [0.2, 0.21, 0.2], [0.1, 0.1, 0.101], 0.08, ["tokens of rank 0 differ in 1 of 10"])
    results = Results(None, what="kernel", name="x", weights=draft_sampler.WEIGHTS, command=[], commit="0" * 40)
    added = results.add(**row)
    assert (added["ratio"], added["on_floor_share"], added["rows"], added["virtual_ranks"]) == (2.0, 0.8, 10, 4)
    text = draft_sampler.table(results.content)
    assert added["metric"] == "proposal, short walks"
    assert "   32320     4 draft-sampled     2 short   200.00   100.00   2.00" in text and text.endswith("tokens of rank 0 differ in 1 of 10")
