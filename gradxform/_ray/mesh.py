"""How a process becomes one of several that share a mesh."""

from __future__ import annotations

import contextlib
import socket
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._ray.layout import AXIS

HOUR = 3600
LOOPBACK = "127.0.0.1"


def host(actor: object) -> str:
    """The address in the cluster of an actor's machine; called in the actor."""
    return sys.modules["ray"].util.get_node_ip_address()


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
    if process:
        await_answer(coordinator)
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        cluster_detection_method="deactivate",  # This is no job of Slurm's.
        initialization_timeout=HOUR,  # The engine notices before when one has died.
        coordinator_bind_address=coordinator,
    )
    devices = [jax.local_devices(process_index=k)[0] for k in range(processes)]
    mesh = Mesh(np.array(devices), (AXIS,))
    # The first collective waits only half a minute for all processes: do it now, while
    # all are here.
    everywhere = NamedSharding(mesh, P())
    meet = jax.jit(jnp.sum, out_shardings=everywhere)
    meet(
        jax.make_array_from_callback(
            (processes,), NamedSharding(mesh, P(AXIS)), lambda _: np.ones(1, np.float32)
        )
    ).block_until_ready()
    return mesh


def await_answer(address: str) -> None:
    """Returns when somebody listens there: JAX would try again only after a second."""
    host, _, port = address.rpartition(":")
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), HOUR),
        ):
            return
        time.sleep(0.02)
