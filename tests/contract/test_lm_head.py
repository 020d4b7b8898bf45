"""The kernel's logits through SGLang's real logits processor, and which heads are left to SGLang, on the CPU in a process of its own (it
needs process groups).

Oracle: the processor's own result on SGLang's product of the same hidden states.
"""

import json
import subprocess
import sys

import pytest
from sglang_models import PREAMBLE

SCRIPT = PREAMBLE + """
import sglang.srt.layers.logits_processor as processing
from sglang.srt.layers.logits_processor import LogitsMetadata, _UNQUANTIZED_LM_HEAD_METHODS
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sgl_lowlatency.guard.lm_head import _METHODS, lm_head_reasons
from sgl_lowlatency.runtime.lm_head import ComputedLogits, computes_logits, logits_for

processing._is_cpu = True  # its softcap without Triton
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
SIZES = dict(hidden_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
             intermediate_size=192, vocab_size=1000, max_position_embeddings=512)
for name, (fields, changes) in json.load(sys.stdin).items():
    config_class, model_class, _ = MODELS[fields.pop("family", "qwen3")]
    config = config_class(**{**SIZES, **fields})
    model = model_class(config)
    head, processor = model.lm_head, model.logits_processor
    head.weight.data = torch.randn_like(head.weight)
    for path, value in changes.items():
        if value == "parameter":
            value = torch.nn.Parameter(torch.zeros(1))
        owner, attribute = path.rsplit(".", 1)
        if value == "plain":
            value = type("SomeMethod", (), {"apply": lambda *args: None})()
        setattr({"head": head, "processor": processor}[owner], attribute, value)
    facts = found[name] = {"reasons": lm_head_reasons(model, config), "rows": head.weight.shape[0]}
    if facts["reasons"]:
        continue
    hidden = torch.randn(3, 128)
    facts["computes"] = computes_logits(model, head.weight.detach())
    for mode in ("DECODE", "TARGET_VERIFY"):
        outputs = []
        for is_ours in (False, True):
            buffer = torch.full((3, 1000), float("nan"), dtype=torch.float32)
            batch = LogitsMetadata(
                forward_mode=ForwardMode[mode], capture_hidden_mode=CaptureHiddenMode.FULL, next_token_logits_buffer=buffer
            )
            used = head
            if is_ours:
                logits = logits_for(batch, 3, 1000, hidden.device)
                logits.copy_((hidden @ head.weight.T)[:, :1000])  # stands for the kernel's: fp32, rounded to bf16
                used = ComputedLogits(head, hidden, logits)
                facts["in_buffer"] = logits is buffer
            outputs.append(processor(None, hidden, used, batch, None))
            facts["is_buffer"] = outputs[-1].next_token_logits is buffer or outputs[-1].next_token_logits.data_ptr() == buffer.data_ptr()
        theirs, ours = (output.next_token_logits for output in outputs)
        facts[mode] = {
            "same": torch.equal(ours, theirs), "dtype": str(ours.dtype), "shape": list(ours.shape), "finite": bool(ours.isfinite().all()),
            "hidden": outputs[1].hidden_states is hidden, "largest": float(ours.abs().max()),
        }
found["methods"] = [name for name in _METHODS if name not in _UNQUANTIZED_LM_HEAD_METHODS]
print(json.dumps(found))
"""

SERVED = {
    "untied": ({"tie_word_embeddings": False}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "llama": ({"tie_word_embeddings": False, "family": "llama"}, {}),
    "qwen2, tied": ({"tie_word_embeddings": True, "family": "qwen2"}, {}),
    "softcap": ({"tie_word_embeddings": False, "final_logit_softcapping": 5.0}, {}),
}
LEFT = {
    "fp32 products": ({"enable_lm_head_fp32": True}, {}, "logits are to be float32 products"),
    "fp32 outputs": ({"enable_lm_head_output_fp32": True}, {}, "logits are to be float32 products"),
    "server argument": ({}, {"processor.use_fp32_lm_head": True}, "logits are to be float32 products"),
    "scale": ({}, {"processor.logit_scale": 0.5}, "logits are scaled by 0.5 before they are rounded"),
    "gathered": ({}, {"processor.do_tensor_parallel_all_gather": True}, "logits are gathered from several GPUs"),
    "other vocabulary": ({}, {"processor.vocab_size": 900}, "the logits processor has a vocabulary of 900, config.vocab_size is 1000"),
    "quantised": ({}, {"head.quant_method": "plain"}, "lm_head runs SomeMethod"),
    "bias": ({}, {"head.bias": "parameter"}, "lm_head has a bias"),
    "AMX": ({}, {"head.use_intel_amx_backend": True}, "lm_head is packed for AMX"),
    "LoRA": ({}, {"head.set_lora": True}, "lm_head has LoRA adapters"),
}


@pytest.fixture(scope="module")
def facts():
    cases = {**SERVED, **{name: case[:2] for name, case in LEFT.items()}}
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=json.dumps(cases), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SERVED)
def test_the_processor_takes_the_kernels_logits_as_its_own(name, facts):
    got = facts[name]
    assert got["reasons"] == [] and got["computes"] and got["rows"] == 1024, "SGLang pads a vocabulary of 1000 to whole tiles"
    assert got["in_buffer"]
    assert name == "softcap" or got["is_buffer"], "nothing is copied where nothing is to be done"
    for mode in ("DECODE", "TARGET_VERIFY"):
        step = got[mode]
        assert step["same"] and step["finite"] and step["hidden"], mode
        assert (step["dtype"], step["shape"]) == ("torch.float32", [3, 1000])
        assert (step["largest"] <= 5.0) == (name == "softcap")


@pytest.mark.parametrize("name", LEFT)
def test_a_head_that_the_kernel_does_not_compute_is_left_to_sglang(name, facts):
    assert facts[name]["reasons"] == [LEFT[name][2]]


def test_the_methods_of_a_plain_head_are_sglangs(facts):
    assert facts["methods"] == []
