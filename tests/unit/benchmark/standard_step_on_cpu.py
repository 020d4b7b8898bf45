"""Run as a script: `standard_step_on_cpu.py FOLDER ARCHITECTURE`. One process, one SGLang runner (its state is global).

Prints, as JSON, how far SGLang's logits of decode steps are from the float32 oracle's (Qwen3; of the same weights), and how far
from SGLang's are the head's of the forward without head, and decode_step's in host emulation, bound to the same runner and batch.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ |= {"SGL_LOWLATENCY_EMULATE": "1", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch  # noqa: E402

from benchmark import models  # noqa: E402
from benchmark.kernels import sglang_runner  # noqa: E402
from benchmark.kernels.plugin_step import PluginStep  # noqa: E402
from benchmark.oracle import Oracle  # noqa: E402
from benchmark.serve import server  # noqa: E402
from sgl_lowlatency.runtime import emulated_device  # noqa: E402

CASES = ((1, 40), (3, 21))


def distance(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def main(folder, architecture):
    emulated_device.install()
    has_qk_norm, has_qkv_bias = architecture == "Qwen3ForCausalLM", architecture == "Qwen2ForCausalLM"
    shape = dataclasses.replace(models.SHAPES["qwen3-tiny"], has_qk_norm=has_qk_norm, has_qkv_bias=has_qkv_bias)
    model = models.write_model(Path(folder), shape)
    arguments = server.cpu_arguments(context=256, max_batch=4, max_tokens=1024)
    runner = sglang_runner.load(["--model-path", str(model), "--skip-tokenizer-init", *arguments])
    plugin = PluginStep(runner, [rows for rows, _ in CASES])
    found = []
    for rows, context in CASES:
        step = sglang_runner.decode(runner, rows=rows, context=context, vocab=shape.vocab)
        plugin.bind(step.batch)
        plugin.launch_with_head()
        ours, head = plugin.logits, plugin.step.weights.lm_head[: shape.vocab]
        entry = {"rows": rows, "lengths": step.batch.seq_lens.tolist(), "in_graph": step.in_graph}
        with sglang_runner.forward_without_head(runner.model):  # what is captured as the graph without head, run eagerly
            hidden = runner.forward(step.batch).logits_output
        entry["without_head"] = distance(hidden @ head.T, step.logits)
        entry["again"] = distance(sglang_runner.again(runner, step).logits, step.logits)
        entry["plugin"] = distance(ours, step.logits)
        entry["shuffled"] = distance(ours, step.logits.roll(1, dims=-1))
        if has_qk_norm:
            sequences = [prompt + [token] for prompt, token in zip(step.prompts, step.token.tolist(), strict=True)]
            want = torch.cat(Oracle(model, "cpu").logits(sequences, [context - 1] * rows))
            entry["oracle"] = distance(step.logits, want)
        found.append(entry)
    print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)  # SGLang's process groups outlive main otherwise


if __name__ == "__main__":
    main(*sys.argv[1:])
