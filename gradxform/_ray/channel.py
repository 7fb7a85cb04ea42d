"""Messages between the processes of one server: commands, and news of a death.

The leader has a connection to each follower. It sends its commands over them,
to all followers in the same sequence. A connection that closes means that a process has
ended. Then all others end as well, at once, so that none waits in a collective that the
dead process will never join.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

# TCP keepalive: seconds of silence before the first probe, seconds between two probes,
# and how many of them may stay unanswered.
SILENCE, BETWEEN, UNANSWERED = 5, 2, 3
PATIENCE = 5.0  # A step fails in all processes within these seconds, or only in one.
HANDSHAKE = 30  # Seconds of silence in which a connection has to prove that it belongs.


def end_process(why: str) -> None:
    """Ends this process, whatever its threads are doing."""
    print(f"gradxform: {why}", file=sys.stderr, flush=True)
    os._exit(1)


class CommandChannel:
    """The leader's end: sends each order to all followers.

    Args:
      host: the address of this machine at which it listens.
      key: the secret that the others must know, too.
      end: the function that ends this process.
    """

    def __init__(
        self, host: str, key: bytes, end: Callable[[str], None] = end_process
    ) -> None:
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._key, self._end = key, end
        self._connections: list[Connection[Any, Any]] = []
        self._lock = threading.Lock()  # For one order at a time.
        self._failed = threading.Event()
        self._others_failed = threading.Semaphore(0)

    def accept(self, followers: int) -> None:
        """Waits until this number of followers is connected."""
        found: dict[int, Connection[Any, Any]] = {}
        arrived: queue.SimpleQueue[tuple[int, Connection[Any, Any]]]
        arrived = queue.SimpleQueue()
        _start(self._listen, arrived.put)
        while len(found) < followers:
            number, connection = arrived.get()
            found[number] = connection
        with contextlib.suppress(OSError):  # It wakes the thread that listens.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._connections = [found[number] for number in sorted(found)]
        for connection in self._connections:
            _tune(connection)
            _start(self._watch, connection)

    def _listen(self, found: Callable[..., None]) -> None:
        # Each on a thread of its own: a stranger who says nothing holds up nobody.
        with contextlib.suppress(OSError):  # The listener is closed.
            while True:
                connected, _ = self._listener.accept()
                _start(self._know, Connection(connected.detach()), found)

    def _know(
        self, connection: Connection[Any, Any], found: Callable[..., None]
    ) -> None:
        """Hands on the connection of a follower, and its number; closes any other."""
        try:
            _set_timeout(connection, HANDSHAKE)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            number = connection.recv()
            _set_timeout(connection, 0)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
        else:
            found((number, connection))

    def send(
        self, name: str, *args: object, each: Sequence[object] | None = None
    ) -> None:
        """Sends a command to all followers, or to those with an entry in ``each``."""
        order = pickle.dumps((name, *args), -1)
        try:
            with self._lock:
                for number, connection in enumerate(self._connections):
                    if each is not None:
                        if each[number] is None:
                            continue
                        order = pickle.dumps((name, *args, each[number]), -1)
                    connection.send_bytes(order)
        except OSError as error:
            self._end(f"a process of the server is gone, {error}")

    def failed(self, why: str) -> None:
        """Returns if all followers have failed as well; otherwise ends this process.

        A failure in every process kills none of them: the caller is told its cause.
        """
        self._failed.set()
        deadline = time.monotonic() + PATIENCE
        for _ in self._connections:
            wait = max(0.0, deadline - time.monotonic())
            if not self._others_failed.acquire(timeout=wait):
                self._end(f"the leader of the server has failed, {why}")

    def _watch(self, connection: Connection[Any, Any]) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                why = connection.recv()
                self._others_failed.release()
                if not self._failed.wait(PATIENCE):
                    self._end(f"a process of the server has failed, {why}")
        self._end("a process of the server has died, and this one ends with it")


class Followed:
    """A follower's end: receives the commands and handles them in their sequence.

    Args:
      address: of the leader.
      key: the secret that the leader knows, too.
      number: of this follower.
      end: the function that ends this process.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        number: int,
        end: Callable[[str], None] = end_process,
    ) -> None:
        self._connection = Client(address, authkey=key)
        self._connection.send(number)
        _tune(self._connection)
        self._end = end
        self._commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        _start(self._hear)

    def _hear(self) -> None:
        # On a thread of its own: the thread that handles may be in a collective.
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._commands.put(self._connection.recv())
        self._end("the leader of the server has died, and this process ends with it")

    def serve(self, handle: Callable[..., None], failure: Callable[..., str]) -> None:
        """Obeys until an order fails, and tells the leader of that failure."""
        while True:
            name, *args = self._commands.get()
            try:
                handle(name, *args)
            except BaseException as error:
                self._connection.send(failure(error))
                return  # The leader ends the server.
            del args  # Keeps no array alive while it waits for the next order.


def _start(function: Callable[..., None], *args: object) -> None:
    threading.Thread(target=function, args=args, name="channel", daemon=True).start()


def _socket_of(connection: Connection[Any, Any]) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


def _set_timeout(connection: Connection[Any, Any], seconds: int) -> None:
    """Lets a read raise ``OSError`` after so many seconds of silence; 0 for never."""
    with _socket_of(connection) as same:
        timeval = struct.pack("@ll", seconds, 0)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


def _tune(connection: Connection[Any, Any]) -> None:
    """Sends each order at once, and notices when the other machine has vanished."""
    with _socket_of(connection) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in {
            "TCP_KEEPIDLE": SILENCE,
            "TCP_KEEPINTVL": BETWEEN,
            "TCP_KEEPCNT": UNANSWERED,
        }.items():
            if hasattr(socket, option):
                same.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
