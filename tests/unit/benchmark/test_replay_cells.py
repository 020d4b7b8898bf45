"""A replay goes on where it stopped, and never mixes what was not measured in turn."""

import pytest
from replay_runs import PLAN, cell, folder, run

from benchmark.agentic import cells
from benchmark.agentic.arms import OFF, ON


def test_a_pair_is_done_when_both_arms_of_one_start_are(tmp_path):
    cells.save(tmp_path, cell(OFF, 1, session="first"), run(5.0))
    assert not cells.done(tmp_path, 1, 1)
    cells.save(tmp_path, cell(ON, 1, session="second"), run(5.0))
    assert not cells.done(tmp_path, 1, 1) and cells.every(tmp_path) == []
    cells.save(tmp_path, cell(ON, 1, session="first"), run(4.0))
    assert cells.done(tmp_path, 1, 1)
    assert [(c.arm, rows[0].gaps_ms[0]) for c, rows in cells.every(tmp_path)] == [(OFF, 5.0), (ON, 4.0)]
    cells.clear(tmp_path, 1, 1)
    assert not cells.done(tmp_path, 1, 1)


def test_a_cell_cut_short_is_not_done(tmp_path):
    folder(tmp_path, [(5.0, 4.0)])
    (cells.folder(tmp_path, 1, 1, ON) / "cell.json").unlink()
    assert not cells.done(tmp_path, 1, 1)
    (cells.folder(tmp_path, 1, 1, ON) / "cell.json").write_text('{"arm": "on"}')
    with pytest.raises(ValueError, match="cell.json: .*missing"):
        cells.done(tmp_path, 1, 1)


def test_another_plan_in_the_same_folder_is_refused_with_every_difference(tmp_path):
    cells.keep_plan(tmp_path, PLAN | {"gpu": "NVIDIA H800"})
    folder(tmp_path, [(5.0, 4.0)])  # nothing had been run by the first plan
    cells.keep_plan(tmp_path, dict(PLAN))
    with pytest.raises(cells.PlanRefused) as refused:
        cells.keep_plan(tmp_path, PLAN | {"gpu": "NVIDIA H100", "traces_sha256": "u"})
    assert "- gpu was NVIDIA H200, is NVIDIA H100" in str(refused.value) and "- traces_sha256 was tttt" in str(refused.value)
    assert "model was" not in str(refused.value)
