"""attention_in under adversarial schedules: no access that nothing orders, the same bits whatever the schedule; deadlines that name what is
missing."""

import pytest
import torch
from attention_in_cases import SMALL, Layer
from schedules import STARVATION

from sgl_lowlatency.kernels.attention_in import AttentionInSizes
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import AttentionInFault

MISSING_AWAIT, WITHHELD_SIGNAL, RING_NO_WAIT, NO_AWAIT_OF_PREVIOUS = 2, 3, 9, 40  # dialect::Planted
JOINED = AttentionInSizes(1280, 128, 1)  # two splits of K


def layer_of(sizes=SMALL, **options):
    return Layer(sizes, grid=3, emulation=EmulationOptions(**options))


@pytest.mark.parametrize("starvation", STARVATION.values(), ids=STARVATION.keys())
@pytest.mark.parametrize(("sizes", "rows"), [(SMALL, 1), (SMALL, 10), (JOINED, 20), (JOINED, 40)])
def test_the_same_under_every_schedule(starvation, sizes, rows):
    layer = layer_of(sizes, check_order=True, starvation=starvation)
    inputs, first = layer.inputs(rows), None
    for seed in range(4):
        layer.kernel.emulation.seed = seed
        layer.run(*inputs)
        report = layer.kernel.last_report
        assert ([f"{r.kind} {r.region}+{r.offset}" for r in report.races], report.num_races) == ([], 0), seed
        first = (layer.x, layer.q, layer.cache.pages) if first is None else first
        assert all(map(torch.equal, (layer.x, layer.q, layer.cache.pages), first)), seed
    assert layer.problems(*inputs) == []


@pytest.mark.parametrize("planted", [MISSING_AWAIT, RING_NO_WAIT])
def test_what_is_not_waited_for_is_missed(planted):
    """By the checks of order, or by a result that is wrong."""
    found = 0
    for seed in range(4):
        layer = layer_of(check_order=True, planted=planted, seed=seed)
        inputs = layer.inputs(10)
        try:
            layer.run(*inputs)
        except RuntimeError as error:
            assert isinstance(error, AttentionInFault) or "attention_in in emulation: " in str(error)
            found += 1
            continue
        found += layer.kernel.last_report.num_races + len(layer.problems(*inputs))
    assert found > 0


def test_generations_alternate_and_are_cleared():
    """Every word of the generation that the next launch takes is clear, whatever rows the ones before had."""
    layer = layer_of(JOINED)
    words = layer.kernel._words
    for launch, rows in enumerate((16, 3, 48, 20, 1)):
        layer.run(*layer.inputs(rows))
        following = layer.kernel._workspace[(launch + 1) % 2 * words :][:words]
        assert following.eq(-1).all(), launch
        assert not layer.kernel._workspace[launch % 2 * words :][:words].eq(-1).all()


def test_a_word_that_never_comes_ends_the_launch_and_is_named():
    """The first combined values; who waits for what follows them has begun as early, and may be named instead."""
    layer = layer_of(planted=WITHHELD_SIGNAL)
    layer.layer.params.deadline_ns = 1_000_000
    inputs = layer.inputs(3)
    words = r"attention_in stopped: rank 0, SM ., block . waited 0.00 s for word \d+ of (combined|squares|partial|latent|latent_squares), which no"
    with pytest.raises(AttentionInFault, match=words):
        layer.run(*inputs)
    with pytest.raises(AttentionInFault, match="an earlier launch failed: attention_in stopped"):
        layer.run(*inputs)


def test_what_the_launch_in_front_writes_is_not_touched_before_it_is_over():
    layer = layer_of(planted=NO_AWAIT_OF_PREVIOUS)
    with pytest.raises(RuntimeError, match="before await_previous_launch, in a kernel behind another"):
        layer.run(*layer.inputs(3))
