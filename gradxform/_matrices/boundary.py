"""Where the fewest bytes pass: a minimum cut of a graph."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Mapping
from typing import TypeAlias

Node: TypeAlias = Hashable
NEVER = 1 << 60  # Bytes that no cut pays.


class Graph:
    """Nodes, each of them inside or outside, and what it costs to part them.

    ``inside`` and ``outside`` are two nodes that are so.
    """

    inside: Node = "inside"
    outside: Node = "outside"

    def __init__(self) -> None:
        self._left: dict[Node, dict[Node, int]] = collections.defaultdict(dict)

    def edge(self, inside: Node, outside: Node, cost: int) -> None:
        """The cost if the first node is inside, and the second one outside."""
        if inside != outside:
            left = self._left
            left[inside][outside] = left[inside].get(outside, 0) + cost
            left[outside].setdefault(inside, 0)

    def value(
        self, name: Node, maker: Node, readers: Mapping[Node, int], out: int
    ) -> None:
        """A value passes once, however many nodes read it on the other side.

        Of the costs of ``readers`` on the way to inside the largest one counts. ``out``
        is the cost on the way from inside.
        """
        self.edge(maker, (name, "out"), out)
        before, below = maker, 0
        for cost in sorted({*readers.values()}):
            self.edge((name, cost), maker, cost - below)
            if below:
                self.edge((name, cost), before, NEVER)
            before, below = (name, cost), cost
        for reader, cost in readers.items():
            self.edge((name, "out"), reader, NEVER)
            self.edge(reader, (name, cost), NEVER)

    def cut(self) -> set[Node]:
        """The nodes that are inside: as many as possible, at the least cost."""
        while path := self._path():
            flow = min(self._left[a][b] for a, b in path)
            for a, b in path:
                self._left[a][b] -= flow
                self._left[b][a] += flow
        reaching = {self.outside}
        waiting = [self.outside]
        while waiting:
            b = waiting.pop()
            for a in self._left[b]:
                if a not in reaching and self._left[a][b]:
                    reaching.add(a)
                    waiting.append(a)
        return set(self._left).difference(reaching)

    def _path(self) -> list[tuple[Node, Node]]:
        """A shortest path with something left, as edges; none if there is none."""
        before: dict[Node, Node] = {self.inside: None}
        waiting = collections.deque([self.inside])
        while waiting and self.outside not in before:
            a = waiting.popleft()
            for b, left in self._left[a].items():
                if left and b not in before:
                    before[b] = a
                    waiting.append(b)
        path, node = list[tuple[Node, Node]](), self.outside
        while node in before and before[node] is not None:
            path.append((before[node], node))
            node = before[node]
        return path
