"""Which leaves of a step have slices, and along which axis.

Of parameters, gradients and what is like them the shapes say it. Of state ``init`` says
it: a placeholder shows whose state a leaf is, and a state for another number of slices
along which axis it has them. Numbers are tried until one gives a state of the same
kind: a threshold of sizes may lie between two of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import optax

from gradxform._checks import structures
from gradxform._slices.rules import Along, shape_of
from gradxform._slices.slices import Kind, MixedSlicesError, Policy, Source
from gradxform._trees import dtypes, maps
from gradxform._trees.maps import Field
from gradxform._trees.placeholders import Placeholder, owned, state_for
from gradxform._trees.states import mark_of
from gradxform._trees.types import Leaf, Path, PyTree, Shape


class Whole(NamedTuple):
    """An array that has slices along an axis.

    Attributes:
      shape: its shape.
      source: whose slices they are.
      axis: the axis.
      is_fixed: whether state must have them along the same axis.
    """

    shape: Shape
    source: Source
    axis: int = 0
    is_fixed: bool = False

    @property
    def size(self) -> int:
        """The number of entries along the axis."""
        return self.shape[self.axis]

    @property
    def kind(self) -> Kind:
        """The slices of an array that has as many entries along this axis."""
        return self.along(self.axis)

    def along(self, axis: int) -> Kind:
        """The same along another axis."""
        return Kind(self.source, Along(axis, max(self.size, 1) // self.source.length))

    def sizes(self) -> list[int]:
        """Sizes of the axis for other numbers of slices."""
        n, step = self.source.length, self.kind.along.entries
        return [step * length for length in (n + 1, n - 1, 2 * n, 3 * n, n // 2)]


def of_leaves(arrays: Mapping[Path, Whole], tree: PyTree[Leaf]) -> list[Kind | None]:
    """The slices of each leaf of a tree like the parameters.

    A leaf that has none for its path's array, as a number for each leaf, has no slices.
    """

    def kind(path: Path, x: Leaf) -> Kind | None:
        whole, shape = arrays.get(path), shape_of(x)
        if whole is None or len(shape) != len(whole.shape):
            return None
        return whole.kind if shape[whole.axis] == whole.size else None

    return [kind(path, x) for path, x in maps.leaves_with_path(tree)]


# The slices of leaves of a state, or that they have none.
Found: TypeAlias = dict[Path, Kind | MixedSlicesError]


class States(NamedTuple):
    """Finds the slices of a state.

    Attributes:
      policy: the words of errors.
      arrays: those that have slices, by their paths.
      init: makes the state.
      whole: parameters, or descriptions of them.
      are_rows: whether slices are rows: others come with each step.
    """

    policy: Policy
    arrays: Mapping[Path, Whole]
    init: optax.TransformInitFn
    whole: optax.Params
    are_rows: bool = False

    def of_step(
        self,
        tree: PyTree[Leaf],
        state: optax.OptState,
        other: PyTree[Leaf],
        extra: Mapping[str, object],
    ) -> tuple[list[Kind | None], dict[int, MixedSlicesError]]:
        """The slices of the leaves of a step: two trees like parameters, and others.

        An extra argument has slices if it is a tree like the parameters, too. A leaf of
        an array's state may have none, whatever its shape. The errors, by the indices
        of such leaves, are for those that the step changes by the array's slices.
        """
        kinds = [*of_leaves(self.arrays, tree), *self.of(state)]
        kinds += of_leaves(self.arrays, other)
        for _, x in sorted(extra.items()):
            arrays = self.arrays if maps.is_like(x, tree) else {}
            kinds += of_leaves(arrays, x)
        lacking = {n: x for n, x in enumerate(kinds) if isinstance(x, Exception)}
        return [None if isinstance(x, Exception) else x for x in kinds], lacking

    def owned(self, state: optax.OptState) -> dict[Path, Path]:
        """The array to which each leaf of a state belongs, for those of an array.

        Raises:
          MixedSlicesError: there is no state of an array alone.
          TypeError: it is not the state that ``init`` makes.
        """

        def mark(path: Path, p: Leaf) -> Leaf:
            return Placeholder(path) if path in self.arrays else p

        try:
            return owned(self.init, maps.map_with_path(mark, self.whole), state)
        except ValueError as error:
            structures.check_own_state(state, jax.eval_shape(self.init, self.whole))
            raise MixedSlicesError(
                f"its init and the given state show no state of that "
                f"{self.policy.array} alone: in init make each array from its "
                "parameter, by jax.tree.map"
            ) from error.__cause__

    def of(self, state: optax.OptState) -> list[Kind | MixedSlicesError | None]:
        """The slices of each leaf of a state, or that it has none.

        Raises:
          MixedSlicesError: an array has no slice in it for each of its slices.
          TypeError: it is not the state that ``init`` makes.
        """
        owned = self.owned(state)
        try:
            found = self._compared(state, owned, self.arrays)
        except MixedSlicesError:  # Thresholds on both sides, of two arrays.
            found = {}
            for path in self.arrays:
                found |= self._compared(state, owned, [path])
        return [found.get(path) for path, _ in maps.leaves_with_path(state)]

    def _compared(
        self,
        state: optax.OptState,
        owned: Mapping[Path, Path],
        changed: Collection[Path],
    ) -> Found:
        """The slices of leaves that belong to some arrays, by their paths."""
        first: MixedSlicesError | None = None
        sizes = [self.arrays[path].sizes() for path in changed]
        for others in zip(*sizes, strict=True):
            new = dict(zip(changed, others, strict=True))
            shapes = self._shapes(state, new)
            try:
                if shapes is not None:
                    return self._checked(state, owned, shapes, new)
            except MixedSlicesError as error:
                first = first or error
        if first:
            raise first
        own = {path: shape_of(x) for path, x in jax.tree.leaves_with_path(state)}
        ours = {path: self.arrays[at] for path, at in owned.items() if at in changed}
        if any(own[path] != whole.shape for path, whole in ours.items()):
            raise MixedSlicesError(
                f"its state is another one for a {self.policy.array} of any other "
                f"number of {self.policy.slice}s"
            )
        return {path: whole.kind for path, whole in ours.items()}

    def _shapes(
        self, state: optax.OptState, new: Mapping[Path, int]
    ) -> dict[Path, Shape] | None:
        """The shapes of the state for other sizes; None if it is another state."""

        def describe(path: Path, p: Leaf) -> Leaf:
            if path not in self.arrays:
                return p
            shape, _, axis, _ = self.arrays[path]
            size = new.get(path, shape[axis])
            shape = *shape[:axis], size, *shape[axis + 1 :]
            return jax.ShapeDtypeStruct(shape, dtypes.dtype_of(p))

        other = state_for(self.init, maps.map_with_path(describe, self.whole))
        if other is None:
            return None
        before, after = (
            {
                path: (len(shape_of(x)), dtypes.dtype_of(x))
                for path, x in jax.tree.leaves_with_path(tree)
            }
            for tree in (state, other)
        )
        if before != after:
            return None
        return {path: x.shape for path, x in jax.tree.leaves_with_path(other)}

    def _checked(
        self,
        state: optax.OptState,
        owned: Mapping[Path, Path],
        shapes: Mapping[Path, Shape],
        new: Mapping[Path, int],
    ) -> Found:
        """The slices of leaves, from their shapes for other sizes.

        A leaf has one of four outcomes:

        - It is not in the result: its shape is the same, and it belongs to no array
          that was changed. It is whole, as a count is.
        - A kind: it has slices, along the axis that has grown.
        - An error in the result, for whoever reads a slice of it: it belongs to an
          array but has no axis for slices; or it belongs to none, and may be read at an
          index, as a constant.
        - The error is raised here: the class of its state refuses slices; or it has
          grown, or could have slices, and shows none.
        """
        found: Found = {}
        paths = (path for path, _ in maps.leaves_with_path(state))
        fields = dict(zip(paths, maps.fields(state), strict=True))
        for path, x in jax.tree.leaves_with_path(state):
            (shape, other), kind = (shape_of(x), shapes[path]), None
            owner, array = owned.get(path), None
            if owner is not None and owner in new:
                array = self.arrays[owner]
                kind = _differing(array, shape, other, new[owner])
            elif shape == other:
                continue
            kinds = [cls for cls, _ in fields[path]] if self.are_rows else []
            refused = [cls for cls in kinds if mark_of(cls).not_by_row]
            if not refused and kind is not None:
                found[path] = kind
                continue
            found[path] = error = self._refusal(
                path, shape, fields[path], refused, is_owned=owner is not None
            )
            if array is None and self.policy.is_indexed:
                continue  # It may be read, like a constant.
            if refused or array is None or shape != other or _may_have(array, shape):
                raise error
        return found

    def _refusal(
        self,
        path: Path,
        shape: Shape,
        fields: Sequence[Field],
        refused: Sequence[type],
        *,
        is_owned: bool,
    ) -> MixedSlicesError:
        """The error for a leaf: its classes refuse slices, or it has none."""
        of = refused[-1:] or [cls for cls, _ in fields[-1:]]
        where = " of ".join([jax.tree_util.keystr(path), *(cls.__name__ for cls in of)])
        one, whole = self.policy.slice, self.policy.array
        lacks = f"has no {one} for each {one} of the {whole}"
        hints = [mark_of(cls).hints.get(field) for cls, field in fields[-1:]]
        if not is_owned and not any(hints):
            hints = ["make it from the parameter in init, by jax.tree.map"]
        reason = mark_of(refused[0]).not_by_row if refused else ""
        lacks = reason or ": ".join([lacks, *filter(None, hints)])
        return MixedSlicesError(f"the state {where}, of shape {list(shape)}, {lacks}")


def _may_have(whole: Whole, shape: Shape) -> bool:
    """Whether there may be slices in a shape that is the same for another size."""
    return whole.source.length > 1 and whole.size in shape


def axes_that_differ(shape: Shape, other: Shape) -> list[int]:
    """The axes of a state's leaf that differ when its parameter has another size.

    None do if the leaf has another number of axes then.
    """
    if len(shape) != len(other):
        return []
    return [i for i, n in enumerate(shape) if n != other[i]]


def _differing(whole: Whole, shape: Shape, other: Shape, size: int) -> Kind | None:
    """The slices along the one axis that differs, with as many entries as the array."""
    axes = axes_that_differ(shape, other)
    lengths = [(shape[i], other[i]) for i in axes]
    if lengths != [(whole.size, size)] or (whole.is_fixed and axes != [whole.axis]):
        return None
    return whole.along(axes[0])
