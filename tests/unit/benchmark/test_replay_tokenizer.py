"""The tokenizer of random weights: every id is text, no text is an id beyond the demo's own."""

import json

import pytest

pytest.importorskip("sglang")
tokenizers = pytest.importorskip("tokenizers")

from benchmark import replay  # noqa: E402
from benchmark.agentic import tokenizer  # noqa: E402

TEXT = "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind to suffer 12345 slings, <|im_start|>user"


def test_every_id_is_text_and_text_comes_back(tmp_path):
    tokenizer.write(tmp_path, 5000, 4096)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.get_vocab_size() == 5000
    words = [made.decode([number]) for number in range(3, 5000)]
    assert all(words) and words[-1].strip() == "x4999"
    ids = made.encode(TEXT).ids
    assert max(ids) < 512 and made.decode(ids, skip_special_tokens=False) == TEXT
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 4096
    with pytest.raises(ValueError, match="a vocabulary of 300 is smaller than the tokenizer's own 512"):
        tokenizer.write(tmp_path, 300, 4096)


def test_a_model_of_random_weights_is_served_to_aiperf_with_it(tmp_path):
    def made(driver):
        args = replay.parse(["--out", str(tmp_path / driver), "--model", "qwen3-tiny", "--driver", driver, "--sessions", "1", "--scale", "0.01"])
        return replay.setup.of(args, tmp_path / driver / "work", 1024)

    with_text, ids = made("aiperf"), made("direct")
    assert "--skip-tokenizer-init" not in with_text.arguments and "--skip-tokenizer-init" in ids.arguments
    assert with_text.tokenizer == str(tmp_path / "aiperf/work/model") and ids.tokenizer is None
    assert (tmp_path / "aiperf/work/model/tokenizer.json").exists() and not (tmp_path / "direct/work/model/tokenizer.json").exists()
