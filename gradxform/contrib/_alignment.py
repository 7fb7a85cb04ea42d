"""How far a gradient agrees with the momentum, and its correction if it does not."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import arguments
from gradxform._devices.mesh import AxisName
from gradxform._numbers import arithmetic, norms
from gradxform._numbers.norms import StackedAxes
from gradxform._trees import maps
from gradxform._trees.types import PyTree


class MomentumAlignment(NamedTuple):
    """How :func:`scale_by_momentum_look_ahead` corrects the direction of gradients.

    Here c is the cosine of a gradient with the momentum, and the confidence in a
    gradient is ``|g| / (|g| + confidence·|m| + eps)``. Any of the numbers may be
    traced.

    Attributes:
      aligned: a gradient with this c or more stays as it is; in [-1, 1].
      opposed: the c where the ramp of the rotation begins, below ``aligned``. Gradients
        with a c below 0 are shrunk, so only the part of the ramp above 0 is used.
      confidence: how much the length of the momentum counts against that of the
        gradient, ≥ 0.
      rotation: how far a gradient with a c between 0 and ``aligned`` turns, ≥ 0.
      shrinkage: how much of the part against the momentum is removed if c is below 0, ≥
        0.
      max_shrinkage: the largest share of that part that is removed, in [0, 1).
      eps: nothing is corrected if the gradient or the momentum is shorter than this,
        > 0. It is also added to each divisor.
    """

    aligned: jax.typing.ArrayLike = 0.2
    opposed: jax.typing.ArrayLike = -0.2
    confidence: jax.typing.ArrayLike = 3.0
    rotation: jax.typing.ArrayLike = 1.0
    shrinkage: jax.typing.ArrayLike = 0.5
    max_shrinkage: jax.typing.ArrayLike = 0.5
    eps: jax.typing.ArrayLike = 1e-8


_RANGES = {
    "aligned": "[-1, 1]",
    "opposed": "(-inf, 1)",
    "confidence": "[0, inf)",
    "rotation": "[0, inf)",
    "shrinkage": "[0, inf)",
    "max_shrinkage": "[0, 1)",
    "eps": "(0, inf)",
}


def checked_alignment(alignment: object) -> MomentumAlignment:
    """Checks all numbers; raises if one is not real or not in its range."""
    if not isinstance(alignment, MomentumAlignment):
        raise TypeError(
            f"alignment must be a gradxform.contrib.MomentumAlignment or None, got "
            f"{alignment!r}."
        )
    numbers = {
        name: arguments.in_range(f"alignment.{name}", value, _RANGES[name])
        for name, value in alignment._asdict().items()
    }
    ends = numbers["opposed"], numbers["aligned"]
    known = not any(isinstance(end, jax.core.Tracer) for end in ends)
    if known and not np.less(*ends):
        raise ValueError(
            f"alignment.opposed must be below alignment.aligned={ends[1]}, got "
            f"{ends[0]}."
        )
    return MomentumAlignment(**numbers)


Shares = tuple[jax.typing.ArrayLike, jax.typing.ArrayLike]  # a and b of a·g + b·m.


def aligned(
    updates: optax.Updates,
    mu: optax.Updates,
    alignment: MomentumAlignment,
    axis_name: AxisName,
    stacked_axes: StackedAxes,
) -> PyTree[Shares]:
    """The shares of gradient and momentum in the corrected gradient of each layer."""
    squared = functools.partial(
        norms.squared_norms, axis_name=axis_name, stacked_axes=stacked_axes
    )
    momenta = maps.map_updates(lambda _, m: m, updates, mu)
    squares, _ = squared(updates)
    lengths, _ = squared(momenta)
    both = maps.map_updates(
        lambda _, gg, mm: gg + mm.astype(gg.dtype), updates, squares, lengths
    )
    dots, _ = norms.products(
        updates, momenta, both, axis_name=axis_name, stacked_axes=stacked_axes
    )

    @jax.jit  # Traced once for each shape, not for each layer.
    def shares(gg: jax.Array, mm: jax.Array, gm: jax.Array) -> Shares:
        numbers = (jnp.asarray(x, gg.dtype) for x in alignment)
        agrees, opposed, confidence, rotation, shrinkage, most, eps = numbers
        mm, gm = (x.astype(gg.dtype) for x in (mm, gm))
        g, m = arithmetic.safe_sqrt(gg), arithmetic.safe_sqrt(mm)
        c = jnp.clip(gm / (g * m + eps), -1, 1)
        sure = g / (g + confidence * m + eps)
        # g - β·(g·m̂)·m̂, β = min(shrinkage·(-c)·κ, max_shrinkage)
        beta = jnp.minimum(shrinkage * -c * sure, most)
        against = -beta * gm / jnp.square(m + eps)
        # |g|·((1-λ)·ĝ + λ·m̂)/|…|, λ = min(rotation·(aligned-c)/(aligned-opposed)·κ, 1)
        ramp = 1 - jnp.clip((c - opposed) / (agrees - opposed + eps), 0, 1)
        turn = jnp.minimum(rotation * ramp * sure, 1)
        of_g, of_m = (1 - turn) / (g + eps), turn / (m + eps)
        mixed = jnp.square(of_g * g) + jnp.square(of_m * m) + 2 * of_g * of_m * gm
        mixed = arithmetic.safe_sqrt(mixed)
        size = g / (mixed + eps)
        opposes, short = c < 0, (g < eps) | (m < eps) | (g * m == 0)
        # Unchanged if g or m is short, if the mixture is almost 0, or if squares
        # overflow: then entries that are not finite stay where they are.
        as_it_is = short | (c >= agrees) | (~opposes & (mixed < eps))
        as_it_is |= ~jnp.isfinite(gg + mm)
        a = jnp.where(as_it_is | opposes, 1, of_g * size)
        b = jnp.where(as_it_is, 0, jnp.where(opposes, against, of_m * size))
        return a, b

    return maps.map_updates(
        lambda _, *sums: shares(*sums), updates, squares, lengths, dots
    )
