"""A step's place in a tensor-parallel group."""

from __future__ import annotations

import dataclasses

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.symmetric_workspace import MappedWorkspaces

PEER_COPIES: int = _C.abi.kPeerCopies  # of the words that ranks push to each other, in a workspace
MAX_ROWS: int = _C.abi.kMaxParallelRows  # of a tensor-parallel step
MAX_VIRTUAL_RANKS: int = _C.abi.kMaxVirtualRanks  # of one launch
MAX_TIMED_ROWS: int = _C.abi.kMaxTimedRows  # of a timed step
TIMELINE_POINTS: dict[str, int] = _C.abi.timeline_points  # abi::TimelinePoint without its prefix


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """workspaces: of all ranks, with PEER_COPIES copies; `rank` is the step's own. num_tokens: ids of the whole vocabulary, of which every rank has
    as many rows as its geometry's vocab, rank r those from r * vocab on."""

    workspaces: MappedWorkspaces
    num_tokens: int

    @property
    def rank(self) -> int:
        return self.workspaces.rank

    def fill(self, params, vocab_shard: int) -> None:
        """What abi::ParallelStepParams has beside the rank's own step."""
        params.symmetric, params.num_tokens, params.vocab_shard = self.workspaces.layout, self.num_tokens, vocab_shard
        for rank, address in enumerate(self.workspaces.addresses):
            params.set_workspace(rank, address)

    def name_in(self, record: int, at: int) -> None:
        """MappedWorkspaces.name_in, of the step's."""
        self.workspaces.name_in(record, at)
