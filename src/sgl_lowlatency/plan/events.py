"""The event graph of a plan: what every block does in consecutive layers, and what waits for what.

Nodes are one block's pass through one phase, and one node per edge and layer for "every word is there". Arrows are a block's
own order, its words, and the waits that they end. Every block is taken to have attention items, and every consumer to need
all words of its edges: no step waits for more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sgl_lowlatency.plan.edges import EMBEDDING_PHASE, FINAL_PHASE, HEAD_PHASE, end_phases, layer_phases
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
        """Bit set per node of all nodes that happen before it, itself included."""
        sets = [0] * len(self.events)
        for node in order:
            sets[node] = 1 << node
            for source in self.before[node]:
                sets[node] |= sets[source]
        return sets


def participants(plan: StaticPlan, phase: str) -> list[int]:
    """Blocks that may read and write in a phase: the owners of tiles; row r's final norm is block r's, or with an LM head everybody's;
    lengths decide on the device which blocks have attention items, routing which ones have tiles of gate_up in a MoE layer."""
    if phase in ("attention", "combine", "routing") or (plan.geometry.is_moe and phase in ("router", "gate_up")):
        return list(range(plan.grid))
    if phase == FINAL_PHASE:
        return list(range(plan.grid if plan.head else min(plan.rows, plan.grid)))
    if phase == HEAD_PHASE:
        return plan.head.owners
    return plan.op("down" if phase == EMBEDDING_PHASE else phase).owners


def build_waits(plan: StaticPlan, num_layers: int) -> EventGraph:
    """The events of `num_layers` consecutive layers, of the embedding before and the head and final norm behind them."""
    graph = EventGraph()
    complete = {(edge.name, layer): graph.add(Event(layer, edge.name, None)) for layer in range(-1, num_layers) for edge in plan.edges}
    last_of_block: dict[int, int] = {}
    steps = [(layer, phase) for layer in range(num_layers) for phase in layer_phases(plan.geometry)]
    ends = [(num_layers - 1, phase) for phase in end_phases(plan.head is not None)]
    for layer, phase in [(-1, EMBEDDING_PHASE), *steps, *ends]:
        producer = "down" if phase == EMBEDDING_PHASE else phase
        waits = [
            complete[edge.name, layer - later]
            for edge in plan.edges
            for consumer, later in edge.consumers
            if consumer == phase and (edge.name, layer - later) in complete
        ]
        hands_over = [complete[edge.name, layer] for edge in plan.edges if edge.producer == producer]
        for block in participants(plan, phase):
            node = graph.add(Event(layer, phase, block))
            graph.before[node] += waits
            if block in last_of_block:
                graph.before[node].append(last_of_block[block])
            last_of_block[block] = node
            for edge in hands_over:
                graph.before[edge].append(node)
    return graph


def describe_cycle(graph: EventGraph, order: list[int]) -> str:
    """Walks back from any event that never becomes ready until one repeats."""
    done = set(order)
    node = next(n for n in range(len(graph.events)) if n not in done)
    path: list[int] = []
    while node not in path:
        path.append(node)
        node = next(source for source in graph.before[node] if source not in done)
    cycle = path[path.index(node) :]
    return "cycle: " + " <- ".join(str(graph.events[n]) for n in [*cycle, node])
