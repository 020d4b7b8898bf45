"""What benches ask of launches, on tensors of the host: times of points; replays that leave too little, or something else."""

import pytest

torch = pytest.importorskip("torch")

from benchmark.common import launches  # noqa: E402


def test_times_of_points_are_from_the_first_blocks_begin():
    names = tuple("abcdefgh")
    trace = torch.tensor([[1000 + 100 * i for i in range(8)], [1500 + 200 * i for i in range(8)], [1100 + 100 * i for i in range(8)]])
    times = launches.point_times(trace, names)
    assert times["a"] == [0.1, 0.5] and times["h"] == [0.8, 1.9] and tuple(times) == names


def filled(value):
    return [torch.full((3, 2), value, dtype=torch.bfloat16), torch.full((2,), value), torch.full((4,), int(value), dtype=torch.uint8)]


def replay(results, values, leave_out=()):
    for i, tensor in enumerate(results):
        if i not in leave_out:
            tensor.fill_(values[i])


@pytest.mark.parametrize(("values", "leave_out", "is_well"), [
    ((2, 2, 2), (), True), ((2, 2, 3), (), False), ((2, 2, 2), (0,), False), ((2, 2, 2), (1,), False), ((2, 2, 2), (2,), False),
])  # fmt: skip
def test_a_replay_must_leave_all_of_it(values, leave_out, is_well):
    """Also what was there already."""
    results = filled(2.0)
    found = launches.replay_problems(lambda: replay(results, values, leave_out), results, filled(2.0))
    assert found == ([] if is_well else ["a replay leaves something else than the first launch"])
