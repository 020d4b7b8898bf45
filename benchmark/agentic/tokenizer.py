"""A tokenizer for a model of random weights: what aiperf sends is text, and whatever token such a model answers must be text again.

The demo's byte-level one encodes; every id beyond its own stands for a word that no text is encoded to: `x` and its number.
"""

from __future__ import annotations

import json
from pathlib import Path

from sgl_lowlatency.cli.tiny_model import TinyModel, write_tokenizer

SPACE = "Ġ"  # a space in a byte-level vocabulary


def write(directory: Path, vocab: int, max_position: int) -> None:
    """Writes tokenizer files of `vocab` ids into `directory`. Raises ValueError for fewer than the demo's."""
    sizes = TinyModel(max_position_embeddings=max_position)
    if vocab < sizes.vocab_size:
        raise ValueError(f"a vocabulary of {vocab} is smaller than the tokenizer's own {sizes.vocab_size}")
    write_tokenizer(directory, sizes)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words |= {f"{SPACE}x{number}": number for number in range(len(words), vocab)}
    path.write_text(json.dumps(content))
