"""benchmark.replay on stand-in servers: pairs in turn, resumed, refused by name. Oracle: what the servers were asked."""

import json

import pytest

for name in ("scipy", "matplotlib", "jinja2", "sglang"):
    pytest.importorskip(name)

from stub_server import stub, tokens  # noqa: E402

from benchmark import replay  # noqa: E402
from benchmark.agentic import arms, cells  # noqa: E402
from benchmark.serve import coverage  # noqa: E402

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
    assert [line for line in out.splitlines() if line.startswith("#")] == [
        f"# repeat {repeat}, concurrency 1, {name}" for repeat, name in ((1, "off"), (1, "on"), (2, "on"), (2, "off"))
    ]
    assert f"--url={left.url} --concurrency=1 --conversations=1" in out


def test_a_dry_run_prints_the_servers_and_aiperfs_commands(tmp_path, checkpoint, capsys):
    words = ["--out", str(tmp_path / "out"), "--model-path", str(checkpoint), "--sessions", "1", "--concurrency", "8", "--repeats", "1"]
    assert replay.run(replay.parse([*words, "--dry-run"])) == 0
    out = capsys.readouterr().out
    launches = [line for line in out.splitlines() if "sglang.launch_server" in line]
    assert ["--enable-nvidia-megakernel" in line for line in launches] == [False, True]
    assert "pip install --quiet --disable-pip-version-check aiperf==0.13.0" in out and out.count("bin/aiperf profile") == 2
    assert not (tmp_path / "out/plan.json").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--model-path", "m", "--mode", "scenario-timing", "--driver", "direct"], "--mode scenario-timing needs --driver aiperf"),
        (["--model-path", "m", "--off-url", "http://127.0.0.1:1"], "--off-url and --on-url go together"),
        (["--model-path", "m", "--off-url", "http://127.0.0.1:1", "--on-url", "http://127.0.0.1:1/"], "are the same server"),
        (["--smoke", "--off-url", "http://127.0.0.1:1", "--on-url", "http://127.0.0.1:2"], "are for servers started here"),
        ([], "give one of --model-path, --model and --smoke"),
        (["--smoke", "--model-path", "m"], "give one of --model-path, --model and --smoke"),
        (["--smoke", "--concurrency", "1,17"], "'1,17' is not a list of different numbers from 1 to 16"),
        (["--smoke", "--concurrency", "2,2"], "'2,2' is not a list of different numbers"),
        (["--smoke", "--scale", "0"], "--scale is above 0 and at most 1"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(words, why, capsys):
    with pytest.raises(SystemExit):
        replay.parse(["--out", "o", *words])
    assert why in capsys.readouterr().err


def test_traces_that_do_not_fit_are_refused_by_name(tmp_path, checkpoint):
    def run(*words):
        return replay.run(replay.parse(["--out", str(tmp_path / "out"), "--dry-run", "--sessions", "4", *words]))

    with pytest.raises(replay.setup.SetupRefused, match="random weights and no tokenizer, which aiperf needs"):
        run("--model", "qwen3-8b")
    with pytest.raises(replay.setup.SetupRefused, match="--pool-tokens 4000 is less than the "):
        run("--model-path", str(checkpoint), "--pool-tokens", "4000")
    (checkpoint / "config.json").write_text(json.dumps(CHECKPOINT | {"max_position_embeddings": 40960}))
    with pytest.raises(replay.setup.SetupRefused, match="ckpt has 40960 positions: leave longer sessions out with --peak 39936, or make shorter"):
        run("--model-path", str(checkpoint))
    with pytest.raises(replay.schema.TraceError, match="no session has a peak of 100 tokens or less; the shortest has "):
        run("--model-path", str(checkpoint), "--peak", "100")
    with pytest.raises(replay.setup.SetupRefused, match="--model-path .*absent: no config.json"):
        run("--model-path", str(tmp_path / "absent"))
