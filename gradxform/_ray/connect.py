"""Checks that a Ray cluster answers, and that it stays the same one."""

from __future__ import annotations

import subprocess
import sys
import types

# Ray tries for minutes, in code that reacts to no signal. So a process of its own tries
# first, as it can be killed.
TRY = """
import logging, ray, sys
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
except Exception as error:
    print(type(error).__name__, " ".join(str(error).split()), sep=": ", flush=True)
    sys.exit(1)
"""
DAY = 86400.0


def connect(address: str, timeout: float) -> None:
    """Returns when a cluster has answered; signals are handled meanwhile.

    Args:
      address: as ``ray.init`` takes it.
      timeout: in seconds.

    Raises:
      ConnectionError: none has answered within the timeout, or Ray says why not.
    """
    with subprocess.Popen(
        [sys.executable, "-c", TRY, address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=min(timeout, DAY))
        except subprocess.TimeoutExpired:
            raise ConnectionError(
                f"address: no Ray cluster has answered at {address!r} within "
                f"connect_timeout={timeout:g} seconds."
            ) from None
        finally:
            process.kill()
            process.wait()  # After Ctrl-C `communicate` has not waited for its end.
    if process.returncode:
        last = said.strip() or f"the exit code was {process.returncode}"
        raise ConnectionError(f"address: no Ray cluster at {address!r}. {last}")


class Connection:
    """The connection of this process to a Ray cluster, as it is now."""

    def __init__(self, ray: types.ModuleType) -> None:
        self._ray = ray
        self._known = self._present()

    def _present(self) -> tuple[str, str] | None:
        if not self._ray.is_initialized():
            return None
        context = self._ray.get_runtime_context()
        return context.get_job_id(), context.get_node_id()

    @property
    def lost(self) -> bool:
        """Whether it has been closed. Then each call of Ray would start a cluster."""
        return self._present() != self._known

    def check(self) -> None:
        """Raises ``RuntimeError`` if it has been closed."""
        if self.lost:
            raise RuntimeError(
                "the connection to Ray is closed, by ray.shutdown() or by the end of "
                "the engine's context. With it the server and the workers have ended: "
                "call ray.shutdown() after the context, and ask the server before."
            )
