"""Draft models of benchmark/drafts.py in SGLang's own classes on the CPU: what its loader makes of their files, and what they propose behind a
real target of SGLang's. As verify_runner.py, whose runner the target is.

SGLang runs such a draft in a worker that needs CUDA, so the draft's forward is called by hand, as the worker calls it. What stands in: the
attention, plain torch over all keys, and for DFLASH and DSPARK the cache of the context, whose K and V the draft's own methods make.

Run as a script with a scratch folder it prints one JSON object of facts: test_drafts.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]  # verify_runner.py, benchmark
from verify_runner import DRAFTS, VerifyRunner  # noqa: E402

from benchmark import drafts, forced_text, models, random_weights  # noqa: E402

PERIOD, PROMPT = 64, 200
TARGET = models.Shape(8, 1024, 8, 4, 128, 1024, 1024, 2048, 1e-6, False)
STARTS = (128, 320, 575)  # tokens that a text starts from, 575 the last of its group


class Attention(torch.nn.Module):
    """What a draft's attention layer is replaced by. Called with [rows, heads * dim] it attends to `context`, (K, V) [tokens, heads, dim],
    and to the rows: causally, or to all of them."""

    def __init__(self, layer, is_causal: bool, context=None):
        super().__init__()
        self.heads, self.kv_heads, self.scaling = layer.tp_q_head_num, layer.tp_k_head_num, layer.scaling
        self.is_causal, self.context = is_causal, context

    def forward(self, q, k, v, forward_batch):
        q, k, v = (x.view(len(x), heads, -1).float() for x, heads in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads)))
        if self.context is not None:
            k, v = torch.cat((self.context[0].float(), k)), torch.cat((self.context[1].float(), v))
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("rhd,khd->hrk", q, k) * self.scaling
        if self.is_causal:
            scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
        return torch.einsum("hrk,khd->rhd", scores.softmax(-1), v).flatten(1).bfloat16()


def load(path: Path, server_args) -> tuple[torch.nn.Module, dict]:
    """(the model by SGLang's loader, facts on its parameters): those that no tensor filled, and elements that tensors filled."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.model_loader.utils import get_model_architecture

    config = ModelConfig.from_server_args(server_args, model_path=str(path), is_draft_model=True)
    model_class = get_model_architecture(config)[0]
    load_weights = model_class.load_weights

    def load_over_nan(model, weights):
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        return load_weights(model, weights)

    model_class.load_weights = load_over_nan
    try:
        loader = get_model_loader(load_config=LoadConfig(), model_config=config)
        model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
    finally:
        model_class.load_weights = load_weights
    unfilled = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    filled = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in unfilled)
    return model, {"class": type(model).__name__, "unfilled": sorted(unfilled), "filled_elements": filled}


class Target:
    """The target, and what it hands to a draft."""

    def __init__(self, path: Path):
        self.verify = VerifyRunner(path)
        self.model = self.verify.runner.model

    def states(self, prompt: list[int]) -> tuple[torch.Tensor, int]:
        """(auxiliary hidden states [tokens, 3 * hidden] of a prompt, the token that follows it)."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        slots, count = self.verify._slots(len(prompt)), len(prompt)
        self.verify.table[1, :count] = slots.int()
        zero, length = torch.zeros(1, dtype=torch.int32), torch.tensor([count])
        output = self.verify._run(
            "EXTEND", torch.tensor(prompt), torch.arange(count), length, torch.tensor([1]), slots, extend_num_tokens=count,
            extend_seq_lens=length.int(), extend_prefix_lens=zero, extend_start_loc=zero, extend_prefix_lens_cpu=[0],
            extend_seq_lens_cpu=[count], extend_logprob_start_lens_cpu=[0], capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        return output.hidden_states, int(output.next_token_logits[-1].argmax())

    def embed(self, tokens: list[int]) -> torch.Tensor:
        return self.model.model.embed_tokens(torch.tensor(tokens))

    def best(self, hidden: torch.Tensor) -> list[int]:
        return (hidden.float() @ self.model.lm_head.weight.float().T).argmax(-1).tolist()


def propose_eagle3(draft, target: Target, prompt: list[int], aux: torch.Tensor, anchor: int) -> list[int]:
    """The chain: the token after each position beside the states at it, then each draft beside what the draft left at the one before."""
    layer = draft.model.layers[0].self_attn
    original, layer.attn = layer.attn, Attention(layer.attn, is_causal=True)
    tokens, states, found = [*prompt[1:], anchor], draft.model.fc(aux), []
    for _ in range(DRAFTS - 1):
        batch = SimpleNamespace(spec_info=SimpleNamespace(hidden_states=states))
        hidden, [left] = draft.model(torch.tensor(tokens), torch.arange(len(tokens)), batch, input_embeds=target.embed(tokens))
        found.append(target.best(hidden[-1:])[0])
        tokens, states = [*tokens, found[-1]], torch.cat((states, left[-1:]))
    layer.attn = original
    return found


def block_hidden(draft, target: Target, prompt: list[int], aux: torch.Tensor, block: list[int]) -> torch.Tensor:
    """What a DFLASH or DSPARK draft leaves at the positions of a block behind the prompt [block, hidden]."""
    layer = draft.layers[0].self_attn
    layer.use_table_qk_norm_rope = False  # a kernel of Triton's; the same norm and rotation apart
    k, v = layer.kv_proj_only(draft.project_target_hidden(aux))
    k = layer.apply_k_rope(torch.arange(len(prompt)), layer.apply_k_norm(k))
    context = tuple(x.view(len(prompt), layer.num_kv_heads, layer.head_dim) for x in (k, v))
    original = layer.attn
    assert original.attn_type.value == "encoder_only", "the positions of a block see each other"
    layer.attn = Attention(original, is_causal=False, context=context)
    positions = torch.arange(len(prompt), len(prompt) + len(block))
    hidden = draft(torch.tensor(block), positions, None, input_embeds=target.embed(block)).hidden_states
    layer.attn = original
    return hidden


def propose_dflash(draft, target, prompt, aux, anchor) -> list[int]:
    mask = draft.draft_config.mask_token_id
    return target.best(block_hidden(draft, target, prompt, aux, [anchor] + [mask] * (DRAFTS - 1))[1:])


def propose_dspark(draft, target, prompt, aux, anchor) -> list[int]:
    draft.attach_shared_modules(embed_tokens=target.model.model.embed_tokens, lm_head=target.model.lm_head)
    mask, previous, found = draft.draft_config.mask_token_id, torch.tensor([anchor]), []
    logits, _ = draft.compute_base_logits(block_hidden(draft, target, prompt, aux, [anchor] + [mask] * (draft.gamma - 1)))
    for step in range(draft.gamma):
        bias, _ = draft.markov_head.step_bias(previous, hidden_states=None, state=None)
        previous = (logits[step : step + 1] + bias).argmax(-1)
        found.append(int(previous))
    return found


PROPOSE = {"eagle3": propose_eagle3, "dflash": propose_dflash, "dspark": propose_dspark}


def text_before(token: int) -> list[int]:
    """The PROMPT tokens of the forced text that end with `token`."""
    return forced_text.text(token, PERIOD * 8, vocab=TARGET.vocab, period=PERIOD)[-PROMPT:]


@torch.no_grad()
def main(work: Path) -> dict:
    random_weights.register()
    target = Target(models.write_model(work / "target", TARGET, period=PERIOD))
    target.model.set_eagle3_layers_to_capture(drafts.captured_layers(TARGET.num_layers))
    facts = {"layers_to_capture": list(target.model.model.layers_to_capture)}
    for algorithm, family in [*((name, "qwen3") for name in drafts.ARCHITECTURES), ("standalone", "qwen3"), ("standalone", "llama")]:
        name = algorithm if family == "qwen3" else f"{algorithm} {family}"
        path = drafts.write_draft(work / name, algorithm, TARGET, drafts=DRAFTS, period=PERIOD, family=family)
        drawn, _ = load(path, target.verify.runner.server_args)
        drafts.write_files(path)
        draft, facts[name] = load(path, target.verify.runner.server_args)
        from safetensors import safe_open

        with safe_open(path / "model.safetensors", "pt") as tensors:
            facts[name]["elements"] = sum(tensors.get_tensor(key).numel() for key in tensors.keys())
        pairs = zip(drawn.named_parameters(), draft.named_parameters(), strict=True)
        facts[name]["drawn_as_in_files"] = all(torch.equal(a, b) for (key, a), (_, b) in pairs if key not in facts[name]["unfilled"])
        if algorithm not in PROPOSE:
            continue
        right, one_late, wanted = [], [], []
        for token in STARTS:
            prompt = text_before(token)
            aux, anchor = target.states(prompt)
            wanted.append(forced_text.text(token, DRAFTS, vocab=TARGET.vocab, period=PERIOD))
            right.append([anchor, *PROPOSE[algorithm](draft, target, prompt, aux, anchor)])
            one_late.append([anchor, *PROPOSE[algorithm](draft, target, prompt, aux.roll(1, dims=0), anchor)])
        facts[name] |= {"proposed": right, "wanted": wanted, "from_states_of_the_position_before": one_late}
    return facts


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
