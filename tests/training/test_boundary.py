"""The least cut is that of all cuts, tried one by one."""

import itertools

import numpy as np
import pytest

from gradxform._matrices import boundary

# Costs whose set Python does not sort.
COSTS = (8, 1, 3, 16, 0)


def drawn(rng):
    """Costs of edges, and values: their maker, the costs of readers, that of out."""
    nodes = ["inside", "outside", *range(rng.integers(1, 6))]
    pairs = [*itertools.permutations(nodes, 2)]
    chosen = rng.choice(len(pairs), rng.integers(1, 12))
    edges = [(*pairs[k], int(rng.choice(COSTS))) for k in chosen]
    values = []
    for _ in range(rng.integers(0, 3)):
        maker, *readers = (nodes[k] for k in rng.permutation(len(nodes)))
        readers = {x: int(rng.choice(COSTS)) for x in readers[: rng.integers(1, 4)]}
        values.append((maker, readers, int(rng.choice(COSTS))))
    return nodes[2:], edges, values


def cost(inside, edges, values):
    """That of a cut."""
    total = sum(c for a, b, c in edges if a in inside and b not in inside)
    for maker, readers, out in values:
        if maker not in inside:
            total += max((c for x, c in readers.items() if x in inside), default=0)
        elif not inside.issuperset(readers):
            total += out
    return total


def check(nodes, edges, values):
    """Compares the cut with all others. Of the cheapest it is the largest."""
    graph = boundary.Graph()
    for edge in edges:
        graph.edge(*edge)
    for k, value in enumerate(values):
        graph.value(f"value {k}", *value)
    cuts = [
        {"inside", *some}
        for n in range(len(nodes) + 1)
        for some in itertools.combinations(nodes, n)
    ]
    least = min(cost(cut, edges, values) for cut in cuts)
    # A node that nobody has named is in no graph.
    named = {x for a, b, _ in edges for x in (a, b)}
    named |= {x for maker, readers, _ in values for x in (maker, *readers)}
    largest = set().union(*(x for x in cuts if cost(x, edges, values) == least))
    found = graph.cut().intersection(nodes)
    assert found == largest.intersection(nodes, named), (edges, values)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.every
def test_the_cut_is_the_largest_of_the_cheapest(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        check(*drawn(rng))


def test_the_shortest_way_may_be_the_wrong_one():
    """It goes from a to d, where two longer ways would be free."""
    ways = [["a", "d"], ["a", "e", "f"], ["b", "c", "d"]]
    pairs = {x for way in ways for x in itertools.pairwise(["inside", *way, "outside"])}
    check("abcdef", [(*pair, 1) for pair in sorted(pairs)], [])
