"""The phases of a layer from points whose times are given."""

import pytest

torch = pytest.importorskip("torch")

from sgl_lowlatency.bench import timeline  # noqa: E402

ORDER = list(timeline.POINTS)


def filled(blocks=2, layers=3):
    """Point i of a layer comes 1,000 i ns after the layer's begin, of block b i (1,000 + b)."""
    times = torch.zeros(blocks, layers, len(ORDER), dtype=torch.int64)
    for name, point in timeline.POINTS.items():
        for block in range(blocks):
            times[block, :, point] = 5_000_000 + torch.arange(layers) * 100_000 + ORDER.index(name) * (1_000 + block)
    return times


def test_phases_follow_each_other_and_make_up_the_layer():
    *parts, layer = timeline.phases(filled(blocks=1))
    of_layer = parts[: len(timeline.PHASES)]
    assert layer.name == "layer" and layer.mean_us == 14.0 and layer.share == 1.0
    assert [phase.name for phase in of_layer] == [name for name, *_ in timeline.PHASES]
    assert all(end == begin for (*_, end), (_, _, begin, _) in zip(timeline.PHASES, timeline.PHASES[1:]))
    assert sum(phase.mean_us for phase in of_layer) == pytest.approx(14.0) and sum(phase.share for phase in of_layer) == pytest.approx(1.0)
    assert {phase.name: phase.median_us for phase in parts}["gate_up: tiles, upkeep"] == 4.0 and parts[-1].median_us == 1.0


def test_blocks_are_taken_together_and_the_first_layer_is_left_out():
    times = filled()
    times[:, 0, 1:] += 7_000_000
    wait = timeline.phases(times)[0]
    assert wait.is_wait and wait.median_us == pytest.approx(1.0005) and wait.p90_us == pytest.approx(1.001)


@pytest.mark.parametrize(("change", "text"), [
    (lambda t: t[1, 2].zero_(), "a point of the timeline was not passed"), (lambda t: t[0, 1, 4].sub_(50_000), "ends before it begins"),
])
def test_a_timeline_that_is_none_is_refused(change, text):
    times = filled()
    change(times)
    with pytest.raises(ValueError, match=text):
        timeline.phases(times)
    with pytest.raises(ValueError, match="a timeline is"):
        timeline.phases(times[..., :3])


def test_the_table_has_both_ranks_and_what_they_wait():
    found = [row for rank in (0, 1) for row in timeline.rows(filled(blocks=rank + 1), rank)]
    lines = timeline.table(found).splitlines()
    assert lines[0].count("rank ") == 2 and len(lines) == len(timeline.PHASES) + 4
    assert lines[1].startswith("* qkv: wait for the stream") and lines[-1] == "* waits; together 6.00 on rank 0, 6.00 on rank 1"
