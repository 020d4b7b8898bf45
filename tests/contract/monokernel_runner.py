"""verify_runner.py's model runner with AMD's dispatch on it: SGLang's own install, gfx950 emulated, and verify steps of hand-built batches.

Run as a script it prints one JSON object of facts: test_monokernel_dispatch.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from verify_runner import DRAFTS, PROMPTS, VerifyRunner, relative

WITHHELD, MASK_OFF_BY_ONE = 3, 8  # dialect::Planted


class MonokernelRunner(VerifyRunner):
    """As VerifyRunner; what `install` puts on the model is AMD's."""

    def install(self, *, planted: int = 0, is_draft: bool = False, deadline_s: float | None = None):
        """What SGLang does when it has loaded a model. Returns what the spec built."""
        from sglang.kernels.plugin_kernels.amd.spec import BACKEND
        from sglang.srt.kernel_plugins.amd import binding

        from sgl_lowlatency.build import monokernel
        from sgl_lowlatency.kernels.decode_step import EmulationOptions
        from sgl_lowlatency.kernels.monokernel import Monokernels

        def planted_kernels(*args, **options):
            options |= {} if deadline_s is None else {"deadline_s": deadline_s}
            return Monokernels(*args, **options, emulation=EmulationOptions(planted=planted))

        installed, built = binding._install_forward, []
        self.runner.model.__dict__.pop("forward", None)
        binding._backend = lambda: BACKEND
        binding._install_forward = lambda **given: (built.append(given["built"]), installed(**given))
        monokernel.Monokernels = planted_kernels
        try:
            binding.install_monokernel_forward(model=self.runner.model, hf_config=self.runner.model_config.hf_config, capture_tail_hooks=[])
        finally:
            binding._install_forward, monokernel.Monokernels = installed, Monokernels
        return built[0]

    def forward_originally(self, batch):
        """The runner's forward by the model's own, uncounted."""
        dispatched = self.runner.model.__dict__.pop("forward")
        try:
            return self.forward(batch)
        finally:
            self.runner.model.__dict__["forward"] = dispatched


def model_rope(verify: MonokernelRunner) -> torch.Tensor:
    """The model's cos/sin table as it is now."""
    return verify.runner.model.model.layers[0].self_attn.rotary_emb.cos_sin_cache


def reserve_rope(verify: MonokernelRunner) -> None:
    """What load_model does behind the install, of a context that is longer than the table."""
    from sglang.srt.environ import envs
    from sglang.srt.utils.common import reserve_rope_cache_for_long_sequences

    with envs.SGLANG_ROPE_CACHE_SAFETY_MARGIN.override(4096):
        reserve_rope_cache_for_long_sequences(verify.runner.model, verify.runner.model_config)


def step_of(built, batch):
    """(x, inputs) of a step of `batch`, whose values nothing reads."""
    from sgl_lowlatency.kernels.monokernel import MonoInputs

    x = torch.zeros(len(batch.positions), built._geometry.hidden, dtype=torch.bfloat16)
    return x, MonoInputs(batch.positions, batch.out_cache_loc, batch.seq_lens, batch.req_pool_indices, DRAFTS, lengths_are_prefix=True)


def dispatch(verify: MonokernelRunner, model: Path) -> dict:
    """Verify steps through the dispatch, against the model's own forward and against float64; and steps that are not the kernels'."""
    from sgl_lowlatency.cli.greedy_oracle import GreedyOracle

    generator, facts = torch.Generator().manual_seed(2), {}
    built = verify.install()
    facts["summary"] = built.summary()
    facts["rope"] = {"build": model_rope(verify).shape[0]}
    reserve_rope(verify)
    prompts = [torch.randint(3, 500, (length,), generator=generator).tolist() for length in PROMPTS[:2]]
    rows, prefix_lens, _ = verify.prefill(prompts, room=2 * DRAFTS)
    drafts = torch.randint(3, 500, (len(prompts), DRAFTS), generator=generator)
    batch = verify.verify_batch(drafts, rows, prefix_lens, full=True)
    slots = batch.out_cache_loc
    ours = verify.forward(batch)
    ours_kv = verify.kv_rows(slots)
    theirs = verify.forward_originally(batch)
    facts["rope"] |= {"reserved": model_rope(verify).shape[0], "kernels": built._kernels.geometry.max_position}
    facts["rope"]["is_the_models"] = built._kernels.params(*step_of(built, batch))[0].cos_sin == model_rope(verify).data_ptr()
    facts["logits_shape"] = list(ours.next_token_logits.shape)
    for name in ("logits", "hidden_states"):
        both = [getattr(output, "next_token_logits" if name == "logits" else name) for output in (ours, theirs)]
        facts[name] = relative(*both)
    facts["kv"] = relative(ours_kv.flatten(0, 2), verify.kv_rows(slots).flatten(0, 2))
    oracle, worst = GreedyOracle(model), 0.0
    for request, prompt in enumerate(prompts):
        exact, bounds = oracle.logits(prompt + drafts[request, :1].tolist(), drafts[request, 1:].tolist() + [0])
        errors = (ours.next_token_logits.view(len(prompts), DRAFTS, -1)[request].double() - exact).abs().amax(dim=-1)
        worst = max(worst, float((errors / bounds).max()))
    facts["worst_share_of_bound"] = worst
    one = verify.decode_batch(rows, prefix_lens + DRAFTS)
    facts["decode_equals_original"] = torch.equal(verify.forward(one).next_token_logits, verify.forward_originally(one).next_token_logits)
    counts = built.coverage.counts()
    facts["executed"], facts["fallbacks"], facts["mode"] = counts.executed, counts.fallbacks, counts.mode
    return facts


def refused(verify: MonokernelRunner, **install) -> str | None:
    """What a first verify step of a kernel with a planted bug raises."""
    verify.install(**install)
    rows, prefix_lens, _ = verify.prefill([[4, 5, 6, 7]])
    try:
        verify.forward(verify.verify_batch(torch.tensor([[8, 9, 10, 11]]), rows, prefix_lens))
    except RuntimeError as error:
        return str(error)
    return None


def draft(verify: MonokernelRunner) -> str:
    """What the spec builds on a STANDALONE draft model of the target's architecture, which SGLang builds in this scope."""
    from sglang.srt.layers.moe.utils import draft_model_build_scope

    with draft_model_build_scope():
        return type(verify.install()).__name__


if __name__ == "__main__":
    checkpoint = Path(sys.argv[1])
    runner = MonokernelRunner(checkpoint)
    facts = {"dispatch": dispatch(runner, checkpoint), "wrong": refused(runner, planted=MASK_OFF_BY_ONE), "draft": draft(runner)}
    facts["hanging"] = refused(runner, planted=WITHHELD, deadline_s=0.02)
    print(json.dumps(facts))
