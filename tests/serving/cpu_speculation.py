"""Lets SGLang's draft workers run on a machine without a GPU: EAGLE3, STANDALONE, DFLASH and DSPARK, drafts in chains, and NGRAM, taken for one.

`register` is an entry point of the group `sglang.srt.plugins`, which `install` puts on a server's path. What SGLang has for CUDA only, and what
stands in here, is this and no more:

- attention of verify steps and of draft steps, which torch_native has none of: extend by the draft tokens, causally but where a draft's layer is
  not; decode at the draft step's length;
- the CUDA kernels that lay a chain out, or NGRAM's tree from its mask, accept it greedily and move the K and V that were accepted, and the one that
  names the slots of a window: plain torch;
- of several ranks the all-gather into a tensor, as torch.distributed has it;
- arguments that refuse DFLASH and DSPARK on a CPU: what their resolution leaves is set instead;
- the warm-up of a kernel that moves KV rows, and `record_stream`: nothing;
- decode_step's guard refuses torch_native with speculative decoding, rightly: it is taken for a backend that verifies chains.

Triton's kernels run in its interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path

NAME = "cpu_speculation"


def install(folder: Path, register: str = "register") -> list[str]:
    """Writes an entry point at this module's function `register` into `folder`; returns what PYTHONPATH of a server needs."""
    info = folder / f"{NAME}-0.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = {NAME}:{register}\n")
    (info / "RECORD").write_text("")
    return [str(folder), str(Path(__file__).parent)]


def register() -> None:
    import torch
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    def all_gather(group, output, part):
        torch.distributed.all_gather_into_tensor(output, part, group=group.device_group)

    GroupCoordinator.all_gather_into_tensor = all_gather
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: None
    torch.Tensor.record_stream = lambda tensor, stream: None
    _attend()
    _verify_chains()
    _draft_ngrams()
    _resolve_arguments()


def register_with_late_states() -> None:
    """The same, and decode_step hands over every row's states between layers one row late: a planted bug."""
    from sgl_lowlatency.kernels.decode_step import DecodeStep

    register()
    launch = DecodeStep.launch

    def launch_late(step, *args, aux_out=None, **more):
        launch(step, *args, aux_out=aux_out, **more)
        if aux_out is not None:
            aux_out.copy_(aux_out.roll(1, dims=0))

    DecodeStep.launch = launch_late


def _attend() -> None:
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative import draft_worker_common
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    extend, decode = TorchNativeAttnBackend.forward_extend, TorchNativeAttnBackend.forward_decode

    def forward_extend(backend, q, k, v, layer, batch, save_kv_cache=True):
        if batch.forward_mode.is_target_verify():
            prefix, drafts = batch.seq_lens, batch.spec_info.draft_token_num
            lengths = torch.full_like(prefix, drafts)
            batch = dataclasses.replace(batch, seq_lens=prefix + drafts, extend_prefix_lens=prefix, extend_seq_lens=lengths)
        return extend(backend, q, k, v, layer, batch, save_kv_cache)

    class DraftStepBackend(TorchNativeAttnBackend):
        """Of one draft step: the tokens before it are drafts, too."""

        def __init__(self, runner, step):
            super().__init__(runner)
            self._step = step

        def forward_decode(self, q, k, v, layer, batch, save_kv_cache=True):
            return decode(self, q, k, v, layer, dataclasses.replace(batch, seq_lens=batch.seq_lens + self._step + 1), save_kv_cache)

    class DraftSteps:
        def __init__(self, runner, num_steps):
            self.attn_backends = [DraftStepBackend(runner, step) for step in range(num_steps)]

        def init_forward_metadata(self, batch):
            """torch_native plans nothing."""

    TorchNativeAttnBackend.forward_extend = forward_extend
    DraftBackendFactory.create_decode_backend = lambda factory: DraftSteps(factory.draft_model_runner, factory.speculative_num_steps)
    DraftBackendFactory.create_draft_extend_backend = lambda factory: TorchNativeAttnBackend(factory.draft_model_runner)
    draft_worker_common.DRAFT_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _verify_chains() -> None:
    import torch
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt.speculative import eagle_utils

    def lay_out(parents, chosen, seq_lens, mask, positions, index, following, sibling, topk, depth, drafts, mask_mode):
        requests = len(seq_lens)
        positions.copy_((seq_lens[:, None] + torch.arange(drafts)).flatten())
        index.copy_(torch.arange(requests * drafts).view(requests, drafts))
        following.copy_(torch.tensor([*range(1, drafts), -1]).expand(requests, drafts))
        sibling.fill_(-1)

    def accept(*, predicts, accept_index, accept_token_num, candidates, target_predict, retrieve_next_token, retrieve_next_sibling, **unused):
        requests, drafts = candidates.shape
        chosen = target_predict.view(requests, drafts)
        for request in range(requests):
            path, child = [0], int(retrieve_next_token[request, 0])
            while child >= 0:
                if candidates[request, child] == chosen[request, path[-1]]:
                    path.append(child)
                    child = int(retrieve_next_token[request, child])
                else:
                    child = int(retrieve_next_sibling[request, child])
            rows = request * drafts + torch.tensor(path)
            accept_index[request, : len(path)] = rows.to(accept_index.dtype)
            predicts[rows] = chosen[request, path].to(predicts.dtype)
            accept_token_num[request] = len(path) - 1
        return predicts, accept_index, accept_token_num

    def slots_of(req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device):
        columns = start_offset[:, None] + torch.arange(draft_token_num)
        return req_to_token[req_pool_indices[:, None], columns].long().flatten()

    eagle_utils.build_tree_kernel_efficient_func, eagle_utils.verify_tree_greedy_func = lay_out, accept
    cache_locs.assign_extend_cache_locs_func = slots_of


def _draft_ngrams() -> None:
    import torch
    from sglang.srt.speculative import spec_utils

    def lay_out(mask, seq_lens, positions, index, following, sibling, requests, drafts):
        for request, tree in enumerate(mask.view(-1, drafts, drafts)[:requests].bool().tolist()):
            parents = [max((other for other in range(node) if tree[node][other]), default=-1) for node in range(drafts)]
            for node, parent in enumerate(parents):
                positions[request * drafts + node] = seq_lens[request] + sum(tree[node][:node])
                index[request, node] = request * drafts + node
                following[request, node] = next((other for other in range(node + 1, drafts) if parents[other] == node), -1)
                behind = (other for other in range(node + 1, drafts) if parents[other] == parent >= 0)
                sibling[request, node] = next(behind, -1)

    def move_accepted(batch, accept_index, num_correct_drafts, allocator):
        pool, windows = allocator.get_kvcache(), batch.out_cache_loc.view(len(num_correct_drafts), -1)
        for request, count in enumerate((num_correct_drafts + 1).tolist()):
            to, accepted = windows[request, :count], batch.out_cache_loc[accept_index[request, :count].long()]
            for layer in range(pool.layer_num):
                for buffer in pool.get_kv_buffer(layer):
                    buffer[to] = buffer[accepted].clone()

    # The module asks for a library that needs CUDA's.
    stand_in = types.ModuleType("sglang.kernels.ops.speculative.reconstruct_tree")
    stand_in.reconstruct_indices_from_tree_mask_func = lay_out
    sys.modules[stand_in.__name__] = stand_in
    spec_utils.move_accept_tokens_to_target_kvcache = move_accepted


def _resolve_arguments() -> None:
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    from sgl_lowlatency.guard import speculation

    def resolve(server_args) -> None:
        cfg = resolving_view(server_args)
        block = cfg.speculative_dflash_block_size or cfg.speculative_dspark_block_size + 1
        declare_resolution(
            server_args, NAME, speculative_num_steps=1, speculative_eagle_topk=1, speculative_num_draft_tokens=block,
            speculative_draft_attention_backend="torch_native", disable_overlap_schedule=True,
        )

    speculative_hook._handle_dflash = speculative_hook._handle_dspark = resolve
    speculation.CHAIN_BACKENDS = (*speculation.CHAIN_BACKENDS, "torch_native")
    speculation.NGRAM_BACKENDS = (*speculation.NGRAM_BACKENDS, "torch_native")
