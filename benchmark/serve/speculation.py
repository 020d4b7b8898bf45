"""The algorithms of verify_ab.py: what both servers are told of each, and what its drafts need."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """name: SGLang's. reads_layers: its drafts read the target's hidden states between layers. copies: they are of what the context has, so
    prompts have to be forced texts."""

    name: str
    reads_layers: bool = False
    copies: bool = False


ALGORITHMS = {
    "ngram": Algorithm("NGRAM"),
    "eagle3": Algorithm("EAGLE3", reads_layers=True),
    "dflash": Algorithm("DFLASH", reads_layers=True, copies=True),
    "dspark": Algorithm("DSPARK", reads_layers=True),
    "standalone": Algorithm("STANDALONE"),
}


def arguments(key: str, num_drafts: int, draft: Path | None) -> list[str]:
    """Server arguments of both arms beyond the common ones: a chain of `num_drafts` tokens a verify step and request. draft: its directory, None
    for NGRAM."""
    head = ["--speculative-algorithm", ALGORITHMS[key].name]
    if key == "ngram":
        return [*head, "--speculative-ngram-max-bfs-breadth", "1", "--speculative-num-draft-tokens", str(num_drafts)]
    head += ["--speculative-draft-model-path", str(draft)]
    if key == "dflash":
        return [*head, "--speculative-dflash-block-size", str(num_drafts)]
    if key == "dspark":
        return [*head, "--speculative-dspark-block-size", str(num_drafts - 1)]
    steps = ["--speculative-num-steps", str(num_drafts - 1), "--speculative-eagle-topk", "1"]
    return [*head, *steps, "--speculative-num-draft-tokens", str(num_drafts)]
