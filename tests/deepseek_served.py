"""DeepSeek-V4.1's eight small layers (deepseek_layers.py) as SGLang runs them and as it does with slices of ours, in emulation, and how far the two
are apart."""

from types import SimpleNamespace

import deepseek_layers as small
import pytest
import torch
from sglang.srt.kernel_plugins.nvidia.binding import ForwardView
from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context

from sgl_lowlatency.build.deepseek_v4 import build_slices
from sgl_lowlatency.guard import attention_slices
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.deepseek_v4_check import row_errors
from sgl_lowlatency.runtime.deepseek_v4_step import DeepseekV4Step
from sgl_lowlatency.specs.nvidia.deepseek_v4 import BOUNDS

ALL = ("attention_in", "attention_out", "moe")
SOURCES = [("sources", layer) for layer in (2, 4, 6)]
# Relative L2 of the worst row behind eight layers, from SGLang's. Half a rounding of bf16 in the embedding moves SGLang's own rows by 0.05.
FAR = 0.06


class Served:
    """The model as SGLang has it, and with slices of `names`. planted: bugs of kernels, by slice."""

    def __init__(self, names=ALL, tokens=1, check=True, planted=0, widths=tuple(range(1, 49)), **kwargs):
        self.model, self.backend = small.Model(), None
        slices = build_slices(list(self.model.layers), names, max(widths), torch.device("cpu"), 3, 5.0, EmulationOptions(planted=planted))
        self.step = DeepseekV4Step(slices, widths, tokens, BOUNDS, check, attention_slices.pool_reasons, **kwargs)

    def launches(self):
        """Of each slice's kernel."""
        return [int(kernel._state.view(torch.int32)[32]) for kernel in self.step._kernels.values()]  # abi::MoeState::launches

    def run(self, ids, positions, batch, is_on=True):
        """(normed states, streams, states that drafts read, pages of keys) of SGLang's forward, behind the plugin's dispatch or without it."""
        self.backend = small.Backend()
        set_forward_context(ForwardContext(attn_backend=self.backend))
        step = self.step.plan(ids, batch) if is_on else None
        original = self.model.forward
        if step is None:
            (normed, streams), aux = original(ids, positions, batch, None)
        else:
            step = SimpleNamespace(mode=step.mode, rows=step.rows, view=ForwardView(self.backend))
            (normed, streams), aux = self.step.forward(step, original, ids, positions, batch, None)
        return normed, streams, aux, torch.stack(self.backend.token_to_kv_pool.pages)


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    small.install(monkeypatch)
    monkeypatch.setattr(sglang_state, "metrics_enabled", lambda: False)
    previous = set_forward_context(None)
    with small.one_gpu(), torch.no_grad():
        yield
    set_forward_context(previous)


def keys_of(pages, slots):
    return torch.stack([small.in_oracle.read_slots(small.KvPages(layer, small.PAGE), slots.long()) for layer in pages], 1)


def distances(ours, theirs, slots):
    """The worst row's of each output; keys of all layers as one."""
    pairs = zip(("normed", "streams", "aux", "keys"), (*ours[:3], keys_of(ours[3], slots)), (*theirs[:3], keys_of(theirs[3], slots)))
    return {name: float(row_errors(a, b).max()) for name, a, b in pairs}


def is_near(found):
    return all(worst < FAR for worst in found.values())


def assert_near(served, batch_of, seen_sources=SOURCES):
    ids, positions, batch = batch_of
    theirs = served.run(ids, positions, batch, is_on=False)
    asked = served.backend.called
    before = served.launches()
    ours = served.run(ids, positions, batch)
    checked = 8 if served.step._check and served.step._checked == {ids.shape[0]} and before[0] == 0 else 0
    assert served.launches() == [launches + 8 + checked for launches in before], "each slice's kernel once a layer, and once more in the check"
    assert served.backend.called == asked and [call for call in asked if call[0] == "sources"] == seen_sources, "SGLang's backend is asked alike"
    found = distances(ours, theirs, batch.slots)
    assert is_near(found), found
    left, right = ours[3].clone(), theirs[3].clone()
    for pages in (left, right):
        for slot in batch.slots.tolist():
            at = slot % small.PAGE
            pages[:, slot // small.PAGE, at * 576 : (at + 1) * 576] = 0
            pages[:, slot // small.PAGE, small.PAGE * 576 + at * 8 : small.PAGE * 576 + (at + 1) * 8] = 0
    assert torch.equal(left, right), "keys of other slots"
    assert batch.residual_stream is None
    return found
