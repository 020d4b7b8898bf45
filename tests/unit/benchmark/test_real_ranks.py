"""The benchmarks of real ranks without a GPU: two processes over gloo whose emulated ranks share workspaces, and what is made of what they say."""

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from benchmark.common import ranks  # noqa: E402
from benchmark.kernels import parallel_step, peer_sums, rank_proposals, ranks_check  # noqa: E402
from sgl_lowlatency import config  # noqa: E402
from sgl_lowlatency.bench import timeline  # noqa: E402
from sgl_lowlatency.bench.inputs import Inputs, Pool  # noqa: E402
from sgl_lowlatency.bench.results import Results  # noqa: E402
from sgl_lowlatency.bench.shapes import PRESETS, Shape  # noqa: E402
from sgl_lowlatency.build.device_limits import EMULATED_SHARED_MEMORY_BYTES, DeviceLimits  # noqa: E402
from sgl_lowlatency.kernels.virtual_ranks import virtual_groups  # noqa: E402

SHAPE = Shape(2, 128, 4, 2, 64, 256, 512, 64, 1e-6, False)


def run(module, name, folder, repo_root, *words):
    """(the results file, what was printed) of a benchmark of two emulated ranks."""
    env = os.environ | {"SGL_LOWLATENCY_EMULATE": "1", "PYTHONPATH": os.pathsep.join([str(repo_root / "src"), str(repo_root)])}
    command = [sys.executable, "-m", module.MODULE, "--device", "cpu", "--out", str(folder), "--commit", "0" * 40, "--deadline", "200", *words]
    done = subprocess.run(command, cwd=repo_root, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / f"{name}.json").read_text()), done.stdout


def test_a_rank_that_fails_is_the_status_whoever_still_runs(tmp_path, monkeypatch):
    """Rank 0 hangs, rank 1 ends with 3."""
    (tmp_path / "one_hangs.py").write_text("import sys, time\nif sys.argv[2] == '1':\n    sys.exit(3)\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert ranks.run("one_hangs", [], 2, 60.0) == 3


def test_a_step_on_two_ranks_served_and_timed(tmp_path, repo_root):
    words = ("--models", "qwen3-tiny", "--layers", "2", "--rows", "2", "--contexts", "9", "--groups", "1", "--group-ms", "0",
             "--kernel-deadline", "120")  # fmt: skip
    content, printed = run(parallel_step, "kernel-parallel-step", tmp_path, repo_root, *words)
    steps = [row for row in content["rows"] if row["metric"] == "step"]
    assert [row["arm"] for row in steps] == ["whole", "served", "timed"]
    assert all(row["problems"] == [] and len(row["by_rank_ms"]) == 2 for row in steps)
    (row,) = [row for row in content["rows"] if row["metric"] == "timeline"]
    layers = {phase["rank"]: phase["mean_us"] for phase in row["phases"] if phase["phase"] == "layer"}
    assert row["problems"] == [] and layers.keys() == {0, 1} and all(mean > 0 for mean in layers.values())
    for rank, mean in layers.items():
        of_layer = {name for name, *_ in timeline.PHASES}
        parts = sum(phase["mean_us"] for phase in row["phases"] if phase["rank"] == rank and phase["phase"] in of_layer)
        assert parts == pytest.approx(mean, rel=1e-3, abs=0.02)
    assert "--rank" not in content["command"] and "qwen3-tiny, 2 rows of 9\nus a layer" in printed


def test_launches_end_and_a_killed_process_stops_the_other(tmp_path, repo_root):
    words = ("--cases", "launches,killed", "--launches", "20", "--per-graph", "5", "--layers", "2", "--after", "0.2", "--kernel-deadline", "8")
    content, _ = run(ranks_check, "ranks-check", tmp_path, repo_root, *words)
    launches, killed = content["rows"]
    assert launches["launches"] == 20 and launches["problems"] == killed["problems"] == []
    assert killed["statuses"] == [3] and "decode_step stopped: rank 0, " in killed["records"][0] and "rank 1's " in killed["records"][0]


def test_proposals_of_two_processes_and_a_killed_one(tmp_path, repo_root):
    words = ("--cases", "proposals,killed-proposals", "--proposals", "6", "--groups", "1", "--group-ms", "0", "--after", "0.2",
             "--kernel-deadline", "8")  # fmt: skip
    content, _ = run(ranks_check, "ranks-check", tmp_path, repo_root, *words)
    proposals, killed = content["rows"]
    assert proposals["problems"] == killed["problems"] == [] and proposals["proposals"] == proposals["compared_with_one_rank"] == 6
    assert all(proposals[name].keys() == {"1", "2", "4"} and all(us[0] > 0 for us in proposals[name].values()) for name in ("us", "one_rank_us"))
    assert killed["statuses"] == [3] and "draft_sampler stopped: rank 0, " in killed["records"][0] and " of rank 1 to answer" in killed["records"][0]


def test_pushed_sums_against_a_collective(tmp_path, repo_root):
    words = ("--rows", "3", "--hidden", "128", "--k", "256", "--layers", "2", "--groups", "1", "--group-ms", "0", "--kernel-deadline", "120")
    content, printed = run(peer_sums, "kernel-peer-sums", tmp_path, repo_root, *words)
    (row,) = content["rows"]
    assert row["against"] == "nccl" and row["problems"] == [] and row["ratio"] > 0 and content["notes"] == "SGLang's all-reduce needs GPUs"
    assert "its all-reduce alone" in printed


class Alone(ranks.Place):
    """A rank without others, and without their processes."""

    def barrier(self):
        pass

    def gather(self, value):
        return [value]


@pytest.fixture
def rank(monkeypatch):
    """A begun case of a rank alone."""
    monkeypatch.setattr(parallel_step, "device_limits", lambda _device: DeviceLimits(3, EMULATED_SHARED_MEMORY_BYTES, "emulation"))
    def meet(name, num_tokens, plans, device, group, deadline_s):
        return virtual_groups(1, max(plans), SHAPE.hidden, num_tokens, device)[0]

    monkeypatch.setattr(parallel_step, "meet", meet)
    one = parallel_step.Rank(Alone(0, 1, torch.device("cpu"), None), "tiny", SHAPE, (2,))
    pool = Pool(SHAPE, 2, 9, torch.device("cpu"))
    one.attach(pool)
    for arm in one.arms:
        arm.begin(Inputs.make(SHAPE, pool, 2, 9, torch.device("cpu")))
    return one


def test_a_step_with_other_bits_is_named(rank):
    assert rank.problems() == []
    timed = next(arm for arm in rank.arms if arm.name == "timed")

    def spoiled():
        timed.launch()
        timed.hidden[0, 3] *= 1.02
        timed.logits[1, 0] = float("nan")

    timed.replay = spoiled
    assert rank.problems() == [
        "rank 0: timed, replayed: logits are not written in full", "other bits than served, eager on rank 0: timed, replayed on rank 0",
    ]


def test_a_step_far_from_the_whole_models_is_named(rank, monkeypatch):
    monkeypatch.setattr(parallel_step, "HIDDEN_RELATIVE_L2", -1.0)
    assert len([what for what in rank.problems() if "from the whole step's" in what]) == 2 * (len(rank.arms) - 1)


@pytest.fixture
def checked(monkeypatch):
    """Proposals of a rank alone, beside those of itself."""
    monkeypatch.setenv("SGL_LOWLATENCY_EMULATE", "1")
    monkeypatch.setenv("SGL_LOWLATENCY_SELF_CHECK", "0")
    config.get.cache_clear()
    yield rank_proposals.Checked(Alone(0, 1, torch.device("cpu"), None), 120.0)
    config.get.cache_clear()


LOGITS = 4 * 5 * rank_proposals.SMALL_COLUMNS


@pytest.mark.parametrize(("spoil", "wrong"), [
    (lambda one: None, []),
    (lambda one: one.step_logits[1, 2, 7:9].neg_(), [f"rank 0's columns of the step logits differ in 2 of {LOGITS}"]),
    (lambda one: one.step_logits[3, 0, 0].fill_(float("nan")),
     [f"rank 0's columns of the step logits differ in 1 of {LOGITS}", "step logits are not written in full"]),
    (lambda one: one.step_logits[0, 4, 0].fill_(0.0),
     [f"rank 0's columns of the step logits differ in 1 of {LOGITS}", "step logits of greedy requests are written"]),
    (lambda one: one.sampler.base_logits(4)[0, 0, 0].add_(1.0), [f"base logits differ in 1 of {LOGITS}"]),
    (lambda one: one.tokens[19:].fill_(260), ["tokens differ in 1 of 20", "tokens are not all in the vocabulary"]),
    (lambda one: one.offset.add_(1), ["the noise offset is 2, alone 1, after 1 proposals"]),
])
def test_what_differs_from_one_rank_alone_is_named(checked, spoil, wrong):
    propose = checked.ranks.propose
    checked.ranks.propose = lambda *given: (propose(*given), spoil(checked.ranks))
    assert checked.order_problems() == []
    assert checked.propose(4, rank_proposals.MIXES[4][0]) == wrong


def test_ranks_of_other_bits_are_named_and_end_the_blocks(checked, monkeypatch):
    monkeypatch.setattr(Alone, "gather", lambda self, value: [value, "other" if isinstance(value, str) else value])
    (found,) = checked.propose(1, (0.8,))
    assert found == "ranks [1] have other step logits, tokens or noise offset than rank 0"
    monkeypatch.setattr(rank_proposals, "SLOTS", 2)
    figures, found = checked.run_blocks(6)
    assert figures["proposals"] == 2 and found[1] == "after 2 blocks: ranks [1] have other tokens of all blocks than rank 0"


def test_random_blocks_are_compared_with_one_rank_alone(checked, monkeypatch):
    monkeypatch.setattr(rank_proposals, "SLOTS", 2)
    figures, found = checked.run_blocks(3)
    assert (figures["proposals"], figures["compared_with_one_rank"], found) == (4, 4, [])
    propose = checked.ranks.propose
    checked.ranks.propose = lambda *given: (propose(*given), checked.ranks.tokens[0].add_(1).remainder_(checked.tensors.vocab))
    assert checked.run_blocks(2)[1][0] == "after 2 blocks: tokens differ in 2 of 40"


DRAFT_RECORD = "draft_sampler stopped: rank 0, SM 1, block 1 waited 2.00 s for block 7 of rank 1 to answer in step 2 for request 0"


@pytest.mark.parametrize(("text", "wrong"), [
    (DRAFT_RECORD, None), (DRAFT_RECORD.replace("of rank 1", "of rank 0"), "rank 0 left no record that names rank 1"),
    ("decode_step" + DRAFT_RECORD.removeprefix("draft_sampler"), "rank 0 left no record that names rank 1"),
])
def test_a_draft_that_was_left_must_leave_its_own_record(text, wrong):
    printed = f"{text}. The server cannot go on and exits.\n{text}\nstopped after 2.004 s\n"
    found = ranks_check.judge_killed([printed], [3], 2, 2.0, "draft_sampler")
    assert found == [] if wrong is None else found[0].startswith(wrong) and len(found) == 1
    if wrong is None:
        assert ranks_check.kept_lines(printed, "draft_sampler") == [DRAFT_RECORD, "stopped after 2.004 s"]


RECORD = "decode_step stopped: rank 0, SM 1, block 1 waited 1.00 s for rank 1's part of tile 1 of down of layer 3"


@pytest.mark.parametrize(("text", "status", "wrong"), [
    (f"{RECORD}\nstopped after 1.013 s\n", 3, None), (f"{RECORD}\nstopped after 9.5 s\n", 3, "rank 0 stopped after 9.5 s, the deadline is 2 s"),
    (f"{RECORD}\nstopped after 1.013 s\n", None, "rank 0 did not end"), (f"{RECORD}\nstopped after 1.013 s\n", 0, "rank 0 ended with status 0"),
    ("CUDA error: unspecified launch failure\nstopped after 1.0 s\n", 3, "rank 0 left no record that names rank 1: 'CUDA error"),
    (RECORD.replace("rank 1's", "rank 0's") + "\nstopped after 1.0 s\n", 3, "rank 0 left no record that names rank 1"),
])
def test_what_a_rank_that_was_left_must_show(text, status, wrong):
    found = ranks_check.judge_killed([text], [status], 2, 2.0)
    assert found == [] if wrong is None else found[0].startswith(wrong) and len(found) == 1


def test_the_slower_rank_counts_and_the_floor_is_a_ranks():
    shape = PRESETS["qwen3-8b"]
    rows = [parallel_step.row_of("qwen3-8b", shape, 2, 1, 1024, arm, [[2.0, 2.2], [2.1, 2.1]], 4650.0, []) for arm in ("whole", "served")]
    assert [row["tp"] for row in rows] == [1, 2] and rows[1]["on_ms"] == [2.1, 2.2]
    assert rows[0]["floor_bytes"] // 2 == rows[1]["floor_bytes"]
    content = Results(None, what="kernel-step", name="x", weights="", command=[], commit="0" * 40)
    content.add(**rows[1])
    assert " 1024 served   2.1500      59.72" in parallel_step.table(content.content)


def test_a_rivals_sum_is_what_it_takes_beside_the_product():
    times = {"product": [[10.0, 10.0]] * 2, "pushed": [[14.0, 15.0], [15.0, 14.0]], "nccl": [[30.0, 31.0], [29.0, 30.0]]}
    times["nccl alone"] = [[12.0, 12.5]] * 2
    (row,) = peer_sums.rows_of(2, 1, 4096, 4096, 36, times, [])
    assert row["on_ms"] == [0.015, 0.015] and row["off_ms"] == [0.03, 0.031] and (row["sum_us"], row["off_sum_us"]) == (5.0, 20.5)


def test_a_childs_command_is_its_parents():
    assert ranks.typed(["--out", "o", "--rank", "0", "--store", "s"]) == ["--out", "o"] == ranks.typed(["--out", "o"])
