"""DeepSeek-V4.1 with a text that its LM head forces (forced_text.py), and DSpark drafts that foresee it: a hook for SGLang, the same with the plugin and
without.

`register` is an entry point of the group `sglang.srt.plugins`, which `install` puts on a server's path. Whatever the checkpoint's weights come from, it
puts the head of forced successors in the place of the target's LM head, and the same of the draft's Markov embedding in the place of its Markov head.
All else of the model stays as it is, and so does the work of a step. Prompts have to be forced texts themselves, of PERIOD tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmark import forced_text
from benchmark.common import sglang_hook
from benchmark.drafts import MARKOV_LOGIT
from benchmark.random_weights import LOGIT_STD

NAME = "benchmark_forced_head"
PERIOD = "BENCHMARK_FORCED_PERIOD"  # environment: tokens after which texts repeat
EMBEDDING, HEAD = "embed.weight", "head.weight"  # of DeepSeek's checkpoints
MARKOV = "markov_head."


def install(folder: Path) -> str:
    """Installs `register` in `folder`; returns what a server's PYTHONPATH needs."""
    return sglang_hook.install(folder, NAME, "benchmark.forced_head:register")


def register() -> None:
    from sglang.srt.model_loader.loader import DefaultModelLoader

    period, original = int(os.environ[PERIOD]), DefaultModelLoader.load_weights_only

    def load_weights_only(model: Any, weights: Iterable, target_device: Any) -> None:
        original(model, with_forced_heads(weights, period), target_device)

    DefaultModelLoader.load_weights_only = staticmethod(load_weights_only)


def with_forced_heads(weights: Iterable[tuple[str, Any]], period: int) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of a checkpoint, target or draft, heads replaced. Raises RuntimeError for a head in front of its embedding, and at the end for a
    checkpoint without any."""
    embeddings: dict[str, Any] = {}
    replaced = 0
    for name, tensor in weights:
        at, _, last = name.rpartition(MARKOV)
        is_head_or_embedding = name in (EMBEDDING, HEAD) if not at else last in (EMBEDDING, HEAD)
        if is_head_or_embedding and last == EMBEDDING:
            embeddings[at] = tensor
        elif is_head_or_embedding:
            if at not in embeddings:
                raise RuntimeError(f"the checkpoint has {name} in front of its embedding, which the forced text's head is made of")
            embedding = embeddings.pop(at)
            # the forced successor's logit: of the target the share of the embedding that is left in a state, times LOGIT_STD sqrt(hidden)
            tensor = forced_text.head(embedding, period, MARKOV_LOGIT / math.sqrt(embedding.shape[1]) if at else LOGIT_STD)
            replaced += 1
        yield name, tensor
    if not replaced:
        raise RuntimeError(f"the checkpoint has neither {HEAD} nor a {MARKOV}{HEAD}: no text can be forced")
