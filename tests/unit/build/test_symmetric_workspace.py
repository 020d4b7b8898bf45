"""Symmetric workspaces of two and four processes over gloo: ranks agree and share memory, or refuse together and say why."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_lowlatency.build.agreement import DisagreementError, differences, require_agreement


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    """What each rank of workspace_rank.py says of each scenario."""
    script, store = Path(__file__).with_name("workspace_rank.py"), tmp_path_factory.mktemp("store") / "store"
    command = [sys.executable, str(script)]
    processes = [
        subprocess.Popen([*command, str(rank), str(request.param), str(store)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(request.param)
    ]
    found = []
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, out + errors
        found.append(json.loads(out.strip().splitlines()[-1]))
    return found


def test_ranks_that_agree_share_their_workspaces(results):
    size = len(results)
    for rank, result in enumerate(results):
        outcome = result["agree"]
        assert outcome["found"] == [100 + other for other in range(size)]
        assert (outcome["unwritten"], outcome["state"]) == (0xFFFFFFFF, 0)
        assert (outcome["rank"], outcome["distinct"]) == (rank, size)
        assert outcome["files"] == [], "a file with a name outlives its processes"


@pytest.mark.parametrize(
    ("scenario", "lines"),
    [
        ("grid", ["grid 64, not 66"]),
        ("plan", ["plan_hash abd, not abc"]),
        ("widths", ["widths [1, 2], not [1, 2, 4]"]),
        ("spec", ["spec llama 0.5.23, not qwen3 0.5.23", "grid 1, not 66"]),
    ],
)
def test_ranks_that_differ_refuse_together_and_name_who_differs_in_what(results, scenario, lines):
    last = len(results) - 1
    wanted = "symmetric workspace: the ranks differ:\n  - " + "\n  - ".join(f"rank {last} has {line}" for line in lines)
    assert [result[scenario].get("refused") for result in results] == [wanted] * len(results)


def test_sizes_that_differ_are_named(results):
    last = len(results) - 1
    for result in results:
        text = result["size"]["refused"]
        assert f"rank {last} has max_rows 8, not 4" in text and f"rank {last} has bytes " in text


def test_a_mapping_that_is_not_what_its_owner_claims_is_refused_by_all(results):
    last = len(results) - 1
    for result in results:
        text = result["foreign"]["refused"]
        assert text.startswith("symmetric workspace: mappings failed:")
        for other in range(last):
            assert f"rank {other}: what is mapped of rank {last} is not the workspace that it claims" in text


def test_a_mapping_that_cannot_be_read_is_refused_by_all(results):
    last = len(results) - 1
    for result in results:
        text = result["unreadable"]["refused"]
        assert text.startswith("symmetric workspace: mappings failed:") and f"rank {last}: cannot map rank 0: an illegal address" in text


def test_a_late_rank_is_waited_for(results):
    assert all("refused" not in result["late"] for result in results)
    assert results[1]["late"]["seconds"] >= 1.0


def test_a_rank_that_never_comes_is_named_by_every_other_when_the_deadline_is_over(results):
    last = len(results) - 1
    assert results[last]["never"]["absent"]
    for rank, result in enumerate(results[:-1]):
        assert result["never"]["refused"] == f"symmetric workspace: nothing came from rank {last} within 1 s (rank {rank} waited)"
        assert 0.9 < result["never"]["seconds"] < 3.0


def test_the_odd_one_out_is_named_and_of_two_the_higher_rank():
    claims = [{"grid": 2, "spec": "a"}, {"grid": 1, "spec": "a"}, {"grid": 1, "spec": "b"}]
    assert differences(claims) == ["rank 0 has grid 2, not 1", "rank 2 has spec b, not a"]
    assert differences([{"grid": 1}, {"grid": 2}]) == ["rank 1 has grid 2, not 1"]
    assert differences([{"grid": 1}, {"grid": 1, "more": 3}]) == ["rank 1 has more 3, not None"]
    with pytest.raises(DisagreementError, match=r"^test: the ranks differ:\n  - rank 1 has grid 2, not 1$"):
        require_agreement([{"grid": 1}, {"grid": 2}], "test")
    require_agreement([{"grid": 1}, {"grid": 1}], "test")
