"""benchmark.replay on stand-in servers: pairs in turn, resumed, refused by name. Oracle: what the servers were asked."""

import contextlib
import json

import pytest

for name in ("scipy", "sglang"):
    pytest.importorskip(name)

from stub_server import OURS, stub, tokens  # noqa: E402

from benchmark import replay  # noqa: E402
from benchmark.agentic import arms, cells  # noqa: E402
from benchmark.serve import coverage  # noqa: E402
from benchmark.serve.server import free_port  # noqa: E402

CHECKPOINT = {"vocab_size": 200, "max_position_embeddings": 70000}
ACTIVE = {"enable_nvidia_megakernel": True}


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/config.json").write_text(json.dumps(CHECKPOINT))
    return tmp_path / "ckpt"


@pytest.fixture
def arguments(tmp_path, checkpoint, monkeypatch):
    """A function of the two stub servers: the arguments of a replay of one short session at concurrency 1, twice."""
    monkeypatch.setattr(coverage, "SETTLE_S", 0.0)

    def made(off, on, *more):
        words = ["--out", str(tmp_path / "out"), "--driver", "direct", "--off-url", off.url, "--on-url", on.url, "--model-path", str(checkpoint)]
        return replay.parse([*words, "--sessions", "1", "--scale", "0.01", "--concurrency", "1", "--repeats", "2", *more])

    return made


class Counting:
    """Answers of a server with the plugin: a step is counted for every token after the first, unless `asleep`."""

    def __init__(self, asleep=False):
        self.steps, self.asleep, self.server = 0, asleep, None

    def generate(self, body):
        self.steps += 0 if self.asleep else body["sampling_params"]["max_new_tokens"] - 1
        self.server.metrics = self.page()
        return tokens(body)

    def page(self):
        return f'sgl_lowlatency:decode_steps_total{{mode="decode",rows="1"}} {self.steps}\nsgl_lowlatency:fallback_steps_total{{reason="LoRA"}} 1\n'


def pair(order, asleep=False):
    """(off, on, what the on server counts); each answer's arm is noted in `order`."""
    plugin = Counting(asleep)

    def noted(name, generate):
        def answer(body):
            order.append(name)
            return generate(body)

        return answer

    off = stub(generate=noted("off", tokens))
    on = stub(ACTIVE, plugin.page(), noted("on", plugin.generate))
    return off, on, plugin


def runs(order):
    """The order without repetitions: which arm was driven when."""
    return [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]


def test_arms_alternate_and_a_second_call_goes_on(arguments, tmp_path, capsys):
    order = []
    off, on, plugin = pair(order)
    with off as left, on as right:
        plugin.server = right
        args = arguments(left, right)
        assert replay.run(args) == 0
        assert [len(body["input_ids"]) for body in left.warmed] == [1, 1, 1]  # one request at once, and the longest prompt twice
        first = len(order)
        assert runs(order) == ["off", "on", "off"]  # off, on, then on, off
        assert replay.run(args) == 0 and len(order) == first  # nothing is left to do
        cells.clear(tmp_path / "out", 2, 1)
        assert replay.run(args) == 0 and len(order) > first
    out = capsys.readouterr().out
    assert "2 of 2 pairs are done already" in out and "1 of 2 pairs are done already" in out
    content = json.loads((tmp_path / "out/report.json").read_text())
    assert content["concurrencies"]["1"]["coverage"]["rows"] >= content["concurrencies"]["1"]["coverage"]["decode_tokens"] > 0


def test_a_plugin_that_runs_no_step_is_refused(arguments):
    off, on, plugin = pair([], asleep=True)
    with off as left, on as right:
        plugin.server = right
        with pytest.raises(arms.ArmsRefused, match="plugin not active: no decode step of r1 c1 on ran it"):
            replay.run(arguments(left, right))


def test_another_shape_runs_beside_on_the_same_servers(arguments, tmp_path, capsys):
    order = []
    off, on, plugin = pair(order)
    with off as left, on as right:
        plugin.server = right
        args = arguments(left, right, "--repeats", "3", "--beside", "random-8k-1k", "--peak", "9216")
        assert replay.run(args) == 0
    contents = [json.loads((tmp_path / "out" / name / "report.json").read_text()) for name in ("", "random-8k-1k")]
    assert [content["what"] for content in contents] == ["replay", "fixed-length"] and contents[1]["name"].endswith("-random-8k-1k")
    work = contents[1]["concurrencies"]["1"]["work"]
    assert (work["requests"], work["input_tokens"], work["output_tokens"]) == (1, 8192, 1024)
    assert contents[0]["servers"] == contents[1]["servers"] and contents[0]["concurrencies"]["1"]["problems"] == []
    out = capsys.readouterr().out
    assert "driver direct, fixed-work, agentic-64k" in out and "driver direct, fixed-work, random-8k-1k" in out
    assert out.count("equal work: yes, 3 repeats of") == 2


def test_pairs_past_the_deadline_are_left_out_and_named(arguments, tmp_path, monkeypatch, capsys):
    clock = iter([400.0, 20.0])  # left before the first pair, and before the second
    monkeypatch.setattr(replay.deadline, "remaining", lambda limit_s: next(clock))
    off, on, plugin = pair([])
    with off as left, on as right:
        plugin.server = right
        assert replay.run(arguments(left, right, "--deadline", "400")) == 1
    assert "problem: replay r2 c1: not run, it would not have ended within 400 s" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/report.json").read_text())["order"] == ["r1 c1 off, on"]


@pytest.fixture
def in_turn(tmp_path, checkpoint, monkeypatch):
    """(arguments of a replay in turn, the starts so far, what a start gives): servers that stand alone, as `arms.alone` starts them."""
    starts, standing, order = [], [], []
    off, on, plugin = pair(order)
    monkeypatch.setattr(coverage, "SETTLE_S", 0.0)

    @contextlib.contextmanager
    def alone(made, name, log, limit_s, say, *, compiles):
        assert standing == [], "another server stands"
        starts.append((name, log.name, compiles))
        standing.append(name)
        try:
            yield arms.attach(name, servers[name].url)
        finally:
            standing.clear()

    monkeypatch.setattr(arms, "alone", alone)
    words = ["--out", str(tmp_path / "out"), "--driver", "direct", "--in-turn", "--model-path", str(checkpoint)]
    words += ["--sessions", "1", "--scale", "0.01", "--concurrency", "1,2", "--repeats", "3"]
    with off as left, on as right:
        servers, plugin.server = {"off": left, "on": right}, right
        yield words, starts, servers


def test_servers_in_turn_stand_alone_for_a_repeat_each(in_turn, tmp_path, capsys):
    words, starts, servers = in_turn
    assert replay.run(replay.parse(words)) == 0
    assert [name for name, _, _ in starts] == ["off", "on", "on", "off", "off", "on"]
    assert starts[0] == ("off", "off-r1.log", True) and starts[2:4] == [("on", "on-r2.log", False), ("off", "off-r2.log", False)]
    content = json.loads((tmp_path / "out/report.json").read_text())
    assert content["order"] == [f"r{r} c{c} {'off, on' if r % 2 else 'on, off'}" for r in (1, 2, 3) for c in (1, 2)]
    assert content["plan"]["servers"] == "in turn" and content["servers"]["attached"]
    for one in content["concurrencies"].values():
        assert one["problems"] == [] and one["coverage"]["rows"] >= one["coverage"]["decode_tokens"] > 0
        assert len(one["runs"]["off"]) == len(one["runs"]["on"]) == 3
    out = capsys.readouterr().out
    assert "equal work: yes, 3 repeats of" in out
    assert "One server at a time: off and on of a repeat are starts of their own" in (tmp_path / "out/report.md").read_text()
    assert replay.run(replay.parse(words)) == 0 and len(starts) == 6, "nothing is left to do"
    (cells.folder(tmp_path / "out", 2, 1, "off") / "cell.json").unlink()
    assert replay.run(replay.parse(words)) == 0
    assert [name for name, _, _ in starts[6:]] == ["on", "off"], "half a pair is run again as a whole, in its order"
    with pytest.raises(cells.PlanRefused, match="servers was in turn, is started"):
        replay.run(replay.parse([word for word in words if word != "--in-turn"]))


def test_servers_in_turn_that_cannot_be_compared_are_refused_when_the_second_one_stands(in_turn):
    words, starts, servers = in_turn
    servers["on"].info["context_length"] = 4096
    with pytest.raises(arms.ArmsRefused, match="^different context_length on the arms: 2048 off, 4096 on$"):
        replay.run(replay.parse(words))
    assert len(starts) == 2
    servers["off"].metrics = OURS
    with pytest.raises(arms.ArmsRefused, match="^the off server exports sgl_lowlatency counters: the plugin runs there$"):
        replay.run(replay.parse(words))
    assert len(starts) == 3


def test_work_that_differs_between_servers_in_turn_is_a_problem(in_turn, capsys):
    words, _, servers = in_turn
    servers["off"].generate = lambda body: tokens(body, one_short=True)
    assert replay.run(replay.parse(words)) == 1
    assert "equal work: no" in capsys.readouterr().out


def test_repeats_in_turn_past_the_deadline_are_left_out_and_named(in_turn, monkeypatch, capsys):
    words, starts, _ = in_turn
    clock = iter([400.0, 20.0, 20.0])
    monkeypatch.setattr(replay.deadline, "remaining", lambda limit_s: next(clock))
    assert replay.run(replay.parse([*words, "--deadline", "400"])) == 1
    out = capsys.readouterr().out
    left_out = [f"problem: replay r{r} c{c}: not run, it would not have ended within 400 s" in out for r in (1, 2, 3) for c in (1, 2)]
    assert left_out == [False] * 2 + [True] * 4
    assert len(starts) == 2


def test_a_dry_run_in_turn_tells_the_starts(in_turn, capsys):
    words, starts, _ = in_turn
    assert replay.run(replay.parse([*words, "--repeats", "2", "--dry-run"])) == 0
    assert starts == []
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# re")]
    assert [line for line in lines if "alone" in line] == [f"# repeat {r}: the {name} server starts, alone" for r, name in
                                                           ((1, "off"), (1, "on"), (2, "on"), (2, "off"))]  # fmt: skip
    assert lines[1:3] == ["# replay, repeat 1, concurrency 1, off", "# replay, repeat 1, concurrency 2, off"]


def refused(words, capsys):
    """What `replay.main` says on the way out."""
    assert replay.main(words) == 2
    return capsys.readouterr().err


def test_wrong_inputs_end_with_their_name(tmp_path, checkpoint, capsys):
    """As a shell sees it. (Results of different GPUs: test_replay_report.py and test_replay_cells.py.)"""
    def words(left, right, *more):
        both = ["--off-url", left if isinstance(left, str) else left.url, "--on-url", right if isinstance(right, str) else right.url]
        return ["--out", str(tmp_path / "out"), "--driver", "direct", *both, "--model-path", str(checkpoint), "--repeats", "1", *more]

    session = replay.work.synthesize.session(replay.work.EVERY["agentic-64k"], 0, 0, 0.01)
    (tmp_path / "strange.json").write_text(json.dumps(session | {"colour": "red"}))
    (tmp_path / "fine.json").write_text(json.dumps(session))
    fine = ["--traces", str(tmp_path / "fine.json")]
    nobody = f"http://127.0.0.1:{free_port()}"
    with stub() as off, stub(ACTIVE, OURS) as on, stub(ACTIVE | {"model_path": "n"}, OURS) as other, stub() as without:
        strange = refused(words(off, on, "--traces", str(tmp_path / "strange.json")), capsys)
        assert "replay: refused: strange.json: unknown key 'colour'" in strange
        assert f"replay: refused: on: no server answers at {nobody}" in refused(words(off, nobody, *fine), capsys)
        assert "plugin not active: the on server was started without" in refused(words(off, without, *fine), capsys)
        assert "different models on the arms: m off, n on" in refused(words(off, other, *fine), capsys)
        assert off.asked == on.asked == other.asked == []


def test_other_arguments_in_the_same_folder_are_refused(arguments):
    off, on, plugin = pair([])
    with off as left, on as right:
        plugin.server = right
        replay.run(arguments(left, right, "--repeats", "1"))
        for words in (("--seed", "7"), ("--sessions", "3"), ("--scale", "0.02")):
            with pytest.raises(cells.PlanRefused, match="traces_sha256 was"):
                replay.run(arguments(left, right, *words))
        assert replay.run(arguments(left, right, "--repeats", "1")) == 0  # the first plan still goes on


def test_a_dry_run_asks_no_server(arguments, capsys):
    with stub() as left, stub(ACTIVE) as right:
        assert replay.run(arguments(left, right, "--dry-run")) == 0
        assert left.asked == right.asked == []
        out = capsys.readouterr().out
    told = [line for line in out.splitlines() if line.startswith("#")]
    assert told[-1].startswith("# about 0 min: 4 runs of 3 to 3 s (5.5 to 8 ms a token, 28,000 tokens/s")
    assert "of no ckpt: measured in replays of Qwen3-8B" in told[-1]
    assert told[:-1] == [
        f"# replay, repeat {repeat}, concurrency 1, {name}" for repeat, name in ((1, "off"), (1, "on"), (2, "on"), (2, "off"))
    ]
    assert f"--url={left.url} --concurrency=1 --conversations=1" in out


def test_a_dry_run_prints_the_servers_and_aiperfs_commands(tmp_path, checkpoint, capsys):
    words = ["--out", str(tmp_path / "out"), "--model-path", str(checkpoint), "--sessions", "1", "--concurrency", "8", "--repeats", "1"]
    assert replay.run(replay.parse([*words, "--dry-run"])) == 0
    out = capsys.readouterr().out
    launches = [line for line in out.splitlines() if "sglang.launch_server" in line]
    assert ["--enable-nvidia-megakernel" in line for line in launches] == [False, True]
    assert "pip install --quiet --disable-pip-version-check --timeout 20 --retries 2 aiperf==0.13.0" in out and out.count("bin/aiperf profile") == 2
    assert not (tmp_path / "out/plan.json").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--model-path", "m", "--mode", "scenario-timing", "--driver", "direct"], "--mode scenario-timing needs --driver aiperf"),
        (["--model-path", "m", "--in-turn", "--off-url", "http://127.0.0.1:1", "--on-url", "http://127.0.0.1:2"], "--in-turn starts its servers"),
        (["--model-path", "m", "--off-url", "http://127.0.0.1:1"], "--off-url and --on-url go together"),
        (["--model-path", "m", "--off-url", "http://127.0.0.1:1", "--on-url", "http://127.0.0.1:1/"], "are the same server"),
        (["--smoke", "--off-url", "http://127.0.0.1:1", "--on-url", "http://127.0.0.1:2"], "are for servers started here"),
        ([], "give one of --model-path, --model and --smoke"),
        (["--smoke", "--model-path", "m"], "give one of --model-path, --model and --smoke"),
        (["--smoke", "--concurrency", "1,17"], "'1,17' is not a list of different numbers from 1 to 16"),
        (["--smoke", "--concurrency", "2,2"], "'2,2' is not a list of different numbers"),
        (["--smoke", "--scale", "0"], "--scale is above 0 and at most 1"),
        (["--smoke", "--repeats", "0", "--turns", "-1"], "--repeats, --turns: 1 or more"),
        (["--smoke", "--per-lane", "1", "--sessions", "2"], "--sessions and --per-lane both say how many sessions are replayed"),
        (["--smoke", "--traces", "t", "--turns", "2"], "--scale and --turns are for synthetic sessions"),
        (["--smoke", "--layers", "2"], "--layers cuts --model, whose weights are made here"),
        (["--smoke", "--mode", "scenario-timing"], "--mode scenario-timing needs --driver aiperf"),
        (["--smoke", "--simulate-acceptance", "2"], "--simulate-acceptance is for servers that speculate"),
        (["--smoke", "--server-arg=--speculative-algorithm=NGRAM", "--simulate-acceptance", "0.5"], "is 1 token a verify step or more"),
        (["--model-path", "m", "--mode", "scenario-timing", "--beside", "random-8k-1k"], "--per-lane and --beside are for fixed-work"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(words, why, capsys):
    with pytest.raises(SystemExit):
        replay.parse(["--out", "o", *words])
    assert why in capsys.readouterr().err


def test_simulated_acceptance_reaches_both_servers_and_the_plan(tmp_path):
    words = ["--out", str(tmp_path), "--model", "qwen3-8b", "--driver", "direct", "--sessions", "1", "--scale", "0.1"]
    words += ["--server-arg=--speculative-algorithm=NGRAM", "--simulate-acceptance", "2.5"]
    args = replay.parse(words)
    works = replay.work.of(args)
    made = replay.setup.of(args, tmp_path / "work", works[0].peak_tokens)
    simulated = {name: value for name, value in made.environment.items() if name.startswith("SGLANG_SIMULATE_ACC_")}
    assert simulated == {
        "SGLANG_SIMULATE_ACC_LEN": "2.5", "SGLANG_SIMULATE_ACC_METHOD": "match-expected", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    assert replay.plan_of(args, works[0], made)["simulated_acceptance"] == 2.5


def test_traces_that_do_not_fit_are_refused_by_name(tmp_path, checkpoint):
    def run(*words):
        return replay.run(replay.parse(["--out", str(tmp_path / "out"), "--dry-run", "--sessions", "4", *words]))

    with pytest.raises(replay.setup.SetupRefused, match="--pool-tokens 4000 is less than the "):
        run("--model-path", str(checkpoint), "--pool-tokens", "4000")
    (checkpoint / "config.json").write_text(json.dumps(CHECKPOINT | {"max_position_embeddings": 40960}))
    with pytest.raises(replay.setup.SetupRefused, match="ckpt has 40960 positions: leave longer sessions out with --peak 39936, or make shorter"):
        run("--model-path", str(checkpoint))
    with pytest.raises(replay.schema.TraceError, match="no session has a peak of 100 tokens or less; the shortest has "):
        run("--model-path", str(checkpoint), "--peak", "100")
    with pytest.raises(replay.setup.SetupRefused, match="--model-path .*absent: no config.json"):
        run("--model-path", str(tmp_path / "absent"))
