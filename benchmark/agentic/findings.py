"""The report's sentences: what is decided, what is lost, what is not decidable. Markdown and page show the same ones."""

from __future__ import annotations

from benchmark.agentic.aiperf_driver import SCENARIO
from benchmark.agentic.analysis import FASTER, METRICS, NO_CLAIM, SLOWER, UNDECIDED, lost_steps
from benchmark.agentic.arms import OFF, ON
from sgl_lowlatency.bench import stats

HEAD = "itl_p50"
BURSTS_ALLOWED = 0.05
LEAD = "The same requests on two servers of one GPU: off is SGLang's standard path, on has the plugin. Times are of what a client sees."
NOTHING = "Nothing that these runs decide."
TABLE = ("tok_s_user_p50", "tok_s_user_p90", *(m for m in METRICS if m != "seconds"), "seconds", "output_tok_s", "cache_hit")
TABLE += ("first_token_share", "under_way", "accept_length")
NAMES = METRICS | {
    "tok_s_user_p50": "tok/s/user, p50", "tok_s_user_p90": "tok/s/user, p90 (slow tail)", "tok_s_user_p99": "tok/s/user, p99",
    "output_tok_s": "output tokens a second, all sessions", "cache_hit": "share of input found in the prefix cache",
    "first_token_share": "share of the requests' time until their first token", "under_way": "requests at once, on average",
    "accept_length": "tokens a verify step",
}


def comparisons(content: dict, verdict: str) -> list[str]:
    """A line for every metric and concurrency of this verdict, the head metric first."""
    lines = []
    for metric in sorted(METRICS, key=lambda name: name != HEAD):
        for number, one in content["concurrencies"].items():
            found = one["compared"].get(metric)
            if found and found["verdict"] == verdict:
                lines.append(f"concurrency {number}, {METRICS[metric].removesuffix(', ms').removesuffix(', s')}: {ratio(found)}")
    return lines


def ratio(found: dict) -> str:
    """A comparison in words, never more than it decides."""
    if found["verdict"] == FASTER:
        return f"{found['ratio']:.3f} × faster, 95 % interval {found['ci95'][0]:.3f} to {found['ci95'][1]:.3f}"
    if found["verdict"] == SLOWER:
        return f"{1 / found['ratio']:.3f} × slower, 95 % interval {1 / found['ci95'][1]:.3f} to {1 / found['ci95'][0]:.3f}"
    interval = f", 95 % interval {found['ci95'][0]:.3f} to {found['ci95'][1]:.3f}" if found["ci95"] else ""
    return f"{found['verdict']}: {found['why']} (off/on {found['ratio']:.3f}{interval})"


def headline(content: dict) -> list[dict]:
    """A row a concurrency: medians over repeats of tok/s/user of either arm, and what the repeats decide."""
    rows = []
    for number, one in content["concurrencies"].items():
        medians = {f"{arm}_{p}": median(one, arm, f"tok_s_user_{p}") for arm in (OFF, ON) for p in ("p50", "p90")}
        compared = one["compared"].get(HEAD)
        rows.append({"concurrency": number, **medians, "verdict": compared["verdict"] if compared else NO_CLAIM,
                     "words": ratio(compared) if compared else "no gap between tokens was measured"})
    return rows


def median(one: dict, arm: str, metric: str) -> str:
    """The median over repeats, or a dash where the metric was not measured."""
    values = [run[metric] for run in one["runs"][arm] if metric in run]
    if not values:
        return "–"
    middle = stats.median(values)
    return f"{middle:,.0f}" if middle >= 1000 else f"{middle:.4g}"


def figures(one: dict) -> list[dict]:
    """The table of one concurrency: every metric that was measured, medians over repeats, and the comparison's words."""
    rows = []
    for metric in TABLE:
        off, on = median(one, OFF, metric), median(one, ON, metric)
        if (off, on) != ("–", "–"):
            compared = one["compared"].get(metric)
            said = {"verdict": compared["verdict"], "words": ratio(compared)} if compared else {"verdict": "", "words": ""}
            rows.append({"name": NAMES[metric], OFF: off, ON: on, **said})
    return rows


def losses(content: dict) -> list[str]:
    """Where the plugin is slower or did not run."""
    lines = []
    for number, one in content["concurrencies"].items():
        lines += [f"concurrency {number}: {line}" for line in lost_steps(one["coverage"])]
        slower = sum(on > off for off, on, _ in one["turns"])
        if slower:
            some = f"{slower} of {len(one['turns'])} requests"
            lines.append(f"concurrency {number}: {some} took longer a token with the plugin, by the median of their repeats")
    return lines + comparisons(content, SLOWER)


def undecided(content: dict) -> list[str]:
    return comparisons(content, UNDECIDED) + comparisons(content, NO_CLAIM)


def machine(content: dict) -> str:
    """Where it ran, in words."""
    where = "no GPU" if content["gpu"] == "none" else f"{content['gpu']}, driver {content['driver']}"
    sglang, ours = (content["versions"].get(name, "unknown") for name in ("sglang", "sgl_lowlatency"))
    return f"{where}; SGLang {sglang}, sgl-lowlatency {ours}; {content['plan']['model']}, {content['weights']}"


def caveats(content: dict) -> list[str]:
    """What a reader must know before quoting a figure."""
    plan, lines = content["plan"], []
    if content["gpu"] == "none":
        lines.append("No GPU: the plugin ran in host emulation. The figures show that the chain works and say nothing of speed.")
    if plan["mode"] == SCENARIO:
        lines.append("Scenario timing: arms meet other requests, so nothing here is a comparison.")
        lines.append("Not an AgentX score: local traces are no valid submission.")
    elif plan["what"] == "replay":
        lines.append("AgentX-format replay of fixed work, thinking time left out; not an AgentX score.")
    if plan["simulated_acceptance"] is not None:
        lines.append(f"Simulated acceptance: {plan['simulated_acceptance']:g} tokens a verify step were drawn, not verified; the texts mean nothing.")
    if content["servers"]["attached"]:
        lines.append("The servers were started by the operator: that they share one GPU, and that nothing else runs on it, is the operator's word.")
    if plan["servers"] == "in turn":
        lines.append("One server at a time: off and on of a repeat are starts of their own, one after the other, and so is every repeat.")
    lines += bursts(content)
    if content["dirty"]:
        lines.append("The code had uncommitted changes.")
    names = ", ".join(f"{name} {plan[name]}" for name in ("driver", "shape"))
    lines.append(f"Requests: {names}. tok/s/user is 1000 / gap between tokens in ms at that percentile, so p90 is the slow tail.")
    compared = [found for one in content["concurrencies"].values() for found in one["compared"].values()]
    tests = sum(found["ci95"] is not None and found["verdict"] != NO_CLAIM for found in compared)
    if tests:
        lines.append(f"{tests} comparisons at 95 % each: about {tests * 0.05:.1f} of them would be decided by chance if both arms were the same.")
    return lines


def bursts(content: dict) -> list[str]:
    """A warning where tokens arrived together, in either arm: a machine that is too busy to pass each on as it is made."""
    worst = {}
    for number, one in content["concurrencies"].items():
        share = max((run.get("burst_share", 0.0) for runs in one["runs"].values() for run in runs), default=0.0)
        if share > BURSTS_ALLOWED:
            worst[number] = f"{share:.0%} at concurrency {number}"
    what = "read the time an output token there, not the gap between tokens"
    return [f"Tokens arrived together with the one before, up to {', '.join(worst.values())}: {what}."] if worst else []


def answers(one: dict) -> str:
    """Equality of greedy answers, beside the same arm's own."""
    found = one["answers"]

    def share(key: str) -> str:
        return "not measured" if found[key] is None else f"{found[key]:.1%}"

    return f"off and on {share('off_on')}; off in two repeats {share('off_off')}, on in two repeats {share('on_on')}"
