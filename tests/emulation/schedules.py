"""What the tests of ordering ask of an emulated step: the scheduler's kinds of starvation, no race, the same bits under every schedule."""

from decode_step_cases import same_bits

STARVATION = {"even": 0, "starved block": 1, "starved warp": 2, "favoured block": 3}
UNORDERED_CLEAR, CLEAR_OVERTAKES = "word used with no order after its clear", "clear overtakes read"


def races_of(runner):
    """(the newest launch's races, one line each; their number, also of those that are not listed)."""
    report = runner.kernel.last_report
    return [f"{r.kind} {r.region}+{r.offset} blocks {r.first_block} {r.second_block}" for r in report.races], report.num_races


def require_the_same_under_every_schedule(runner, options, inputs):
    """options: the runner's, whose seed is changed."""
    first = None
    for seed in range(6):
        options.seed = seed
        outputs = runner.run(inputs)
        assert races_of(runner) == ([], 0), f"seed {seed}"
        first = first or outputs
        assert same_bits(outputs, first), f"seed {seed}"
