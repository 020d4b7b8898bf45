"""Why a generation of the hand-over buffers may be cleared and filled again, checked on what orders the blocks of one launch.

The kernel (stages/generations.hpp, stages/upkeep.hpp): in layer l the owners of `down` tiles clear the generation of layer
l + clear_ahead, behind their first tile of gate_up; behind the second, every consumer thread of every block fences, between two
barriers. In a MoE layer the clears lie in front of the routing and the fence behind it, both in front of all tiles of gate_up. A word
read orders its reader's next fence after its writer's last fence before the word, and nothing else does. Launches follow one another.

So there are two nodes a block and layer. `release`: what the block did before the barrier in front of its fence, and what it
had received before that. `acquire`: what lies behind the barrier after the fence, where each thread has received what the words
it read carried. A thread's fence does not pass on what the other threads' fences receive, so a release follows the acquire of
the layer before, not its own layer's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

from sgl_lowlatency.plan.edges import EMBEDDING_PHASE, END_PHASES, layer_phases
from sgl_lowlatency.plan.events import Event, EventGraph, participants
from sgl_lowlatency.plan.static_plan import StaticPlan
from sgl_lowlatency.plan.tiles import is_shared

TILES_BEFORE_FENCE = 2  # of gate_up: their words are stored before the block's fence of the layer
LATE_TILES = "later gate_up tiles"  # and those of the others behind it
CLEAR = "clear"


def before_fence(plan: StaticPlan) -> tuple[str, ...]:
    """What a block does in a layer, in program order, up to its fence."""
    phases = layer_phases(plan.geometry)
    return (EMBEDDING_PHASE, *phases[: phases.index("gate_up") + (not plan.geometry.is_moe)], CLEAR)


def program(plan: StaticPlan) -> tuple[str, ...]:
    """Program order of a block within a layer; what follows the fence is ordered by it."""
    return (*before_fence(plan), "gate_up" if plan.geometry.is_moe else LATE_TILES, "down", *END_PHASES)


def writers(plan: StaticPlan, phase: str) -> list[int]:
    """Blocks that hand something over in a phase of static tiles, whatever the routing; of tiles that blocks share, none for sure."""
    if is_shared(plan.geometry, phase):
        return []
    return plan.op("router").owners if phase == "router" else participants(plan, phase)


def check_generations(plan: StaticPlan) -> list[str]:
    """Every clear follows all uses of what it clears, and precedes all uses of what is written there next.

    Looks at so many layers that the generations go round; one message a phase.
    """
    num_layers = min(plan.geometry.num_layers, plan.generations + plan.clear_ahead + 2)
    order = Order(plan, num_layers)
    errors: dict[tuple[str, str], str] = {}
    for layer in range(-1, num_layers):  # that clears; the blocks' first clears, before layer 0, are "layer -1"
        filled = layer + plan.clear_ahead
        clear = (CLEAR, layer)
        for use in uses(plan, filled - plan.generations, num_layers):
            if pair := order.first_unordered(use, clear):
                clearing, using = f"layer {layer} in block {pair[1]}", f"{use[0]} of layer {use[1]} in block {pair[0]}"
                message = f"generations: {clearing} may clear words of layer {filled - plan.generations} while {using} uses them"
                errors.setdefault((use[0], "clear"), message)
        for use in uses(plan, filled, num_layers):
            if pair := order.first_unordered(clear, use):
                clearing, using = f"layer {layer} in block {pair[0]}", f"{use[0]} of layer {use[1]} in block {pair[1]}"
                errors.setdefault((use[0], "use"), f"generations: {using} may use words of layer {filled} before {clearing} has cleared them")
    return list(errors.values())


def uses(plan: StaticPlan, layer: int, num_layers: int) -> Iterator[tuple[str, int]]:
    """(phase, its layer) that write or read words of `layer`; none of a layer outside the launch."""
    if not -1 <= layer < num_layers:
        return
    found = set()
    for buffer in plan.buffers:
        if layer == -1 and buffer.writer != "down":
            continue
        found.add((buffer.writer if layer >= 0 else EMBEDDING_PHASE, layer))
        found |= {(phase, layer + later) for phase, later in buffer.readers}
    if ("gate_up", layer) in found and not plan.geometry.is_moe:
        found.add((LATE_TILES, layer))
    is_last = layer == plan.geometry.num_layers - 1
    yield from sorted((phase, at) for phase, at in found if at < num_layers and (phase not in END_PHASES or is_last))


class Order:
    """What happens before what, of the first `num_layers` layers of a launch."""

    def __init__(self, plan: StaticPlan, num_layers: int):
        self.plan, self.num_layers = plan, num_layers
        self.program, self.before_fence = program(plan), before_fence(plan)
        self._blocks: dict[str, list[int]] = {}
        self._released: dict[tuple[str, int], int] = {}
        self._everywhere: dict[tuple[str, int], int] = {}
        self.graph = EventGraph()
        for layer in range(num_layers):  # in the order that _release and _acquire count by
            for block in range(plan.grid):
                release, acquire = (self.graph.add(Event(layer, name, block)) for name in ("release", "acquire"))
                self.graph.before[acquire].append(release)
                if layer > 0:
                    self.graph.before[release].append(self._acquire(layer - 1, block))
        for layer in range(num_layers):
            self._add_words(layer)
        self._ancestors = self.graph.ancestors(self.graph.order())

    def _release(self, layer: int, block: int) -> int:
        return 2 * (layer * self.plan.grid + block)

    def _acquire(self, layer: int, block: int) -> int:
        return self._release(layer, block) + 1

    def _add_words(self, layer: int) -> None:
        """Words that every block of the reading phase reads, whatever its tiles and whatever the lengths. Others give order
        too; that is not needed, and which ones attention reads is known on the device only."""
        gate_up = self.plan.op("gate_up").tiles
        for buffer in self.plan.buffers:
            readers = [(phase, later) for phase, later in buffer.readers if phase in buffer.whole_readers]
            if buffer.tile_columns == 0 or not readers:
                continue
            carried = self.graph.add(Event(layer, buffer.name, None))
            may_be_late = not self.plan.geometry.is_moe and buffer.writer == "gate_up"
            fences = [self._fence_before(phase, layer) for phase in (buffer.writer, LATE_TILES)]
            for block in writers(self.plan, buffer.writer):
                fence = fences[may_be_late and gate_up[block][1] > TILES_BEFORE_FENCE]
                if fence >= 0:
                    self.graph.before[carried].append(self._release(fence, block))
            for phase, later in readers:
                fence = self._fence_behind(phase, layer + later)
                for block in self.blocks(phase) if fence < self.num_layers else ():
                    self.graph.before[self._acquire(fence, block)].append(carried)

    def _fence_before(self, phase: str, layer: int) -> int:
        """Layer of the block's last fence before the phase; negative when there is none in the launch."""
        return layer - 1 if phase in self.before_fence else layer

    def _fence_behind(self, phase: str, layer: int) -> int:
        return max(self._fence_before(phase, layer) + 1, 0)

    def _releases(self, phase: str, fence: int) -> int:
        """Bit set of the releases at a fence of the blocks that are in a phase."""
        if (phase, fence) not in self._released:
            self._released[phase, fence] = sum(1 << self._release(fence, block) for block in self.blocks(phase))
        return self._released[phase, fence]

    def _received(self, phase: str, fence: int) -> int:
        """Bit set of what every block of a phase has received at its fence."""
        if (phase, fence) not in self._everywhere:
            received = [self._ancestors[self._acquire(fence, block)] for block in self.blocks(phase)] if fence >= 0 else []
            self._everywhere[phase, fence] = functools.reduce(operator.and_, received) if received else 0
        return self._everywhere[phase, fence]

    def first_unordered(self, first: tuple[str, int], second: tuple[str, int]) -> tuple[int, int] | None:
        """(phase, layer) of two passes: a block of the first and one of the second that are not in this order; None if all are."""
        fence, last = self._fence_behind(*first), self._fence_before(*second)
        is_before = (first[1], self.program.index(first[0])) < (second[1], self.program.index(second[0]))  # in a block's own order
        others = self.blocks(first[0])
        done = self._releases(first[0], fence) if fence < self.num_layers else 0
        if done and not done & ~self._received(second[0], last):
            return None
        for block in self.blocks(second[0]):
            if done:
                received = self._ancestors[self._acquire(last, block)] if last >= 0 else 0
                own = 1 << self._release(fence, block) if is_before else 0
                if missing := done & ~received & ~own:
                    return self.graph.events[missing.bit_length() - 1].block, block
            elif unordered := [other for other in others if not (other == block and is_before)]:
                return unordered[0], block  # no fence of the layers looked at follows the first
        return None

    def blocks(self, phase: str) -> list[int]:
        if phase not in self._blocks:
            self._blocks[phase] = participants(self.plan, {LATE_TILES: "gate_up", CLEAR: "down"}.get(phase, phase))
        return self._blocks[phase]
