"""What benchmark/kernels/sglang_runner.py relies on in SGLang's decode graphs and one-batch benchmark."""

import inspect

import pytest
import torch

from sgl_lowlatency.kernels import abi

pytest.importorskip("sglang")

from sglang.benchmark import one_batch  # noqa: E402
from sglang.srt.compilation.torch_compile_decoration import patch_model  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.model_executor import cuda_graph_buffer_registry  # noqa: E402
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner  # noqa: E402
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend  # noqa: E402


def test_a_capture_captures_the_forward_that_the_model_has_then():
    class Model:
        def forward(self):
            return "logits"

    model = Model()
    model.forward = lambda: "hidden"
    with patch_model(model, False, num_tokens=1, tp_group=None) as forward:
        assert forward() == "hidden"


def test_the_full_backend_keeps_graphs_and_outputs_by_key():
    source = inspect.getsource(FullCudaGraphBackend)
    assert "self._graphs[shape_key] = graph" in source and "self._outputs[shape_key] = out" in source
    assert "self._graphs[shape_key].replay()" in source


def test_a_replay_names_its_graph_and_its_size():
    source = inspect.getsource(DecodeCudaGraphRunner)
    assert "self.backend.replay(self._replay_graph_key, forward_batch)" in source
    load = inspect.getsource(DecodeCudaGraphRunner.load_batch)
    assert "self._replay_graph_key = self._make_graph_key(" in load and "self.bs = bs" in load
    assert list(inspect.signature(DecodeCudaGraphRunner.capture).parameters) == ["self"]


def test_rows_that_pad_a_step_have_the_slot_of_no_token():
    """decode_step knows them by it."""
    registry = cuda_graph_buffer_registry.build_decode_registry(
        device=torch.device("cpu"), max_bs=4, max_num_token=4, seq_len_fill_value=1, cache_loc_dtype=torch.int64, share_pool=False
    )
    assert registry.get_slot("out_cache_loc").padding_policy is cuda_graph_buffer_registry.PaddingPolicy.ZERO and abi.PADDING_SLOT == 0
    allocator = TokenToKVPoolAllocator(8, dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=False)
    assert sorted(allocator.alloc(8).tolist()) == list(range(1, 9))


def test_one_batch_prefills_requests():
    assert list(inspect.signature(one_batch.extend).parameters) == ["reqs", "model_runner"]
    (request,) = one_batch.prepare_synthetic_inputs_for_latency_test(1, 3, [[7, 8, 9]])
    assert list(request.origin_input_ids) == [7, 8, 9] and callable(one_batch._init_process_global_configs)
