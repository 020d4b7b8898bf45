"""The greedy tokens of both servers of decode_ab.py under the float32 oracle, at every case short enough for it.

bf16: a token counts against the plugin where float32 prefers the standard path's by more than that path's own error explains
(tokens.py). FP8: SGLang's linear layers round activations to FP8 and the plugin's do not, so that error is large and the bound decides
few positions (`decided_positions`). There the log-probabilities that either server gave its own text are compared to float32 on the same
codes and scales with unrounded activations: the plugin's root mean square error must not exceed the standard path's. Its is not zero
either: the KV cache that its steps read comes from SGLang's own prefill.
"""

from __future__ import annotations

from benchmark.common import deadline
from benchmark.serve import tokens
from benchmark.serve.client import greedy, random_prompt

COMPARED = {
    "bf16": "tokens, by float32 margins beyond twice the standard path's own error",
    "fp8": "tokens as bf16's; and either server's log-probabilities of its own text with float32 on the dequantised weights, activations unrounded",
}


def prompts_of(batch: int, context: int, vocab: int) -> list[list[int]]:
    """Random prompts of mixed lengths up to `context`."""
    return [random_prompt(max(context - 37 * i, 8), vocab=vocab, seed=7000 + 10 * batch + i) for i in range(batch)]


def ask(pair, prompts, args) -> tuple[list[tokens.Reply], list[tokens.Reply]]:
    """Both servers' replies with log-probabilities. args: compare_tokens."""
    off, on = (one.client.generate(prompts, greedy(args.compare_tokens), top=tokens.TOP) for one in pair)
    return off, on


def check(pair, prompts, off, on, oracle, args) -> tuple[dict, list[str]]:
    """(fields of an entry, what is wrong) of one batch's replies. args: bound, quantization."""
    verdict = tokens.judge(prompts, off, on, oracle=oracle, bound=args.bound, client=pair[1].client)
    entry = verdict.summary() | {"wrong_at": [vars(found) for found in verdict.wrong]}
    problems = [f"{len(verdict.wrong)} wrong tokens"] if verdict.wrong else []
    if args.quantization:
        errors = [tokens.Fp32(oracle, prompts, replies).rms_error(replies) for replies in (off, on)]
        entry |= {"off_rms_nats": round(errors[0], 4), "on_rms_nats": round(errors[1], 4)}
        if not errors[1] <= errors[0]:
            problems.append(f"log-probabilities off by {errors[1]:.3g} nats, the standard path's by {errors[0]:.3g}")
    return entry, problems


def check_all(pair, model, shape, args, results) -> list[str]:
    """Every case of at most `args.compare_up_to` tokens, as top-level fields `tokens` and `tokens_compared_by`; what is wrong, a
    sentence each."""
    import torch

    from benchmark.oracle import Oracle, Remembered

    results.set(tokens_compared_by=COMPARED[args.quantization or "bf16"])
    asked = {}
    for batch, context in args.cases:
        if context <= args.compare_up_to:
            prompts = prompts_of(batch, context, shape.vocab)
            asked[batch, context] = prompts, *ask(pair, prompts, args)
    sequences, first = [], []
    for prompts, off, on in asked.values():
        for replies in (off, on) if args.quantization else (off,):
            more = tokens.sequences_of(prompts, replies)
            sequences, first = sequences + more[0], first + more[1]
    oracle = Remembered(Oracle(model, torch.device(args.device)), sequences, first)
    entries, problems = [], []
    for batch, context in args.cases:
        entry, found = {"compared": False}, []
        if (batch, context) in asked:
            entry, found = check(pair, *asked[batch, context], oracle, args)
        entries.append({"batch": batch, "context": context, **entry})
        results.set(tokens=entries)
        problems += [f"tokens bs {batch} at {context}: {problem}" for problem in found]
        deadline.say(f"tokens bs {batch} at {context}:", {key: value for key, value in entry.items() if key != "wrong_at"}, *found)
    return problems
