"""What JAX has under another name from one version to the next: asked here alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


def varying_axes(x_type: Any) -> frozenset[str]:
    """The manual mesh axes over which an array of this type differs by device."""
    if hasattr(x_type, "manual_axis_type"):  # From JAX 0.10 on.
        return x_type.manual_axis_type.varying
    return x_type.vma


def to_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """``x`` of a type that differs by device over these axes as well."""
    if not (axes := tuple(axes)):
        return x
    if hasattr(jax.lax, "pcast"):  # From JAX 0.8.2 on.
        return jax.lax.pcast(x, axes, to="varying")
    return getattr(jax.lax, "pvary")(x, axes)  # noqa: B009


def before_tracing() -> None:
    """Imports what gates and tables need, before anything is traced.

    It takes a tenth of a second, which only their users pay. Since JAX 0.12 it brings
    settings on which every trace depends: what is being traced would be traced again.
    """
    import jax.extend.core  # noqa: F401


def trace() -> Any:
    """Which transformation of JAX is tracing at the moment."""
    import jax.extend.core

    core: Any = jax.extend.core  # From JAX 0.10 on.
    if not hasattr(core, "get_opaque_trace_state"):
        core = jax.core
    return core.get_opaque_trace_state()
