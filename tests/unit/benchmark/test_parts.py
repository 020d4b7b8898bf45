import pytest

from benchmark.common import parts


def test_parts_add_up_and_a_failed_one_counts(monkeypatch):
    now = iter([0.0, 2.0, 10.0, 13.0, 20.0, 21.5])
    monkeypatch.setattr(parts.time, "monotonic", lambda: next(now))
    run = parts.Parts()
    with run.part("start"):
        pass
    with run.part("measure"):
        pass
    with pytest.raises(KeyError), run.part("start"):
        raise KeyError
    assert run.seconds() == {"start": 3.5, "measure": 3.0}
    assert str(run) == "seconds: start 4, measure 3"
