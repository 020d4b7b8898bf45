"""The event graph of a plan: what every block does in consecutive layers, and what happens before what.

Nodes are one block's pass through one phase (wait, read, write, signal, in that order), and one node per edge and layer
for "every producer has signalled". Arrows are a block's own order, its signals, and the waits they release.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sgl_lowlatency.plan.edges import FINAL_PHASE, LAYER_PHASES
from sgl_lowlatency.plan.static_plan import StaticPlan


@dataclass(frozen=True)
class Event:
    """`block` is None for the node that completes an edge; `phase` is then the edge's name."""

    layer: int
    phase: str
    block: int | None

    def __str__(self) -> str:
        if self.block is None:
            return f"edge {self.phase} of layer {self.layer}"
        return f"{self.phase} of layer {self.layer} in block {self.block}"


@dataclass
class EventGraph:
    """`before[i]` holds the indices of the nodes that node i directly follows."""

    events: list[Event] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    index: dict[Event, int] = field(default_factory=dict)

    def add(self, event: Event) -> int:
        self.index[event] = len(self.events)
        self.events.append(event)
        self.before.append([])
        return self.index[event]

    def order(self) -> list[int]:
        """Nodes in an order that respects every arrow. Nodes on or behind a cycle are missing."""
        after: list[list[int]] = [[] for _ in self.events]
        for node, sources in enumerate(self.before):
            for source in sources:
                after[source].append(node)
        missing = [len(sources) for sources in self.before]
        ready = [node for node, count in enumerate(missing) if count == 0]
        for node in ready:
            for later in after[node]:
                missing[later] -= 1
                if missing[later] == 0:
                    ready.append(later)
        return ready

    def ancestors(self, order: list[int]) -> list[int]:
        """Bit set per node of all nodes that happen before it."""
        sets = [0] * len(self.events)
        for node in order:
            for source in self.before[node]:
                sets[node] |= sets[source] | 1 << source
        return sets


def participants(plan: StaticPlan, phase: str) -> list[int]:
    """Blocks that may wait, work and signal in a phase: the owners of tiles; row r's final norm is block r's."""
    if phase == "attention":
        return list(range(plan.grid))
    if phase == FINAL_PHASE:
        return list(range(min(plan.rows, plan.grid)))
    return [block for block, (_, count) in enumerate(plan.op(phase).tiles) if count > 0]


def build(plan: StaticPlan, num_layers: int) -> EventGraph:
    """The events of `num_layers` consecutive layers and the final norm, of one launch.

    Which blocks have attention items is known on the device only. So the graph holds an attention event for every block,
    to be ordered with what it reads and writes, but no block's later phases gain an order from having passed through it.
    """
    graph = EventGraph()
    signals: dict[tuple[str, int], int] = {}
    for layer in range(num_layers):
        for edge in plan.edges:
            signals[edge.name, layer] = graph.add(Event(layer, edge.name, None))
    last_of_block: dict[int, int] = {}
    steps = [(layer, phase) for layer in range(num_layers) for phase in LAYER_PHASES] + [(num_layers - 1, FINAL_PHASE)]
    for layer, phase in steps:
        waits = [
            signals[edge.name, layer - later]
            for edge in plan.edges
            for consumer, later in edge.consumers
            if consumer == phase and (edge.name, layer - later) in signals
        ]
        raises = [signals[edge.name, layer] for edge in plan.edges if edge.producer == phase]
        for block in participants(plan, phase):
            node = graph.add(Event(layer, phase, block))
            graph.before[node] += waits
            if block in last_of_block:
                graph.before[node].append(last_of_block[block])
            if phase != "attention":
                last_of_block[block] = node
            for signal in raises:
                graph.before[signal].append(node)
    return graph
