"""The draft bench without a GPU: its shapes, its floor, and the row it writes."""

import argparse

import pytest

torch = pytest.importorskip("torch")

from benchmark.kernels import draft_sampler  # noqa: E402
from sgl_lowlatency.bench import draft_timeline  # noqa: E402
from sgl_lowlatency.bench.results import Results  # noqa: E402


def test_shapes():
    assert draft_sampler.parse_shapes("129280x1,32320x4") == ((129280, 1), (32320, 4))
    for text in ("129280", "32320x0", "32320x9", "32322x4", "x4", "0x1"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not VOCABxRANKS with 1 to 8 ranks"):
            draft_sampler.parse_shapes(text)


def test_words():
    parse = draft_sampler.words_of("long", "short")
    assert parse("long,short") == ("long", "short")
    for text in ("", "longer", "long,"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a list of long and short"):
            parse(text)


def test_the_floor_is_the_head_and_markov_w2_once():
    """331 MB of LM head, 16.5 MB of markov_w2, and five rows of each request."""
    assert draft_sampler.floor_bytes(32320, 1) == 32320 * 5120 * 2 + 32320 * 256 * 2 + 5 * (5120 + 256) * 2
    assert draft_sampler.floor_bytes(32320, 2) - draft_sampler.floor_bytes(32320, 1) == 5 * (5120 + 256) * 2


def test_a_row_has_what_a_results_file_needs():
    form, wrong = draft_sampler.Form("short", "early", 4), ["tokens of rank 0 differ in 1 of 10"]
    row = draft_sampler.row_of(32320, 4, 2, False, form, [0.2, 0.21, 0.2], [0.1, 0.1, 0.101], 0.08, wrong)
    results = Results(None, what="kernel", name="x", weights=draft_sampler.WEIGHTS, command=[], commit="0" * 40)
    added = results.add(**row)
    assert (added["ratio"], added["on_floor_share"], added["rows"], added["virtual_ranks"]) == (2.0, 0.8, 10, 4)
    text = draft_sampler.table(results.content)
    assert added["metric"] == "proposal, short walks, early, 4 a graph"
    assert "   32320     4 draft-sampled     2 short walks, early, 4 a graph   200.00   100.00   2.00" in text
    assert text.endswith("tokens of rank 0 differ in 1 of 10")


def test_phases_are_differences_of_the_points():
    """Three launches of two blocks, one step: every point 2 us behind the one before, the second block 1 us later; it never has the last tokens."""
    times = torch.arange(8).mul(2000).add(5000).expand(3, 2, 8).clone()
    times[:, 1] += 1000
    times[:, 1, -2:] = 0
    found = {row["phase"]: row for row in draft_timeline.phases(times)}
    assert found["LM head, the block's"] == {"phase": "LM head, the block's", "median_us": 2.0, "p90_us": 2.0, "max_us": 2.0}
    assert found["begins behind the first block"]["max_us"] == 1.0
    assert found["step 0: wait for all candidates"]["median_us"] == 2.0
    assert found["head, from the first block's begin"]["max_us"] == 7.0
    assert found["launch, from the first block's begin to the last token"]["max_us"] == 14.0
    assert "step 0: latents, barrier" in draft_timeline.table(list(found.values()))
    for wrong, message in ((times[..., :5], "timelines are"), (times.clone().index_fill_(2, torch.tensor([2]), 0), "not passed")):
        with pytest.raises(ValueError, match=message):
            draft_timeline.phases(wrong)
    backwards = times.clone()
    backwards[0, 0, 2] = 1
    with pytest.raises(ValueError, match="ends before it begins"):
        draft_timeline.phases(backwards)
