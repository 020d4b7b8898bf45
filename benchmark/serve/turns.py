"""What servers that ran one after the other found: their timings as rows of a results file, their drafts and texts compared."""

from __future__ import annotations

import dataclasses

from benchmark.serve import draft_compare
from benchmark.serve.client import Reply
from benchmark.serve.draft_compare import Answer
from benchmark.serve.tokens import first_difference
from sgl_lowlatency.bench import stats
from sgl_lowlatency.bench.results import Results

ARMS = ("off", "on")


@dataclasses.dataclass(frozen=True)
class Timing:
    """step_ms: a verify step, plainly a decode step. token_ms: a token of one request. texts: of the long generation. steps: of the slowest request,
    short and long together."""

    step_ms: float
    token_ms: float
    accept_length: float
    texts: list[list[int]]
    steps: int

    @classmethod
    def of(cls, short: tuple[float, list[Reply]], long: tuple[float, list[Reply]], *, drafts: bool) -> Timing:
        """From the seconds and replies of a short and a long generation. Raises ValueError when SGLang counted no verify step."""
        counts = [[reply.verify_steps if drafts else len(reply.ids) - 1 for reply in replies] for _, replies in (short, long)]
        if not all(map(all, counts)):
            raise ValueError(f"SGLang counted no verify steps: {counts}")
        seconds, steps = long[0] - short[0], max(counts[1]) - max(counts[0])
        new = len(long[1][0].ids) - len(short[1][0].ids)
        made = sum(len(reply.ids) - 1 for reply in long[1])
        texts = [reply.ids for reply in long[1]]
        return cls(seconds / max(steps, 1) * 1e3, seconds / new * 1e3, made / sum(counts[1]), texts, sum(map(max, counts)))


@dataclasses.dataclass
class Turn:
    """What one server did. answers: by (batch, mode). timings: by batch."""

    name: str
    arm: str
    answers: dict[tuple[int, str], list[Answer]] = dataclasses.field(default_factory=dict)
    timings: dict[int, list[Timing]] = dataclasses.field(default_factory=dict)
    facts: dict = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def compared(turns: list[Turn], args) -> tuple[list[dict], list[str]]:
    """(entries of the results, what is wrong) of every turn behind the first: of the other arm, or of the same arm, whether it repeats itself."""
    entries, problems, first = [], [], turns[0]
    for turn in turns[1:]:
        for batch, mode in turn.answers.keys() & first.answers.keys():
            pair = (turn, first) if (first.arm, turn.arm) == ("on", "off") else (first, turn)
            found = draft_compare.compare(*(one.answers[batch, mode] for one in pair), greedy=mode == "greedy")
            entry = {"turns": [one.name for one in pair], "batch": batch, "mode": mode, **found.summary()}
            if not args.no_draft:
                lengths = [draft_compare.accept_length(one.answers[batch, mode]) for one in pair]
                accepted = [[answer.accepted for answer in one.answers[batch, mode]] for one in pair]
                entry |= {"accept_length": [round(length, 4) for length in lengths], "same_acceptance": accepted[0] == accepted[1]}
            entries.append(entry)
            problems += [f"{pair[0].name} and {pair[1].name}, batch {batch}, {mode}: {problem}" for problem in found.problems()]
        for batch in turn.timings.keys() & first.timings.keys():
            texts = [[timing.texts for timing in one.timings[batch]] for one in (first, turn)]
            wanted = texts[0][0] if texts[0] else []
            for request, text in enumerate(wanted):
                parts = [first_difference(text, other[request]) for of_turn in texts for other in of_turn]
                if any(part is not None for part in parts):
                    at = min(part for part in parts if part is not None)
                    problems.append(f"{first.name} and {turn.name}, batch {batch}: timed texts part: request {request} at token {at}")
    return sorted(entries, key=lambda entry: (entry["turns"], entry["batch"], entry["mode"])), problems


def rows_of(turns: list[Turn], args) -> list[dict]:
    """A results row a batch size, of those that every arm timed."""
    rows = []
    for batch in args.batches:
        of_arm = {arm: [timing for turn in turns if turn.arm == arm for timing in turn.timings.get(batch, [])] for arm in ARMS}
        row = {"model": args.slug, "dtype": "fp8+fp4", "tp": 1, "mode": "decode" if args.no_draft else "verify", "metric": "step", "batch": batch}
        row |= {"rows": batch * (1 if args.no_draft else args.block_size + 1), "context": args.context}
        row |= {} if args.no_draft else {"algorithm": "dspark", "drafts": args.block_size}
        for arm, timings in of_arm.items():
            if not timings:
                continue
            steps = [round(timing.step_ms, 4) for timing in timings]
            row |= {f"{arm}_ms": steps, f"{arm}_spread": round(stats.spread(steps), 4), f"{arm}_steps": sum(timing.steps for timing in timings)}
            row |= {f"{arm}_token_ms": [round(timing.token_ms, 4) for timing in timings]}
            row |= {f"{arm}_accept_length": [round(timing.accept_length, 3) for timing in timings]}
            row |= {f"{arm}_by_turn": [round(stats.median([t.step_ms for t in turn.timings[batch]]), 4)
                                       for turn in turns if turn.arm == arm and turn.timings.get(batch)]}  # fmt: skip
        if any(of_arm.values()):
            rows.append(row)
    return rows


def table(results: Results) -> str:
    """The rows and comparisons as text."""
    lines = [f"{results.content['name']}: {results.content['gpu']}, {results.content['versions']}, ms a step"]
    for row in results.content["rows"]:
        times = [f"{arm} {stats.median(row[f'{arm}_ms']):.3f} (spread {row[f'{arm}_spread']:.1%}, by turn {row[f'{arm}_by_turn']})"
                 for arm in ARMS if f"{arm}_ms" in row]  # fmt: skip
        ratio = f" ratio {row['ratio']:.3f} {row['ratio_ci95']}" if "ratio" in row else ""
        lines.append(f"batch {row['batch']}, {row['rows']} rows: {', '.join(times)}{ratio}")
    for entry in results.content.get("tokens", []):
        lines.append(f"tokens {({key: value for key, value in entry.items() if key != 'draft_differences'})} {entry['draft_differences'][:2]}")
    return "\n".join(lines)
