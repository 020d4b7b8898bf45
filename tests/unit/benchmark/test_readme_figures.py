"""README's figures are those of benchmark/results, rounded as written."""

import json
import re
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
WORDS = " ".join(README.split())  # as if nowhere wrapped


def rows_of(name):
    return json.loads((ROOT / "benchmark/results" / f"{name}.json").read_text())["rows"]


def test_the_table_of_served_steps():
    table = re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) × faster \|$", README, re.MULTILINE)
    served = {(row["batch"], row["context"]): row for row in rows_of("served-qwen3-8b-to-32k") if "off_ms" in row}
    cases = [(int(line[0]), int(line[1].replace(",", ""))) for line in table]
    assert sorted(cases) == sorted(served)
    for case, (_, _, off, on, ratio) in zip(cases, table, strict=True):
        row = served[case]
        assert (off, on) == (f"{median(row['off_ms']):.2f}", f"{median(row['on_ms']):.2f}"), f"case {case}"
        assert ratio == f"{row['ratio']:.2f}", f"case {case}"


def test_the_table_of_drafts():
    number = r"([\d.]+)"
    table = re.findall(rf"^\| \[(\w+)\]\((\S+)\)[^|]*\| {number} to {number} \| {number} × \| {number} to {number} \| {number} × \|$", README, re.MULTILINE)
    assert [line[0] for line in table] == ["EAGLE3", "DFLASH", "DSPARK", "STANDALONE"]
    for name, link, *figures in table:
        assert link == f"benchmark/results/served-{name.lower()}-qwen3-8b.json"
        rows = {row["batch"]: row for row in json.loads((ROOT / link).read_text())["rows"]}
        for row, written in ((rows[1], figures[:3]), (rows[4], figures[3:])):
            assert row["served"] and row["equal_work"] and row["ratio_ci95"][0] > 1, name
            assert written == [f"{median(row['off_ms']):.2f}", f"{median(row['on_ms']):.2f}", f"{row['ratio']:.2f}"], name


def test_the_start():
    start = json.loads((ROOT / "benchmark/results/start-qwen3-8b.json").read_text())["start"]
    added, on, off = re.search(r"a server is ready ([\d.]+) s later, ([\d.]+) instead of ([\d.]+) s", WORDS).groups()
    assert (added, on, off) == (f"{start['added_s']:.1f}", f"{median(start['on_s']):.1f}", f"{median(start['off_s']):.1f}") and not start["cold"]


def test_the_times_of_ngram_and_of_fp8_weights():
    for batch, words in ((1, "one request"), (4, "four")):
        (row,) = (row for row in rows_of("served-ngram-qwen3-8b") if row["batch"] == batch)
        assert row["served"] and row["equal_work"]
        assert f"{median(row['off_ms']):.2f} to {median(row['on_ms']):.2f}" in WORDS, words
    times = re.search(r"a step goes from ([\d.]+) to ([\d.]+) ms at one request, ([\d.]+) ×, ([\d.]+) to ([\d.]+) at two, "
                      r"([\d.]+) to ([\d.]+) at four and ([\d.]+) to ([\d.]+) at eight", WORDS).groups()
    fp8 = {row["batch"]: row for row in rows_of("served-qwen3-8b-fp8")}
    assert times[2] == f"{fp8[1]['ratio']:.2f}"
    of_batches = (*times[:2], *times[3:])
    assert of_batches == tuple(f"{median(fp8[batch][arm]):.2f}" for batch in (1, 2, 4, 8) for arm in ("off_ms", "on_ms"))


def test_the_times_of_experts():
    times = re.search(r"([\d.]+) to ([\d.]+) ms at one request, ([\d.]+) ×, ([\d.]+) to ([\d.]+) at two, ([\d.]+) to ([\d.]+) at four and "
                      r"([\d.]+) to ([\d.]+) at eight \(\[MoE\]", WORDS).groups()
    moe = {row["batch"]: row for row in rows_of("served-qwen3-30b-a3b")}
    assert times[2] == f"{moe[1]['ratio']:.2f}"
    assert (*times[:2], *times[3:]) == tuple(f"{median(moe[batch][arm]):.2f}" for batch in (1, 2, 4, 8) for arm in ("off_ms", "on_ms"))


def test_the_times_of_fp8_experts():
    pair = r"([\d.]+) to ([\d.]+)"
    experts = re.search(rf"where few experts are read: {pair} ms at one request, ([\d.]+) ×, {pair} at two, ([\d.]+) ×, {pair} at four, ([\d.]+) ×", WORDS).groups()
    fp8 = {row["batch"]: row for row in rows_of("served-qwen3-30b-a3b-fp8")}
    assert experts == tuple(
        figure for batch in (1, 2, 4)
        for figure in (*(f"{median(fp8[batch][arm]):.2f}" for arm in ("off_ms", "on_ms")), f"{fp8[batch]['ratio']:.2f}")
    )
    assert fp8[8]["ratio_ci95"][1] < 1 and "at eight that kernel lost" in WORDS
    assert re.search(r"where SGLang's takes ([\d.]+) served", WORDS)[1] == f"{median(fp8[8]['off_ms']):.2f}"


def test_the_times_of_two_gpus():
    pair = r"([\d.]+) to ([\d.]+)"
    found = re.search(rf"served, {pair} ms at one request, ([\d.]+) ×, {pair} at two, ([\d.]+) ×, {pair} at four, ([\d.]+) ×, and {pair} at eight, ([\d.]+) ×", WORDS)
    rows = {row["batch"]: row for row in rows_of("served-qwen3-8b-tp2")}
    assert found.groups() == tuple(
        figure for batch in (1, 2, 4, 8)
        for figure in (*(f"{median(rows[batch][arm]):.2f}" for arm in ("off_ms", "on_ms")), f"{rows[batch]['ratio']:.2f}")
    )
    assert all(row["tp"] == 2 and row["ratio_ci95"][0] > 1 for row in rows.values())
    whole, split = re.search(r"the step alone takes ([\d.]+) ms where one GPU's takes ([\d.]+)", WORDS).groups()[::-1]
    step = {row["form"]: median(row["on_ms"]) for row in rows_of("kernel-parallel-step") if row["rows"] == 1 and "on_ms" in row}
    assert (whole, split) == (f"{step['whole']:.2f}", f"{step['served']:.2f}")
    checks = {row["case"]: row for row in rows_of("ranks-check")}
    assert checks["launches"]["launches"] == 1_000_000 and len(checks["killed"]["records"]) == 1
    assert not any(row["problems"] for row in checks.values())


def test_the_gains_of_sessions():
    def ratios(name, figure):
        report = json.loads((ROOT / "benchmark/results" / f"{name}.json").read_text())["concurrencies"]
        return tuple(f"{report[number]['compared'][figure]['ratio']:.2f}" for number in ("1", "2", "4", "8"))

    four = r"([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+)"
    assert re.search(four + " times the output tokens a second and user", WORDS).groups() == ratios("replay-qwen3-8b", "itl_p50")
    assert re.search("prefill and all, " + four + " times by the median", WORDS).groups() == ratios("replay-qwen3-8b", "e2e_p50")
    assert re.search("1,024 out: " + four + r" \(", WORDS).groups() == ratios("random-8k-1k-qwen3-8b", "itl_p50")
    assert re.search("servers one at a time: " + four + r" times \(", WORDS).groups() == ratios("replay-qwen3-30b-a3b", "itl_p50")
    assert re.search("and of random tokens " + four + r" \(", WORDS).groups() == ratios("random-8k-1k-qwen3-30b-a3b", "itl_p50")


def test_the_step_of_deepseek():
    pair = r"([\d.]+) to ([\d.]+)"
    sizes = (1, 2, 6, 12)
    ratios = re.search(r"step of the eight is ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) times as fast at 1, 2, 6 and 12 rows", WORDS).groups()
    found = json.loads((ROOT / "benchmark/results/deepseek-step.json").read_text())
    every = "attention_in+attention_out+moe"
    rows = {row["rows"]: row for row in found["rows"] if row["kernel"] == every}
    assert ratios == tuple(f"{rows[number]['ratio']:.2f}" for number in sizes) and not any(row["problems"] for row in found["rows"])
    distances = [rows[number]["same_experts_distance"] for number in sizes]
    assert re.search(rf"a step's logits are {pair} of their norm apart", WORDS).groups() == (f"{min(distances):.2f}", f"{max(distances):.2f}")
    assert re.search(r"KV rows of a layer at most ([\d.]+)", WORDS)[1] == f"{max(max(rows[number]['kv_distances']) for number in sizes):.2f}"
    layer = re.search(r"takes (\d+) instead of (\d+) us at one row and (\d+) instead of (\d+) at six, (\d+) kernels instead of (\d+) and (\d+)", WORDS)
    plain, kernels = [], []
    for case in ("1x1024", "6x1024"):
        for arm in (every, "sglang"):
            profile = found["profile"][case][arm]
            kernels.append(min(profile["layer_kernels"]))
            plain.append(median(us for us, count in zip(profile["layer_us"], profile["layer_kernels"]) if count == kernels[-1]))
    assert layer.groups() == (*(f"{us:.0f}" for us in plain), f"{kernels[0]}", f"{kernels[1]}", f"{kernels[3]}") and kernels[0] == kernels[2]


def test_deepseek_served():
    found = json.loads((ROOT / "benchmark/results/served-dspark-forced-dsv41-cut.json").read_text())
    times = re.search(r"5\.77 tokens a step: a step goes from ([\d.]+) to ([\d.]+) ms at one request, ([\d.]+) ×, ([\d.]+) to ([\d.]+) at two, ([\d.]+) ×, and "
                      r"([\d.]+) to ([\d.]+) at eight, ([\d.]+) ×, ([\d,]+) tokens and ([\d,]+) drafts", WORDS).groups()
    written = []
    for row in found["rows"]:
        assert row["ratio_ci95"][0] > 1
        written += [f"{median(row['off_ms']):.2f}", f"{median(row['on_ms']):.2f}", f"{row['ratio']:.2f}"]
    compared = [entry for entry in found["tokens"] if entry["turns"] == ["1-off", "2-on"]]
    written += [f"{sum(entry[key] for entry in compared):,}" for key in ("tokens_compared", "drafts_compared")]
    assert times == tuple(written) and found["problems"] == []
    assert all(entry["accept_length"] == [5.7727] * 2 and entry["same_acceptance"] and not entry["texts_part_at"] for entry in found["tokens"])



def test_the_share_of_the_floor():
    one, eight = re.search(r"reaches (\d+) % of the memory floor at one request of 1,024 tokens, (\d+) % at eight", README).groups()
    kernel = {row["rows"]: row["on_floor_share"] for row in rows_of("kernel-decode-step") if row["context"] == 1024 and row["model"] == "qwen3-8b"}
    assert (int(one), int(eight)) == (round(100 * kernel[1]), round(100 * kernel[8]))


def test_the_tokens_that_were_compared():
    served = [e for e in json.loads((ROOT / "benchmark/results/served-qwen3-8b-to-32k.json").read_text())["tokens"] if e.get("compared", True)]
    total = int(re.search(r"Of ([\d,]+) greedy tokens compared, none differed", WORDS)[1].replace(",", ""))
    assert total == sum(entry["tokens_compared"] for entry in served) and not any(entry["wrong"] for entry in served)
    in_scenarios = int(re.search(r"chunked prefill: ([\d,]+) tokens, none wrong", WORDS)[1].replace(",", ""))
    scenarios = rows_of("scenarios")
    assert in_scenarios == sum(row["tokens_compared"] for row in scenarios) and not any(row["wrong"] for row in scenarios)
