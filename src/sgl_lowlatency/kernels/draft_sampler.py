"""draft_sampler: the proposal of a DSpark draft, from hidden states to draft tokens, in one persistent launch.

CUDA tensors run the CUDA kernel, CPU tensors the same source in host emulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import require_tensor
from sgl_lowlatency.kernels.fault import DraftSamplerFault, describe_draft_fault
from sgl_lowlatency.kernels.host_words import FAULT_BYTES, HostWords, kernel_device
from sgl_lowlatency.kernels.symmetric_workspace import MappedWorkspaces, bytes_at

__all__ = [
    "MARKOV_RANK", "MAX_BATCH", "MAX_GAMMA", "MAX_RANKS", "MAX_ROWS", "DraftPeer", "DraftSampler", "DraftShard", "DraftWeights",
    "draft_layout", "shared_step_logits",
]  # fmt: skip

MARKOV_RANK: int = _C.abi.kMarkovRank
MAX_BATCH: int = _C.abi.kMaxDraftBatch
MAX_ROWS: int = _C.abi.kMaxDraftRows  # batch * gamma
MAX_GAMMA: int = _C.abi.kMaxGamma
MAX_RANKS: int = _C.abi.kMaxDraftRanks
UNIT_COLUMNS: int = _C.abi.kUnitColumns  # of the vocabulary, that go to a block together
_SMEM_BYTES = 232448  # of one block on sm_90a, sm_100a and sm_103a
_STEP_LOGITS_TYPES = {torch.float32: _C.abi.kStepLogitsTypes["float32"], torch.bfloat16: _C.abi.kStepLogitsTypes["bfloat16"]}


@dataclasses.dataclass(frozen=True)
class DraftWeights:
    """What every rank has whole, bf16. markov_w1: [vocab, MARKOV_RANK]. norm: [hidden], or None: hidden states are normed already."""

    markov_w1: torch.Tensor
    norm: torch.Tensor | None = None
    rms_eps: float = 0.0


@dataclasses.dataclass(frozen=True)
class DraftShard:
    """A rank's part of the vocabulary, read in place, and what the rank writes.

    vocab_begin: its first token id, a multiple of 4. markov_w2: [its token ids, MARKOV_RANK] bf16, an even number. head: [at least as many, hidden]
    bf16, the same token ids; rows beyond them are padding. draft_tokens: int64 [max_batch * gamma]. noise_offset: int64 [1]. step_logits: [max_batch,
    gamma, vocab] float32 or bf16, of the whole vocabulary; None for a greedy draft. The dtype is that which base plus bias is rounded to.
    """

    vocab_begin: int
    head: torch.Tensor
    markov_w2: torch.Tensor
    draft_tokens: torch.Tensor
    noise_offset: torch.Tensor
    step_logits: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class DraftPeer:
    """A rank in another process, by addresses in its memory that this device can reach: DraftSampler.mailbox and its step_logits (0: none)."""

    mailbox: int
    step_logits: int


def draft_layout(gamma: int, max_batch: int, senders: int, step_logits_bytes: int):
    """abi::DraftLayout of a rank in a process of its own. senders: blocks of all ranks. step_logits_bytes: of the rank's step logits, 0: greedy."""
    return _C.draft_layout(gamma, max_batch, senders, step_logits_bytes)


def shared_step_logits(ranks: MappedWorkspaces, like: torch.Tensor) -> torch.Tensor:
    """The step logits in this rank's own workspace of a draft_layout, as `like` has them: zeros until the other ranks store theirs."""
    memory = bytes_at(ranks.addresses[ranks.rank] + ranks.layout.step_logits, like.numel() * like.element_size(), like.device)
    return memory.view(like.dtype).view(like.shape)


class DraftSampler:
    """Owns the workspace of the kernel and what outlives its launches, and launches it.

    shards: of the ranks that this object runs, consecutive from first_rank on: one, or several virtual ranks of one device, each on blocks_per_rank
    blocks, as every rank has. peers: the other ranks', by rank. ranks: the workspaces of a draft_layout that this rank, of one shard, shares with
    processes of the others, instead of peers and first_rank; its step_logits lie in its own. has_long_walks: where K is in several panels, one walk
    through it serves several tiles of a pair of warps; without, for comparison, one. step_dtype: float32, or bfloat16 for drafts whose step logits
    are bf16. noise_key: of Philox. has_fused_greedy: a greedy draft of one request keeps bias and sum in fp32, as SGLang's fused step does.
    deadline_s: of every wait in the kernel. Raises ValueError for what does not fit, RuntimeError when the grid cannot be resident on the GPU.
    """

    def __init__(
        self,
        weights: DraftWeights,
        shards: Sequence[DraftShard],
        gamma: int,
        max_batch: int,
        device: torch.device,
        blocks_per_rank: int,
        deadline_s: float,
        step_dtype: torch.dtype = torch.float32,
        noise_key: int = 0,
        first_rank: int = 0,
        peers: dict[int, DraftPeer] | None = None,
        has_fused_greedy: bool = False,
        emulation: EmulationOptions | None = None,
        ranks: MappedWorkspaces | None = None,
        has_long_walks: bool = True,
    ):
        self.device = kernel_device(device)
        if ranks is not None:
            first_rank, peers = ranks.rank, self._peers_of(ranks, shards, peers)
        self._ranks, self._has_long_walks = ranks, has_long_walks
        self.gamma, self.max_batch = gamma, max_batch
        self.vocab, self.hidden = weights.markov_w1.shape[0], shards[0].head.shape[1]
        self.grid, self.first_rank, self.blocks_per_rank = blocks_per_rank * len(shards), first_rank, blocks_per_rank
        self.is_greedy = shards[0].step_logits is None
        self.emulation = emulation or EmulationOptions()
        self.last_report = None  # of the newest emulated launch
        self._failure: str | None = None
        self._weights, self._shards, self._step_dtype = weights, list(shards), step_dtype
        self._has_fused_greedy = has_fused_greedy
        peers = peers or {}
        self.num_ranks = len(shards) + len(peers)
        if not 1 <= max_batch <= MAX_BATCH or not 1 <= gamma <= MAX_GAMMA or max_batch * gamma > MAX_ROWS:
            raise ValueError(f"max_batch {max_batch} by gamma {gamma} is beyond {MAX_BATCH}, {MAX_GAMMA} or together {MAX_ROWS}")
        if not deadline_s > 0:
            raise ValueError(f"deadline_s {deadline_s} is not positive")
        if sorted([*range(first_rank, first_rank + len(shards)), *peers]) != list(range(self.num_ranks)) or self.num_ranks > MAX_RANKS:
            raise ValueError(f"ranks {first_rank}..{first_rank + len(shards) - 1} and peers {sorted(peers)} are not 0..n - 1, n at most {MAX_RANKS}")
        self._require_tensors()

        def state(num_bytes: int, fill: int) -> torch.Tensor:
            return torch.full((num_bytes,), fill, dtype=torch.uint8, device=self.device)

        units = [-(-shard.markov_w2.shape[0] // UNIT_COLUMNS) for shard in self._shards]
        self.max_units = max(_C.draft_max_units(n, blocks_per_rank) for n in units)
        self._maps = [self._map_table(shard) for shard in self._shards]
        self._base_logits = [torch.empty(max_batch * gamma * n * UNIT_COLUMNS, dtype=torch.bfloat16, device=self.device) for n in units]
        senders = self.num_ranks * blocks_per_rank
        mailbox_bytes = 2 * 4 * _C.mailbox_words(gamma, max_batch, senders)
        if ranks is None:
            self._mailboxes = [state(mailbox_bytes, 0xFF) for _ in units]  # abi::kUnwritten
        else:
            if ranks.layout.mailbox + mailbox_bytes > ranks.layout.total_bytes:
                raise ValueError(f"ranks: their workspaces have no room for the letters of {senders} blocks")
            self._mailboxes = [bytes_at(ranks.addresses[ranks.rank] + ranks.layout.mailbox, mailbox_bytes, self.device)]
        self._states = [state(_C.abi.kDraftStateBytes, 0) for _ in units]
        self._host = HostWords(self.device, FAULT_BYTES)
        self._params = {batch: self._make_params(batch, units, peers, deadline_s, noise_key) for batch in range(1, max_batch + 1)}
        if self.device.type == "cuda":
            self._require_resident()

    @property
    def extra_bytes(self) -> int:
        """Device bytes that this object holds beside the tensors it was given."""
        groups = (self._maps, self._base_logits, self._mailboxes, self._states)
        return sum(t.numel() * t.element_size() for group in groups for t in group)

    @property
    def columns(self) -> tuple[int, int]:
        """(first, number) of the first local rank's token ids."""
        return self._shards[0].vocab_begin, self._shards[0].markov_w2.shape[0]

    def mailbox(self, local_rank: int = 0) -> int:
        """Address of a local rank's mailbox: what the other ranks' DraftPeer names."""
        return self._mailboxes[local_rank].data_ptr()

    def base_logits(self, batch: int, local_rank: int = 0) -> torch.Tensor:
        """bf16 [batch, gamma, the rank's token ids] of the newest launch, which had `batch` requests: for tests and diagnosis."""
        count = self._shards[local_rank].markov_w2.shape[0]
        columns = -(-count // UNIT_COLUMNS) * UNIT_COLUMNS
        return self._base_logits[local_rank][: batch * self.gamma * columns].view(batch, self.gamma, columns)[..., :count]

    def launch(self, batch: int, hidden_states: torch.Tensor, anchor_tokens: torch.Tensor, step_temperatures: torch.Tensor, stream: int = 0) -> None:
        """Drafts gamma tokens for each of `batch` requests into every shard's draft_tokens, row after row.

        hidden_states: bf16 [batch * gamma, hidden], row r is step r % gamma of request r // gamma. anchor_tokens: int64 [batch], of any positive stride.
        step_temperatures: float32 [batch or more], 0: arg-max, and the request's step logits stay as they are. Unless the draft is greedy, writes
        step_logits of requests that sample and adds one to noise_offset. stream: a cudaStream_t; capturable. Raises ValueError for a tensor that does
        not fit; on the CPU DraftSamplerFault with the kernel's own record, or RuntimeError with the emulation's diagnosis. On CUDA see fault().
        """
        if batch not in self._params:
            raise ValueError(f"batch {batch} is outside 1..{self.max_batch}")
        require_tensor("hidden_states", hidden_states, (batch * self.gamma, self.hidden), torch.bfloat16, self.device)
        if tuple(anchor_tokens.shape) != (batch,) or anchor_tokens.dtype != torch.int64 or anchor_tokens.device.type != self.device.type:
            what = f"{anchor_tokens.dtype} {tuple(anchor_tokens.shape)} on {anchor_tokens.device}"
            raise ValueError(f"anchor_tokens: {what} is not torch.int64 {(batch,)} on {self.device}")
        if batch > 1 and anchor_tokens.stride(0) < 1:
            raise ValueError(f"anchor_tokens: stride {anchor_tokens.stride(0)} gives all requests one token")
        require_tensor("step_temperatures", step_temperatures[:batch], (batch,), torch.float32, self.device)
        params = self._params[batch]
        params.hidden_states, params.anchor_tokens = hidden_states.data_ptr(), anchor_tokens.data_ptr()
        params.anchor_stride = max(anchor_tokens.stride(0), 1)
        params.step_temperatures = step_temperatures.data_ptr()
        if self.device.type == "cuda":
            _C.draft_sampler_launch_cuda(params, self.grid, stream)
        else:
            self._emulate(params)

    def fault(self):
        """The FaultRecord of a launch that ended itself (kernels/fault.py puts it in words), or None."""
        return _C.read_fault(self._host.address)

    def acknowledge_fault(self) -> None:
        """Tells the waiting kernel that its record was read; it then traps."""
        _C.acknowledge_fault(self._host.address)

    @staticmethod
    def _peers_of(ranks: MappedWorkspaces, shards: Sequence[DraftShard], peers: object) -> dict[int, DraftPeer]:
        """By rank, those that the workspaces name; ValueError for what does not go with them."""
        if len(shards) != 1 or peers is not None:
            raise ValueError(f"ranks: a process has one shard and no peers beside theirs, not {len(shards)} and {peers}")
        own, logits = ranks.addresses[ranks.rank] + ranks.layout.step_logits, shards[0].step_logits
        if logits is not None and logits.data_ptr() != own:
            raise ValueError(f"ranks: step_logits are at {logits.data_ptr():#x}, not in the rank's workspace at {own:#x}")
        return {
            rank: DraftPeer(address + ranks.layout.mailbox, 0 if logits is None else address + ranks.layout.step_logits)
            for rank, address in enumerate(ranks.addresses)
            if rank != ranks.rank
        }

    def _require_tensors(self) -> None:
        bf16, device = torch.bfloat16, self.device
        require_tensor("markov_w1", self._weights.markov_w1, (self.vocab, MARKOV_RANK), bf16, device)
        if self._weights.norm is not None:
            require_tensor("norm", self._weights.norm, (self.hidden,), bf16, device)
        if self.hidden % 64:
            raise ValueError(f"hidden {self.hidden} is not a multiple of 64")
        if self.vocab % 2:
            raise ValueError(f"vocab {self.vocab} is odd")
        for rank, shard in enumerate(self._shards, self.first_rank):
            count = shard.markov_w2.shape[0]
            name = f"shard of rank {rank}: "
            if shard.vocab_begin % 4 or count % 2 or count < 1 or shard.vocab_begin + count > self.vocab:
                raise ValueError(f"{name}token ids {shard.vocab_begin}..{shard.vocab_begin + count - 1} do not begin at a multiple of 4, are not an "
                                 f"even number or exceed the vocabulary of {self.vocab}")  # fmt: skip
            if shard.head.shape[0] < count:
                raise ValueError(f"{name}head has {shard.head.shape[0]} rows for {count} token ids")
            require_tensor(f"{name}head", shard.head, (shard.head.shape[0], self.hidden), bf16, device)
            require_tensor(f"{name}markov_w2", shard.markov_w2, (count, MARKOV_RANK), bf16, device)
            require_tensor(f"{name}draft_tokens", shard.draft_tokens, (self.max_batch * self.gamma,), torch.int64, device)
            require_tensor(f"{name}noise_offset", shard.noise_offset, (1,), torch.int64, device)
            if (shard.step_logits is None) != self.is_greedy:
                raise ValueError(f"{name}step_logits are there and of another rank not")
            if shard.step_logits is not None:
                require_tensor(f"{name}step_logits", shard.step_logits, (self.max_batch, self.gamma, self.vocab), self._step_dtype, device)

    def _map_table(self, shard: DraftShard) -> torch.Tensor:
        w2 = shard.markov_w2
        matrices = [(shard.head.data_ptr(), *shard.head.shape, 1, 2), (w2.data_ptr(), w2.shape[0] // 2, 2 * MARKOV_RANK, 1, 2)]
        table = _C.pack_weight_maps(matrices, is_cuda=self.device.type == "cuda")
        return torch.frombuffer(bytearray(table), dtype=torch.uint8).to(self.device)

    @staticmethod
    def most_that_fit(batch: int, gamma: int, hidden: int, vocab: int, blocks: int) -> int:
        """Requests of the largest launch up to `batch` that shared memory holds, of a rank with `vocab` token ids on `blocks` blocks; 0: none."""
        units, panel = _C.draft_max_units(-(-vocab // UNIT_COLUMNS), blocks), min(hidden, abi.stage_k(2))
        fits = (n for n in range(batch, 0, -1) if _C.draft_smem(n * gamma, n, panel, units).total_bytes <= _SMEM_BYTES)
        return next(fits, 0)

    def _k_panel(self, batch: int) -> int:
        """The widest panel that shared memory holds, all panels but the last alike: all of hidden, or a multiple of a stage's columns."""
        stage = abi.stage_k(2)
        for num_panels in range(1, -(-self.hidden // stage) + 1):
            k_panel = self.hidden if num_panels == 1 else -(-self.hidden // num_panels // stage) * stage
            if _C.draft_smem(batch * self.gamma, batch, k_panel, self.max_units).total_bytes <= _SMEM_BYTES:
                return k_panel
        what = f"{batch} requests of {self.gamma} rows, {self.max_units} units a block"
        raise ValueError(f"{what}, do not fit into shared memory: more blocks are needed")

    def _make_params(self, batch: int, units: list[int], peers: dict[int, DraftPeer], deadline_s: float, noise_key: int):
        params = _C.abi.DraftSamplerParams()
        params.batch, params.gamma, params.max_batch = batch, self.gamma, self.max_batch
        params.hidden, params.vocab, params.k_panel = self.hidden, self.vocab, self._k_panel(batch)
        is_long = self._has_long_walks and params.k_panel < self.hidden
        params.tiles_at_once = _C.draft_tiles_at_once(batch * self.gamma) if is_long else 1
        params.has_norm, params.rms_eps = int(self._weights.norm is not None), self._weights.rms_eps
        params.norm = 0 if self._weights.norm is None else self._weights.norm.data_ptr()
        is_fused = self._has_fused_greedy and self.is_greedy and batch == 1
        params.greedy, params.rounds_bias, params.anchor_stride = int(self.is_greedy), int(not is_fused), 1
        params.step_logits_type = _STEP_LOGITS_TYPES[torch.float32 if is_fused else self._step_dtype]
        params.num_ranks, params.num_local_ranks, params.first_rank = self.num_ranks, len(self._shards), self.first_rank
        params.max_units = self.max_units
        params.shared = _C.draft_smem(batch * self.gamma, batch, params.k_panel, self.max_units)
        params.deadline_ns, params.noise_key = int(deadline_s * 1e9), noise_key
        params.markov_w1, params.fault = self._weights.markov_w1.data_ptr(), self._host.address
        for i, shard in enumerate(self._shards):
            rank = _C.abi.DraftRank()
            rank.maps, rank.vocab_begin, rank.vocab_count = self._maps[i].data_ptr(), shard.vocab_begin, shard.markov_w2.shape[0]
            rank.num_units, rank.num_head_tiles = units[i], -(-shard.markov_w2.shape[0] // abi.TILE_ROWS)
            rank.base_logits = self._base_logits[i].data_ptr()
            rank.draft_tokens, rank.noise_offset = shard.draft_tokens.data_ptr(), shard.noise_offset.data_ptr()
            rank.state = self._states[i].data_ptr()
            params.set_rank(i, rank)
            logits = 0 if shard.step_logits is None else shard.step_logits.data_ptr()
            params.set_peer(self.first_rank + i, self._mailboxes[i].data_ptr(), logits)
        for number, peer in peers.items():
            params.set_peer(number, peer.mailbox, peer.step_logits)
        return params

    def _require_resident(self) -> None:
        with torch.cuda.device(self.device):
            blocks = min(_C.draft_sampler_max_blocks(params) for params in self._params.values())
        if blocks < self.grid:
            raise RuntimeError(f"draft_sampler needs {self.grid} blocks resident at once; this GPU holds {blocks}")

    def _emulate(self, params) -> None:
        if self._failure is not None:  # what a launch that ended itself left is no state to start from
            raise DraftSamplerFault(f"an earlier launch failed: {self._failure}")
        options, regions = self.emulation, []
        if options.check_order:
            named = [("mailbox", self._mailboxes), ("base_logits", self._base_logits), ("state", self._states),
                     ("draft_tokens", [shard.draft_tokens for shard in self._shards]),
                     ("step_logits", [shard.step_logits for shard in self._shards if shard.step_logits is not None])]  # fmt: skip
            regions = [(f"{name}[{i}]", t.data_ptr(), t.numel() * t.element_size(), True) for name, of in named for i, t in enumerate(of)]
        self.last_report = report = _C.draft_sampler_emulate(
            params, self.grid, options.seed, options.planted, options.starvation, regions, is_shared=self._ranks is not None
        )
        record = self.fault()
        if record is not None:
            self._failure = describe_draft_fault(record)
            raise DraftSamplerFault(self._failure)
        if report.status != "ok":
            self._failure = f"draft_sampler in emulation: {report.status}: {report.message}"
            raise RuntimeError(self._failure)
