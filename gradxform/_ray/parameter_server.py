"""The parameter server, which ``ray.remote`` makes an actor."""

from __future__ import annotations

import sys

from gradxform._ray.transport import RayTransport
from gradxform._server import parameter_server
from gradxform._server.core import Core
from gradxform._server.transport import Transport
from gradxform._trees.types import Params


class ParameterServer(parameter_server.ParameterServer[Params]):
    __doc__ = parameter_server.ParameterServer.__doc__

    def _transport_of(self, core: Core) -> Transport:
        if not hasattr(type(self), "__ray_actor_class__"):
            return super()._transport_of(core)
        context = sys.modules["ray"].get_runtime_context()
        if context.was_current_actor_reconstructed:
            core.lose("its Ray actor has died and was started again")
        return RayTransport(core)
