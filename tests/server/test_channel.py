"""Commands between the processes of a server, and the end of one process."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing import AuthenticationError

import pytest

from gradxform._server.channel import CommandChannel, Followed
from gradxform._server.group import await_answer

KEY = b"known to both"
SECONDS = 30


class Ends:
    """Stands for the end of a process, in a test that has only one."""

    def __init__(self):
        self.heard = queue.SimpleQueue()

    def __call__(self, why):
        self.heard.put(why)

    def wait(self):
        return self.heard.get(timeout=SECONDS)


@pytest.fixture
def pair():
    """A leader with two followers, and what ended each of the three."""
    ends = [Ends() for _ in range(3)]
    commands = CommandChannel("127.0.0.1", KEY, ends[0])
    followed = []

    def follow():  # The second one comes first.
        for number in (2, 1):
            followed.append(Followed(commands.address, KEY, number, ends[number]))

    thread = threading.Thread(target=follow)
    thread.start()
    commands.accept(2)
    thread.join()
    yield commands, followed[::-1], ends
    for each in (*commands._connections, *[f._connection for f in followed]):
        each.close()


def serve(followed, handle, failure=str):
    thread = threading.Thread(
        target=followed.serve, args=(handle, failure), daemon=True
    )
    thread.start()


def test_each_follower_does_all_it_is_told_in_order(pair):
    commands, followed, _ = pair
    done = [queue.SimpleQueue(), queue.SimpleQueue()]
    for each, got in zip(followed, done, strict=True):
        serve(each, lambda *order, got=got: got.put(order))

    def tell(first):
        for n in range(first, first + 200):
            commands.send("push", n)

    threads = [threading.Thread(target=tell, args=(first,)) for first in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = ([got.get(timeout=SECONDS)[1] for _ in range(400)] for got in done)
    assert first == second  # Both heard the same order.
    for low in (0, 1000):
        assert [n for n in first if low <= n < low + 200] == [*range(low, low + 200)]


def test_an_order_may_have_something_for_each(pair):
    commands, followed, _ = pair
    done = [queue.SimpleQueue(), queue.SimpleQueue()]
    for each, got in zip(followed, done, strict=True):
        serve(each, lambda *order, got=got: got.put(order))
    commands.send("read", 7, each=["one", "two"])
    commands.send("read", 8, each=["three", None])  # Nothing for the second.
    commands.send("push", 9)
    assert [done[0].get(timeout=SECONDS) for _ in range(3)] == [
        ("read", 7, "one"),
        ("read", 8, "three"),
        ("push", 9),
    ]
    assert [done[1].get(timeout=SECONDS) for _ in range(2)] == [
        ("read", 7, "two"),
        ("push", 9),
    ]


def test_the_end_of_a_follower_ends_the_leader(pair):
    _, followed, ends = pair
    shut(followed[0])
    assert "has died" in ends[0].wait()


def test_the_end_of_the_leader_ends_its_followers(pair):
    commands, _, ends = pair
    for connection in commands._connections:
        shut_connection(connection)
    assert "leader" in ends[1].wait()
    assert "leader" in ends[2].wait()


def test_a_follower_that_fails_alone_ends_the_leader(pair, monkeypatch):
    monkeypatch.setattr("gradxform._server.channel.PATIENCE", 0.1)
    commands, followed, ends = pair

    def fail(*order):
        raise MemoryError("no room")

    serve(followed[0], fail, lambda error: f"because {error}")
    commands.send("push", 1)
    assert ends[0].wait() == "a process of the server has failed, because no room"


def test_an_error_in_every_process_ends_none(pair, monkeypatch):
    monkeypatch.setattr("gradxform._server.channel.PATIENCE", 0.5)
    commands, followed, ends = pair

    def fail(*order):
        raise MemoryError("no room")

    for each in followed:
        serve(each, fail)
    commands.send("push", 1)
    commands.failed("no room")
    with pytest.raises(queue.Empty):
        ends[0].heard.get(timeout=1.0)


def test_a_leader_that_fails_alone_ends(pair, monkeypatch):
    monkeypatch.setattr("gradxform._server.channel.PATIENCE", 0.1)
    commands, _, ends = pair
    commands.failed("no room")
    assert ends[0].wait() == "the leader of the server has failed, no room"


def test_a_process_without_the_key_is_no_follower():
    ends = Ends()
    commands = CommandChannel("127.0.0.1", KEY, ends)
    accepted = threading.Thread(target=commands.accept, args=(1,))
    accepted.start()
    with pytest.raises(AuthenticationError):
        Followed(commands.address, b"a guess", 1, ends)
    assert accepted.is_alive()
    Followed(commands.address, KEY, 1, ends)
    accepted.join(SECONDS)
    assert not accepted.is_alive()


def shut(followed):
    shut_connection(followed._connection)


def shut_connection(connection):
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


HANGS = f"""
import sys, threading, time
from gradxform._server.channel import Followed
followed = Followed(("127.0.0.1", int(sys.argv[1])), {KEY!r}, 1)
print("here", flush=True)
threading.Event().wait()  # As in a collective that nobody else will join.
"""


@pytest.mark.slow
def test_a_process_that_hangs_ends_when_its_leader_dies():
    commands = CommandChannel("127.0.0.1", KEY, Ends())
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, str(commands.address[1])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            commands.accept(1)
            assert process.stdout.readline() == "here\n"
            shut_connection(commands._connections[0])
            assert process.wait(SECONDS) == 1
            assert "the leader of the server has died" in process.stderr.read()
        finally:
            process.send_signal(signal.SIGKILL)


def test_an_answer_waits_for_its_listener():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # Nobody listens there yet.
        port = reserved.getsockname()[1]
        waits = threading.Thread(target=await_answer, args=(f"127.0.0.1:{port}",))
        waits.start()
        waits.join(0.2)
        assert waits.is_alive()
        reserved.listen()
        waits.join(60)
        assert not waits.is_alive()
