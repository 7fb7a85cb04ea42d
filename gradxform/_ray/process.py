"""What every process of a server holds and does.

The processes form a mesh with the one axis ``"server"``, and all run the same programs
on it. Each process receives its own parts from outside. Here they become arrays of the
mesh, and no process needs another for that.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from gradxform._devices import host
from gradxform._ray.layout import AXIS, ServerLayout, spec
from gradxform._ray.messages import Part
from gradxform._server.core import ServerCore
from gradxform._server.placement import is_function, leaves_like, with_gate
from gradxform._server.programs import Prepared, PushPrograms, check_finite, in_sizes
from gradxform._server.reader import Reader
from gradxform._server.records import Snapshot
from gradxform._trees import maps
from gradxform._trees.types import Leaf, T

if TYPE_CHECKING:  # `gx.ParameterServer` comes without the engines.
    from gradxform.engines._job import Job

HOUR = 3600
LOOPBACK = "127.0.0.1"


class Process:
    """The parts of the arrays in one process, their core, and their reader.

    All processes must make it together.

    Args:
      job: what the server runs. Its parameters are this process's part, as
        :meth:`ServerLayout.part` gives it; or a function without arguments that gives
        all of them. The function is compiled, so no process ever holds the whole.
      layout: of the parameters.
      mesh: of one device of each process, along ``"server"``.

    Attributes:
      pushes: those of the job.
      layouts: of parameters and state.
    """

    def __init__(self, job: Job, layout: ServerLayout, mesh: Mesh) -> None:
        self._mesh, self._require_finite = mesh, job.require_finite
        self.pushes, params = job.pushes, job.params
        state = jax.eval_shape(job.tx.init, layout.types)
        tx = with_gate(job.tx, layout.types, state)
        self.layouts = layout, layout.of_state(tx.init)
        with jax.disable_jit(False):  # The compiler puts the parts where they belong.
            if is_function(params):
                params = made("params", params, layout, mesh)()
            else:  # In memory that a step may donate.
                leaves, tree = jax.tree.flatten(params)
                own = map(self._array, map(np.array, leaves), layout.cuts)
                params = jax.block_until_ready(jax.tree.unflatten(tree, own))
            init = made("tx.init(params)", tx.init, self.layouts[1], mesh)
            state = init(params)
        self.core = ServerCore(tx, params, state, job.donate, self._prepared)
        self.reader = Reader([part_of(x) for x in self.core.version.leaves])

    # Pushes.

    def _prepared(
        self, programs: PushPrograms, grads: optax.Updates, extra: dict[str, Any]
    ) -> Prepared:
        if self._require_finite:  # Before `_brought`: an array of the mesh asks all.
            check_finite(
                jax.tree.map(lambda x: x.array if isinstance(x, Part) else x, grads)
            )
        pushed = jax.tree.map(self._brought, (grads, extra), is_leaf=maps.is_leaf)
        leaves, tree = jax.tree.flatten(pushed)
        step = programs.find(leaves, tree).step
        return Prepared(step, jax.block_until_ready(leaves))

    def _brought(self, x: Leaf | Part) -> Leaf:
        """Makes arrays of the mesh; row-sparse gradients get one of few sizes."""
        if isinstance(x, Part):
            return self._array(x.array, x.axis)
        return jax.tree.map(self._array, in_sizes(x))

    def _array(self, x: jax.typing.ArrayLike, cut: int | None = None) -> jax.Array:
        """An array of the mesh, from a part along the cut axis or from a whole leaf."""
        sharding = NamedSharding(self._mesh, spec(cut))
        if cut is not None:
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))
        whole = [jax.device_put(x, device) for device in self._mesh.local_devices]
        return jax.make_array_from_single_device_arrays(np.shape(x), sharding, whole)

    # Checkpoints.

    def like(self) -> dict[str, Any]:
        """Describes parameters and state, and deletes them, to make room for others."""
        for x in self.core.version.leaves:
            x.delete()
        return self.core.specs.types

    def placed(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot that was read like :meth:`like`, in the order of this process."""
        own, specs = snapshot.state, self.core.specs
        leaves = leaves_like("state", own, "the server's state", specs.types)
        return snapshot._replace(state=jax.block_until_ready(specs.arrays(leaves)))


def made(
    name: str, make: Callable[..., T], layout: ServerLayout, mesh: Mesh
) -> Callable[..., T]:
    """Compiles ``make``, so that each process gets only its parts of the result."""

    def checked(*args: object) -> T:
        tree = make(*args)
        host.check_served(name, tree)
        return tree

    shardings = layout.map(lambda _, cut: NamedSharding(mesh, spec(cut)))
    return jax.jit(checked, out_shardings=shardings)


def part_of(x: jax.Array) -> jax.Array:
    """The part of an array in this process."""
    return x.addressable_data(0)


def joined_process(
    coordinator: str, index: int, given: list[Any], layout: ServerLayout
) -> Process:
    """Makes this process one of several, with its part of the parameters.

    Args:
      coordinator: the address of JAX's coordinator.
      index: of this process.
      given: a reference to the job, with this process's part of the parameters.
      layout: of the parameters.
    """
    # JAX has to know the processes before it makes the first array.
    mesh = enter(coordinator, index, layout.processes)
    (job,) = sys.modules["ray"].get(given)
    return Process(job, layout, mesh)


def enter(coordinator: str, process: int, processes: int) -> Mesh:
    """Makes this process one of several; returns the mesh of one device of each.

    It must come before anything touches JAX's devices in this process. The coordinator
    believes whoever connects, so it listens only at its address, and not at all others
    of its machine.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with contextlib.suppress(AttributeError):  # JAX has this option since 0.8.
        # The service would take SIGTERM away from Ray.
        jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        cluster_detection_method="deactivate",  # This is no job of Slurm's.
        initialization_timeout=HOUR,  # The engine notices before when one has died.
        coordinator_bind_address=coordinator,
    )
    devices = [jax.local_devices(process_index=k)[0] for k in range(processes)]
    # The first collective waits only half a minute for all processes: do it now, while
    # all are here.
    multihost_utils.sync_global_devices("server")
    return Mesh(np.array(devices), (AXIS,))
