"""The request patterns of scenarios.py. Each runs on one server and returns its requests by label."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmark.serve.client import Client, Reply, greedy, random_prompt
from benchmark.serve.tokens import TOP


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of the patterns. chunk: the servers' prefill chunk, tokens. scale: multiplies lengths."""

    vocab: int
    context: int
    chunk: int
    scale: float = 1.0

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that SGLang takes at this context length."""
        return self.context - 7

    def size(self, tokens: int) -> int:
        return max(int(tokens * self.scale), 2)

    def prompt(self, tokens: int, seed: int) -> list[int]:
        return random_prompt(tokens, vocab=self.vocab, seed=seed)


@dataclasses.dataclass(frozen=True)
class Item:
    """One finished request. expected: its exact output length, None if it was aborted. must_hit: needs cached tokens."""

    prompt: list[int]
    reply: Reply
    expected: int | None
    must_hit: bool = False


Items = dict[str, Item]


def _together(client: Client, jobs: list[tuple[str, list[int], int, float]]) -> Items:
    """Run (label, prompt, new tokens, seconds before sending) each in its own thread."""

    def one(job) -> tuple[str, Item]:
        label, prompt, new_tokens, delay_s = job
        time.sleep(delay_s)
        reply = client.generate([prompt], greedy(new_tokens), top=TOP)[0]
        return label, Item(prompt, reply, new_tokens)

    with ThreadPoolExecutor(len(jobs)) as pool:
        return dict(pool.map(one, jobs))


def arrivals(client: Client, plan: Plan) -> Items:
    """Eight requests of different prompt and output lengths, 30 ms apart: widths 1 to 8 and back."""
    lengths = (5, 64, 65, 130, 301, 511, 700, 999)
    news = (160, 24, 96, 8, 120, 48, 200, 64)
    pairs = enumerate(zip(lengths, news, strict=True))
    return _together(client, [(f"r{i}", plan.prompt(plan.size(n), 10 + i), plan.size(m), 0.03 * i) for i, (n, m) in pairs])


def prefix_hits(client: Client, plan: Plan) -> Items:
    """One request fills the cache, four others share its prompt and then part."""
    shared = plan.prompt(plan.size(600), 50)
    first = _together(client, [("fill", shared + plan.prompt(4, 51), plan.size(16), 0.0)])
    tails = [(f"hit{i}", shared + plan.prompt(3 + 7 * i, 52 + i), plan.size(48), 0.02 * i) for i in range(4)]
    hits = _together(client, tails)
    return first | {label: dataclasses.replace(item, must_hit=True) for label, item in hits.items()}


def chunked_prefill(client: Client, plan: Plan) -> Items:
    """Three requests decode while prompts of several prefill chunks arrive."""
    long = plan.context - plan.size(64) - 8
    jobs = [(f"decode{i}", plan.prompt(plan.size(40 + 30 * i), 70 + i), plan.size(200), 0.0) for i in range(3)]
    jobs += [
        ("long0", plan.prompt(long, 75), plan.size(40), 0.15),
        ("long1", plan.prompt(2 * plan.chunk + 1, 76), plan.size(40), 0.3),
    ]
    return _together(client, jobs)


def aborts(client: Client, plan: Plan) -> Items:
    """Of five requests one is aborted by its id and one by dropping the connection; three run on, one more comes after."""
    found: Items = {}
    stop_at = plan.size(12)

    def aborted(label: str, seed: int, on_token: Callable[[str], Callable[[int], bool]]) -> None:
        prompt = plan.prompt(plan.size(90), seed)
        reply = client.stream(
            prompt, greedy(plan.size(400)), rid=f"{label}-{seed}-{time.monotonic_ns()}", on_token=on_token, top=TOP
        )
        if reply is not None:
            found[label] = Item(prompt, reply, None)

    def by_id() -> None:
        rid = f"abort-{time.monotonic_ns()}"
        prompt, sent = plan.prompt(plan.size(90), 90), threading.Event()

        def on_token(count: int) -> bool:
            if count >= stop_at and not sent.is_set():
                sent.set()
                client.call("POST", "/abort_request", {"rid": rid})
            return True

        reply = client.stream(prompt, greedy(plan.size(400)), rid=rid, on_token=on_token, top=TOP)
        found["by-id"] = Item(prompt, reply, None)

    threads = [
        threading.Thread(target=by_id),
        threading.Thread(target=aborted, args=("dropped", 91, lambda n: n < stop_at)),
    ]
    for thread in threads:
        thread.start()
    kept = _together(
        client, [(f"kept{i}", plan.prompt(plan.size(60 + 50 * i), 92 + i), plan.size(120), 0.01 * i) for i in range(3)]
    )
    for thread in threads:
        thread.join(timeout=client.timeout_s)
    after = _together(client, [("after", plan.prompt(plan.size(33), 99), plan.size(24), 0.0)])
    missing = {"by-id", "dropped"} - set(found)
    if missing:
        raise RuntimeError(f"no reply of the aborted requests {sorted(missing)}")
    return found | kept | after


def one_token(client: Client, plan: Plan) -> Items:
    """Requests that end with their first token beside one that decodes."""
    jobs = [("decode", plan.prompt(plan.size(50), 110), plan.size(64), 0.0)]
    jobs += [(f"one{i}", plan.prompt(plan.size(20 + 100 * i), 111 + i), 1, 0.02 + 0.02 * i) for i in range(4)]
    jobs += [(f"two{i}", plan.prompt(plan.size(30 + 80 * i), 121 + i), 2, 0.03 + 0.02 * i) for i in range(2)]
    return _together(client, jobs)


def context_limit(client: Client, plan: Plan) -> Items:
    """Requests whose last token lies at the context length, and a short one beside them."""
    new = max(plan.size(40), 8)
    # SGLang keeps back two positions of a request and six of a prompt: prompt + output is at most the context length - 2
    jobs = [
        ("at-limit", plan.prompt(plan.context - new - 2, 130), new, 0.0),
        ("short", plan.prompt(plan.size(9), 132), 2 * new, 0.0),
    ]
    asked = _together(client, [*jobs, ("over-limit", plan.prompt(plan.context - new - 2, 131), new + 2, 0.02)])
    return asked | {"over-limit": dataclasses.replace(asked["over-limit"], expected=new)}


SCENARIOS: dict[str, Callable[[Client, Plan], Items]] = {
    "arrivals": arrivals,
    "prefix_hits": prefix_hits,
    "chunked_prefill": chunked_prefill,
    "aborts": aborts,
    "one_token": one_token,
    "context_limit": context_limit,
}


def length_problems(off: Items, on: Items) -> list[str]:
    """Requests that did not return exactly the tokens asked for, by arm."""
    problems = []
    for arm, items in (("off", off), ("on", on)):
        for label, item in items.items():
            if item.expected is not None and len(item.reply.ids) != item.expected:
                problems.append(f"{arm} {label}: {len(item.reply.ids)} tokens ({item.reply.finish}), asked for {item.expected}")
    return problems


def paired(off: Items, on: Items) -> tuple[list[list[int]], list[Reply], list[Reply]]:
    """(prompts, off replies, on replies) in one order; aborted requests are cut to the tokens both servers sent."""
    prompts, left, right = [], [], []
    for label, item in off.items():
        a, b = item.reply, on[label].reply
        if item.expected is None:
            both = min(len(a.ids), len(b.ids))
            a, b = (dataclasses.replace(r, ids=r.ids[:both], top=r.top[:both], logprobs=r.logprobs[:both]) for r in (a, b))
        prompts.append(item.prompt)
        left.append(a)
        right.append(b)
    return prompts, left, right
