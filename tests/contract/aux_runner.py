"""Auxiliary hidden states of a real SGLang model on the CPU, with the dispatch and without: what the logits processor gets, and what a
verify step hands to its draft. As verify_runner.py, whose runner this is; the verify inputs are those of EAGLE3, DFLASH and DSPARK, each
in steps of another width, since a width is checked once.

Run as a script with a checkpoint's folder it prints one JSON object of facts: test_aux_hidden_states.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from verify_runner import DRAFTS, VerifyRunner, relative  # noqa: E402

LAYER_IDS = [1, -1, 0, 3, 1]  # outputs of these layers, -1 the embedding; 3 is the last of four, which nothing captures
CAPTURED = [0, 1, 2]  # the layers whose inputs they are
CAPTURES_OUTPUT = 20  # dialect::Planted


class Recorder:
    """The fifth argument of every call of the model's logits processor."""

    def __init__(self, model):
        self.seen: list = []
        model.logits_processor.register_forward_pre_hook(lambda module, args: self.seen.append(args[4]))

    def form(self) -> dict:
        """Of the newest: its type, and of its tensors type and shape."""
        newest = self.seen[-1]
        tensors = [newest] if isinstance(newest, torch.Tensor) else list(newest)
        return {"type": type(newest).__name__, "dtypes": [str(t.dtype) for t in tensors], "shapes": [list(t.shape) for t in tensors]}


def as_eagle3(batch):
    """The step with the verify input that EAGLE3's worker makes at topk 1; the tree's indices are for what follows the forward."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    causal = torch.ones((DRAFTS, DRAFTS), dtype=torch.bool).tril()
    masks = [torch.cat((torch.ones((DRAFTS, prefix), dtype=torch.bool), causal), dim=1).flatten() for prefix in batch.seq_lens.tolist()]
    spec_info = EagleVerifyInput(
        draft_token=batch.input_ids, custom_mask=torch.cat(masks), positions=batch.positions, retrieve_index=None, retrieve_next_token=None,
        retrieve_next_sibling=None, retrieve_cum_len=None, spec_steps=DRAFTS - 1, topk=1, draft_token_num=DRAFTS,
        capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=None, seq_lens_cpu=None,
    )
    return dataclasses.replace(batch, spec_info=spec_info)


def as_dflash(batch):
    """The step with the verify input that DFLASH's and DSPARK's workers make."""
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    spec_info = DFlashVerifyInput(draft_token=batch.input_ids, positions=batch.positions, draft_token_num=DRAFTS)
    return dataclasses.replace(batch, spec_info=spec_info)


def as_ragged(batch):
    """The same where DSPARK verifies fewer tokens of a request than there are."""
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    made = as_dflash(batch)
    made.spec_info.ragged_verify_layout = RaggedVerifyLayout.from_verify_lens(
        verify_lens_cpu=[DRAFTS] * batch.batch_size, device=batch.input_ids.device, grid=[DRAFTS * batch.batch_size]
    )
    return made


def layer_distances(ours: torch.Tensor, theirs: torch.Tensor, hidden: int) -> list[float]:
    return [relative(a, b) for a, b in zip(ours.split(hidden, 1), theirs.split(hidden, 1), strict=True)]


def main(checkpoint: Path) -> dict:
    verify, facts = VerifyRunner(checkpoint), {}
    model, hidden = verify.runner.model, verify.runner.model_config.hidden_size
    model.set_eagle3_layers_to_capture(LAYER_IDS)
    facts["layers_to_capture"] = list(model.model.layers_to_capture)
    built, recorder = verify.install(), Recorder(model)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 500, (length,), generator=generator).tolist() for length in (3, 70)]
    rows, prefix_lens, _ = verify.prefill(prompts, room=2 * DRAFTS)
    drafts = torch.randint(3, 500, (len(prompts), DRAFTS), generator=generator)

    def step_of(requests: int):
        return verify.verify_batch(drafts[:requests], rows[:requests], prefix_lens[:requests], full=True)

    for name, step in {"eagle3": as_eagle3(step_of(2)), "dflash": as_dflash(step_of(1))}.items():
        ours = verify.forward(step)
        form = recorder.form()
        theirs = verify.forward_originally(step)
        facts[name] = {
            "ours": form, "theirs": recorder.form(), "distances": layer_distances(ours.hidden_states, theirs.hidden_states, hidden),
            "shapes": [list(ours.hidden_states.shape), list(theirs.hidden_states.shape)],
            "logits": relative(ours.next_token_logits, theirs.next_token_logits),
        }
    null = verify.forward(verify.verify_batch(drafts, rows, prefix_lens))
    facts["null_has_hidden_states"] = null.hidden_states is not None
    ragged = as_ragged(step_of(2))
    facts["ragged_is_planned"] = built.plan(ragged.input_ids, ragged) is not None
    counts = built.coverage.counts()
    facts["executed"], facts["fallbacks"] = counts.executed, counts.fallbacks
    facts["layers_after_the_self_check"] = list(model.model.layers_to_capture)
    facts["can_dflash"] = hasattr(model, "set_dflash_layers_to_capture") or hasattr(model, "set_dspark_layers_to_capture")
    verify.install(planted=CAPTURES_OUTPUT)
    try:
        verify.forward(as_dflash(step_of(2)))
    except RuntimeError as error:
        facts["refusal"] = str(error)
    return facts


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
