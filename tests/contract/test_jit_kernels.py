"""SGLang's builders of the kernels that benchmark/serve/warm_kernels.py compiles ahead: each exists and asks for the module named."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark import models  # noqa: E402
from benchmark.serve import warm_kernels  # noqa: E402

CONFIG = models.hf_config(models.SHAPES["qwen3-8b"])


def test_every_builder_asks_for_the_kernel_it_is_named_after(monkeypatch):
    from sglang.kernels.ops.activation import activation
    from sglang.kernels.ops.attention import clamp_position, rope
    from sglang.kernels.ops.kvcache import kvcache
    from sglang.kernels.ops.layernorm import norm
    from sglang.kernels.ops.speculative import tree

    asked = []
    for module in (activation, clamp_position, rope, kvcache, norm, tree):
        monkeypatch.setattr(module, "load_jit", lambda name, *args, **more: asked.append((name, *map(str, args))))
    builders = warm_kernels.kernel_builders(CONFIG, algorithm="ngram")
    builders.pop("ngram_corpus")  # tests/contract/test_ngram_drafts.py builds and uses it
    assert warm_kernels.build(builders) == []
    assert {name for name, *_ in asked} == set(builders) == {
        "activation", "fused_rope", "kvcache", "clamp_position", "qknorm", "speculative_tree",
    }
    arguments = {name: " ".join(args) for name, *args in asked}
    assert "128" in arguments["qknorm"] and "128" in arguments["fused_rope"] and "2048" in arguments["kvcache"]


def test_what_dflash_rehearses(monkeypatch):
    """Behind its graphs SGLang verifies sampled drafts once: FlashInfer's sampling module, whose builder asks for a GPU at once, and its
    own for four logits a vector."""
    from sglang.kernels.ops.speculative import sampling

    asked = []
    monkeypatch.setattr(sampling, "load_jit", lambda name, *args, **more: asked.append((name, *map(str, args))))
    builders = warm_kernels.kernel_builders(CONFIG, algorithm="dflash")
    others = warm_kernels.kernel_builders(CONFIG, algorithm=None)
    assert set(builders) - set(others) == {"flashinfer_sampling", "speculative_sampling"}
    assert warm_kernels.build({"speculative_sampling": builders["speculative_sampling"]}) == []
    assert asked == [("speculative_sampling", "4", "true")] or asked == [("speculative_sampling", "4", "True")], asked


def test_a_renamed_builder_is_a_sentence_and_no_crash(monkeypatch):
    from sglang.kernels.ops.layernorm import norm

    monkeypatch.delattr(norm, "_jit_qknorm_module")
    (sentence,) = warm_kernels.build({"qknorm": warm_kernels.kernel_builders(CONFIG, algorithm=None)["qknorm"]})
    assert sentence.startswith("qknorm not built: AttributeError")
