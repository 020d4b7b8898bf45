"""README's figures are those of benchmark/results, rounded as written."""

import json
import re
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def rows_of(name):
    return json.loads((ROOT / "benchmark/results" / f"{name}.json").read_text())["rows"]


def test_the_table_of_served_steps():
    table = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) × faster \|$", README, re.MULTILINE)
    served = {row["batch"]: row for row in rows_of("served-qwen3-8b") if "off_ms" in row}
    assert [int(line[0]) for line in table] == sorted(served)
    for batch, off, on, ratio in table:
        row = served[int(batch)]
        assert (off, on) == (f"{median(row['off_ms']):.2f}", f"{median(row['on_ms']):.2f}"), f"batch {batch}"
        assert ratio == f"{row['ratio']:.2f}", f"batch {batch}"


def test_the_share_of_the_floor():
    one, eight = re.search(r"reaches (\d+) % of the memory floor at one request, (\d+) % at eight", README).groups()
    kernel = {row["rows"]: row["on_floor_share"] for row in rows_of("kernel-decode-step") if row["context"] == 1024 and row["model"] == "qwen3-8b"}
    assert (int(one), int(eight)) == (round(100 * kernel[1]), round(100 * kernel[8]))


def test_the_tokens_that_were_compared():
    served = json.loads((ROOT / "benchmark/results/served-qwen3-8b.json").read_text())["tokens"]
    total = int(re.search(r"Of ([\d,]+)\s+greedy tokens compared, none differed", README)[1].replace(",", ""))
    assert total == sum(entry["tokens_compared"] for entry in served) and not any(entry["wrong"] for entry in served)
    in_scenarios = int(re.search(r"chunked prefill: ([\d,]+) tokens, none wrong", README)[1].replace(",", ""))
    scenarios = rows_of("scenarios")
    assert in_scenarios == sum(row["tokens_compared"] for row in scenarios) and not any(row["wrong"] for row in scenarios)
