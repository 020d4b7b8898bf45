"""SGLang's real model runner on the CPU, with a speculative server's settings and the plugin's dispatch on its model.

No NGRAM server starts without CUDA's driver library, so verify steps are driven here: prompts are prefilled by SGLang, draft tokens
get slots as its NGRAM worker gives them, and a ForwardBatch as the worker makes it goes through the runner. What stands in: the
attention of a verify step (torch_native has none; fa3's is plain causal at topk 1), and the kernel where it takes one row a request.

Run as a script it prints one JSON object of facts: test_verify_dispatch.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # verify_step.py

DRAFTS = 4
CONTEXT_LENGTH, MAX_TOTAL_TOKENS = 1100, 8192
PROMPTS = (3, 64, 97)


class VerifyRunner:
    """A loaded model of the tiny checkpoint in `model`, its pools, and the dispatch once `install` has put it there."""

    def __init__(self, model: Path):
        from sglang.benchmark import one_batch
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, prepare_server_args

        load_plugins()
        MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: None  # a Triton kernel that moves accepted rows later
        arguments = ["--model-path", str(model), "--device", "cpu", "--attention-backend", "torch_native"]
        arguments += ["--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled", "--mem-fraction-static", "0.3"]
        arguments += ["--context-length", str(CONTEXT_LENGTH), "--max-total-tokens", str(MAX_TOTAL_TOKENS)]
        arguments += ["--max-running-requests", "16", "--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"]
        server_args = prepare_server_args([*arguments, "--speculative-num-draft-tokens", str(DRAFTS)])
        server_args.resolve_once()
        publish(server_args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=0, gpu_id=0))
        one_batch._init_process_global_configs()
        self.runner = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)[0].torch_runner
        self.original = self.runner.model.forward
        verify_as_a_chain(self.runner.attn_backend)
        self._next_slot, self._next_row = 1, 1

    def install(self, *, planted: int = 0, is_draft: bool = False):
        """What SGLang does at start: builds the spec and puts its dispatch on the model. Returns what was built."""
        from sglang.srt.kernel_plugins.nvidia import binding

        from sgl_lowlatency.build import assemble
        from sgl_lowlatency.kernels.decode_step import DecodeStep, EmulationOptions

        self.runner.model.__dict__.pop("forward", None)
        binding.megakernel_enabled = lambda: True
        assemble.DecodeStep = lambda *args, **group: DecodeStep(*args, **group, emulation=EmulationOptions(planted=planted))
        binding.install_megakernel(
            model=self.runner.model, hf_config=self.runner.model_config.hf_config, capture_tail_hooks=[], is_draft=is_draft
        )
        return binding.built_megakernel(self.runner.model)

    def prefill(self, prompts: list[list[int]], room: int = DRAFTS):
        """Runs the prompts through SGLang, request after request; returns (request rows, prefix lengths, next tokens) int64.
        room: slots that every request gets behind its prompt."""
        rows, following = [], []
        for prompt in prompts:
            row, reserved = self._next_row, self._slots(len(prompt) + room)
            self._next_row += 1
            self.table[row, : len(reserved)] = reserved.int()
            slots, length = reserved[: len(prompt)], torch.tensor([len(prompt)])
            output = self._run(
                "EXTEND", torch.tensor(prompt), torch.arange(len(prompt)), length, torch.tensor([row]), slots,
                extend_num_tokens=len(prompt), extend_seq_lens=length.int(), extend_prefix_lens=torch.zeros(1, dtype=torch.int32),
                extend_start_loc=torch.zeros(1, dtype=torch.int32), extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[len(prompt)],
                extend_logprob_start_lens_cpu=[0],
            )
            rows.append(row)
            following.append(int(output.next_token_logits[0].argmax()))
        return torch.tensor(rows), torch.tensor([len(prompt) for prompt in prompts]), torch.tensor(following)

    def verify_batch(self, drafts: torch.Tensor, rows: torch.Tensor, prefix_lens: torch.Tensor, *, full: bool = False):
        """A verify step's ForwardBatch, in the slots that lie behind the prefixes. drafts: [requests, DRAFTS], token ids. full:
        hidden states are wanted, as EAGLE does."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
        from sglang.srt.speculative.ngram_info import NgramVerifyInput

        behind = prefix_lens[:, None] + torch.arange(DRAFTS)
        positions, slots = behind.flatten(), self.table[rows[:, None], behind].long().flatten()
        spec_info = NgramVerifyInput(
            draft_token=drafts.flatten(), custom_mask=torch.ones(1, dtype=torch.bool), positions=positions, draft_token_num=DRAFTS
        )
        return self._batch(
            "TARGET_VERIFY", drafts.flatten(), positions, prefix_lens, rows, slots, spec_info=spec_info,
            capture_hidden_mode=CaptureHiddenMode.FULL if full else CaptureHiddenMode.NULL,
        )

    def decode_batch(self, rows: torch.Tensor, lengths: torch.Tensor):
        """A decode step's ForwardBatch, of token 5 behind `lengths` tokens."""
        slots = self.table[rows, lengths].long()
        return self._batch("DECODE", torch.full((len(rows),), 5), lengths, lengths + 1, rows, slots)

    def forward(self, batch):
        """The runner's forward: attention planned, then the model's, whoever runs it."""
        return self.runner.forward(batch).logits_output

    def forward_originally(self, batch):
        """The same without the dispatch."""
        dispatched = self.runner.model.__dict__.pop("forward")
        try:
            return self.forward(batch)
        finally:
            self.runner.model.__dict__["forward"] = dispatched

    def kv_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """[layers, 2, slots, heads, channels]: K and V that lie there."""
        pairs = [self.runner.token_to_kv_pool.get_kv_buffer(layer) for layer in range(self.runner.model_config.num_hidden_layers)]
        return torch.stack([torch.stack([k[slots], v[slots]]) for k, v in pairs])

    @property
    def table(self) -> torch.Tensor:
        return self.runner.req_to_token_pool.req_to_token

    def _slots(self, count: int) -> torch.Tensor:
        """Slots nobody has, scattered."""
        slots = self._next_slot + torch.randperm(count, generator=torch.Generator().manual_seed(count))
        self._next_slot += count
        return slots

    def _batch(self, mode, input_ids, positions, seq_lens, rows, slots, **fields):
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        fields = {"capture_hidden_mode": CaptureHiddenMode.NULL} | fields
        return ForwardBatch(
            forward_mode=ForwardMode[mode], batch_size=len(rows), input_ids=input_ids, positions=positions, seq_lens=seq_lens,
            seq_lens_cpu=seq_lens, seq_lens_sum=int(seq_lens.sum()), orig_seq_lens=seq_lens, req_pool_indices=rows, out_cache_loc=slots,
            spec_algorithm=self.runner.spec_algorithm, **fields,
        )

    def _run(self, *args, **kwargs):
        return self.forward(self._batch(*args, **kwargs))


def verify_as_a_chain(backend) -> None:
    """Gives torch_native what fa3 does with a verify step at topk 1: extend by the draft tokens, causally."""
    extend = backend.forward_extend

    def forward_extend(q, k, v, layer, forward_batch, save_kv_cache=True):
        if forward_batch.forward_mode.is_target_verify():
            prefix = forward_batch.seq_lens
            forward_batch = dataclasses.replace(
                forward_batch, seq_lens=prefix + DRAFTS, extend_prefix_lens=prefix, extend_seq_lens=torch.full_like(prefix, DRAFTS)
            )
        return extend(q, k, v, layer, forward_batch, save_kv_cache)

    backend.forward_extend = forward_extend


def generate(verify: VerifyRunner, prompts, new_tokens: int, draft, forward) -> tuple[list[list[int]], int]:
    """Greedy texts by speculation as SGLang's worker does it, and the steps it took. draft(request, text) names the DRAFTS - 1 tokens
    that may follow; forward runs a verify step's batch."""
    rows, prefix_lens, following = verify.prefill(prompts, room=new_tokens + 2 * DRAFTS)
    texts, steps = [[int(token)] for token in following], 0
    while min(map(len, texts)) < new_tokens:
        drafts = torch.tensor([[text[-1], *draft(request, text)] for request, text in enumerate(texts)])
        chosen = forward(verify.verify_batch(drafts, rows, prefix_lens)).next_token_logits.argmax(dim=-1).view(drafts.shape)
        right = (drafts[:, 1:] == chosen[:, :-1]).int().cumprod(dim=1).sum(dim=1)
        for request, text in enumerate(texts):
            if len(text) < new_tokens:
                accepted = chosen[request, : int(right[request]) + 1].tolist()
                text += accepted
                prefix_lens[request] += len(accepted)
        steps += 1
    return texts, steps


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative L2 distance of any row."""
    actual, expected = actual.float().flatten(1), expected.float().flatten(1)
    return float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).max())


def dispatch(verify: VerifyRunner, model: Path) -> dict:
    """Verify steps through the dispatch, against the model's own forward and against float64."""
    from sgl_lowlatency.cli.greedy_oracle import GreedyOracle

    generator, facts = torch.Generator().manual_seed(2), {}
    built = verify.install()
    facts["widths"], facts["summary"] = list(built.widths), built.summary()
    prompts = [torch.randint(3, 500, (length,), generator=generator).tolist() for length in PROMPTS]
    rows, prefix_lens, _ = verify.prefill(prompts, room=2 * DRAFTS)
    drafts = torch.randint(3, 500, (len(prompts), DRAFTS), generator=generator)
    batch = verify.verify_batch(drafts, rows, prefix_lens, full=True)
    slots, before = batch.out_cache_loc, [buffer.clone() for buffer in verify.runner.token_to_kv_pool.get_kv_buffer(1)]
    ours = verify.forward(batch)
    ours_kv = verify.kv_rows(slots)
    after = verify.runner.token_to_kv_pool.get_kv_buffer(1)
    untouched = torch.ones(len(before[0]), dtype=torch.bool)
    untouched[slots] = False
    facts["other_slots_kept"] = all(torch.equal(a[untouched], b[untouched]) for a, b in zip(after, before))
    theirs = verify.forward_originally(batch)
    facts["logits_dtype"], facts["logits_shape"] = str(ours.next_token_logits.dtype), list(ours.next_token_logits.shape)
    facts["logits"] = relative(ours.next_token_logits, theirs.next_token_logits)
    facts["hidden_states"] = relative(ours.hidden_states, theirs.hidden_states)
    facts["kv"] = relative(ours_kv.flatten(0, 2), verify.kv_rows(slots).flatten(0, 2))
    null = verify.verify_batch(drafts, rows, prefix_lens)
    facts["null_has_hidden_states"] = verify.forward(null).hidden_states is not None
    oracle, worst = GreedyOracle(model), 0.0
    for request, prompt in enumerate(prompts):
        exact, bounds = oracle.logits(prompt + drafts[request, :1].tolist(), drafts[request, 1:].tolist() + [0])
        errors = (ours.next_token_logits.view(len(prompts), DRAFTS, -1)[request].double() - exact).abs().amax(dim=-1)
        worst = max(worst, float((errors / bounds).max()))
    facts["worst_share_of_bound"] = worst
    one = verify.decode_batch(rows, prefix_lens + DRAFTS)
    facts["decode_equals_original"] = torch.equal(verify.forward(one).next_token_logits, verify.forward_originally(one).next_token_logits)
    many = built.widths[-1] // DRAFTS + 1
    verify.table[1 : many + 1, 1 : DRAFTS + 1] = verify._slots(many * DRAFTS).view(many, DRAFTS).int()
    verify.forward(verify.verify_batch(torch.full((many, DRAFTS), 7), torch.arange(1, many + 1), torch.full((many,), 1)))
    counts = built.coverage.counts()
    facts["executed"], facts["fallbacks"], facts["mode"] = counts.executed, counts.fallbacks, counts.mode
    return facts


def texts(verify: VerifyRunner, model: Path) -> dict:
    """Texts that speculation makes of drafts that are right, wrong from somewhere on, or wrong at once."""
    from sgl_lowlatency.cli.greedy_oracle import GreedyOracle

    generator, oracle, new_tokens = torch.Generator().manual_seed(4), GreedyOracle(model), 40
    prompts = [torch.randint(3, 500, (length,), generator=generator).tolist() for length in (5, 62)]
    verify.install()
    standard, slow = generate(verify, prompts, new_tokens, lambda *_: [0] * (DRAFTS - 1), verify.forward_originally)

    def guess(request, text):
        drafts = (standard[request] + [0] * DRAFTS)[len(text) : len(text) + DRAFTS - 1]
        wrong_from = int(torch.randint(0, DRAFTS + 2, (1,), generator=generator))
        return [token if at < wrong_from else (token + 1) % 500 for at, token in enumerate(drafts)]

    ours, fast = generate(verify, prompts, new_tokens, guess, verify.forward)
    wrong = [
        vars(choice) for prompt, text in zip(prompts, ours) for choice in oracle.judge(prompt, text) if not choice.is_right
    ]
    return {"wrong": wrong, "steps": fast, "steps_without_drafts": slow, "tokens": sum(map(len, ours)), "wanted": new_tokens}


def refused(verify: VerifyRunner) -> dict:
    """A kernel with a wrong mask at its first verify step."""
    verify.install(planted=8)
    rows, prefix_lens, _ = verify.prefill([[4, 5, 6, 7]])
    batch = verify.verify_batch(torch.tensor([[8, 9, 10, 11]]), rows, prefix_lens)
    try:
        verify.forward(batch)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": None}


def streams(verify: VerifyRunner) -> dict:
    """What SGLang's MoE layers do with streams that are not theirs: the self-check gives them ours. Layer 1 starts from one a thousand times as
    loud as what it adds, the others from what the layer before left."""
    from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
    from sgl_lowlatency.runtime.self_check_streams import streamed_as

    model, layers = verify.runner.model, verify.runner.model.model.layers
    rows, prefix_lens, _ = verify.prefill([[4, 5, 6, 7], [9, 8, 7]], room=2 * DRAFTS)
    batch = verify.verify_batch(torch.tensor([[8, 9, 10, 11], [3, 4, 5, 6]]), rows, prefix_lens, full=True)
    model.set_eagle3_layers_to_capture([0])  # the output of layer 0
    free = verify.forward_originally(batch).hidden_states
    model.capture_aux_hidden_states, model.model.layers_to_capture = False, []
    del layers[1]._is_layer_to_capture

    streams = torch.full((*free.shape[:1], len(layers), free.shape[1]), torch.nan).bfloat16()
    streams[:, 1] = given = (torch.randn(free.shape, generator=torch.Generator().manual_seed(3)) * 1000).bfloat16()
    left = []
    hook = model.model.norm.register_forward_hook(lambda module, args, output: left.append(output[1]))
    with streamed_as(model, RoutingRecord(torch.zeros(0), torch.zeros(0), streams)) as came:
        verify.forward_originally(batch)
    hook.remove()
    values = layers[1].self_attn.qkv_proj(layers[1].input_layernorm(given))[0][:, -layers[1].self_attn.kv_size :]
    return {
        "embedding": torch.equal(came[0], model.model.embed_tokens(batch.input_ids)),
        "left_by_the_first": torch.equal(came[1], free),
        "values": torch.equal(verify.kv_rows(batch.out_cache_loc)[1, 1].flatten(1), values),
        "left_by_the_second": relative(left[0], given),
        "given_is_kept": torch.equal(streams[:, 1], given),
        "put_back": not any("forward" in vars(layer) for layer in layers),
    }


def draft(verify: VerifyRunner) -> dict:
    """The spec on a STANDALONE draft model of the target's architecture, which SGLang builds in this scope."""
    from sglang.srt.layers.moe.utils import draft_model_build_scope

    with draft_model_build_scope():
        built = verify.install(is_draft=True)
    rows, prefix_lens, _ = verify.prefill([[4, 5, 6, 7]])
    batch = verify.decode_batch(rows, prefix_lens)
    same = torch.equal(verify.forward(batch).next_token_logits, verify.forward_originally(batch).next_token_logits)
    return {"kind": type(built).__name__, "same": same, "fallbacks": built.coverage.counts().fallbacks}


if __name__ == "__main__":
    checkpoint = Path(sys.argv[1])
    runner = VerifyRunner(checkpoint)
    facts = {"dispatch": dispatch(runner, checkpoint), "texts": texts(runner, checkpoint)}
    if hasattr(runner.runner.model.model.layers[0].mlp, "topk"):
        facts["streams"] = streams(runner)
    print(json.dumps(facts | {"refused": refused(runner), "draft": draft(runner)}))
