"""Three ways to run the workers of the main job against one ``ParameterServer``.

An engine is a context manager ``engine(job)`` that gives a :class:`Run`: the pushes,
one by one as they arrive, and the server to ask for parameters and state. What workers
compute and how long they take, the :class:`Job` says; how they come to run, the engine:

- :func:`simulated`: one after the other, by a virtual clock. A run repeats exactly.
- :func:`threads`: one thread each.
- :func:`ray`: one process each, on as many machines as the Ray cluster has.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import importlib
import logging
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import optax

import gradxform as gx

MAX_DEATHS = 3  # Of one worker on Ray. A fourth has its cause in what it does.


class Worker(NamedTuple):
    """What one worker does, again and again."""

    # From the parameters it pulled: the loss, the norm of the gradients, the gradients.
    gradient: Callable[[optax.Params], tuple[jax.Array, jax.Array, optax.Updates]]
    duration: Callable[[], float]  # Seconds that its next gradient takes.


class Job(NamedTuple):
    """What an engine runs."""

    params: optax.Params
    tx: optax.GradientTransformation
    workers: Sequence[Worker]
    pushes: int  # How many reach the server, accepted or dropped.
    # How many pushes make a step, for which those who pushed then wait; with None every
    # push may be a step of its own, and nobody waits.
    required: int | None = None


class Push(NamedTuple):
    """One push as it arrived."""

    worker: int
    local_step: int  # What the worker saw before it computed.
    loss: float  # Of the worker's minibatch, at the parameters it had pulled.
    norm: float  # Of its gradients.
    result: gx.PushResult


class Server(Protocol):
    """The methods of ``gx.ParameterServer`` that engines use."""

    def pull(self) -> tuple[optax.Params, int]:
        """The parameters and their global step."""
        ...

    def push(self, grads: optax.Updates, local_step: int) -> gx.PushResult:
        """Applies gradients, adds them to a sum, or drops them."""
        ...

    def state(self) -> dict[str, Any]:
        """Parameters and optimizer state."""
        ...


class Run(NamedTuple):
    """A job under way; nothing happens before ``pushes`` is iterated."""

    pushes: Iterator[Push]
    server: Server  # Its ``state()`` may be asked after the last push, too.
    workers: Sequence[Any] = ()  # Threads or Ray actors.


Engine = Callable[[Job], contextlib.AbstractContextManager[Run]]


@contextlib.contextmanager
def simulated(job: Job) -> Iterator[Run]:
    """Runs workers one after the other, ordered by a virtual clock.

    Every worker pulls, takes its duration, pushes, waits where the job says so, and
    pulls again. Of pushes that arrive at once, that of the lower index goes first.
    """
    with gx.ParameterServer(job.params, job.tx) as server:
        yield Run(_simulate(job, server), server)


def _simulate(job: Job, server: gx.ParameterServer) -> Iterator[Push]:
    held: dict[int, tuple[optax.Params, int]] = {}
    arrivals: list[tuple[float, int]] = []
    idle = list(range(len(job.workers)))
    now, global_step = 0.0, 0
    for _ in range(job.pushes):
        for index in idle:
            held[index] = server.pull()
            heapq.heappush(arrivals, (now + job.workers[index].duration(), index))
        now, index = heapq.heappop(arrivals)
        params, local_step = held[index]
        loss, norm, grads = job.workers[index].gradient(params)
        result = server.push(grads, local_step)
        yield Push(index, local_step, float(loss), float(norm), result)
        global_step = result.global_step
        if job.required is None:
            idle = [index]
            continue
        # Those that neither compute nor wait for a step that is still to come.
        busy = {index for _, index in arrivals}
        idle = [i for i in held if i not in busy and held[i][1] < global_step]


@contextlib.contextmanager
def threads(job: Job) -> Iterator[Run]:
    """Runs each worker on a thread of its own.

    What a worker raises is raised where the pushes are iterated. On leaving the
    context, with an exception or without, all threads end, those that sleep or wait as
    well.
    """
    server = gx.ParameterServer(job.params, job.tx)
    stop = threading.Event()
    tickets = threading.Semaphore(job.pushes)  # One a push, so that none is too many.
    arrived: queue.SimpleQueue[Push | BaseException] = queue.SimpleQueue()

    def run(index: int, worker: Worker) -> None:
        local_step = -1
        try:
            while True:
                # First the wait, then the ticket: who holds one is sure to push.
                if job.required is not None:
                    server.wait(local_step)
                if not tickets.acquire(blocking=False):
                    return
                push = _work(index, worker, server, stop.wait)
                local_step = push.local_step
                arrived.put(push)
        except BaseException as error:
            arrived.put(error)  # That the server is closed, too; nobody reads that.

    workers = [
        # Daemons, so that a second Ctrl-C ends the process whatever they do.
        threading.Thread(target=run, args=pair, name=f"worker-{pair[0]}", daemon=True)
        for pair in enumerate(job.workers)
    ]

    def pushes() -> Iterator[Push]:
        for thread in workers:
            thread.start()
        for _ in range(job.pushes):
            arrival = arrived.get()
            if isinstance(arrival, BaseException):
                raise arrival
            yield arrival

    try:
        yield Run(pushes(), server, workers)
    finally:
        stop.set()
        server.close()
        for thread in workers:
            if thread.ident is not None:  # It was started.
                thread.join()


@contextlib.contextmanager
def ray(job: Job) -> Iterator[Run]:
    """Runs the server and each worker as a Ray actor, a process of its own.

    On the cluster that ``ray.init`` has connected to; without one, on a local cluster
    that lasts as long as the context. A worker whose process dies is replaced by one
    with the same index, whose random numbers start anew; what it was at is done again.
    What a worker raises is raised where the pushes are iterated, as its class and as
    ``ray.exceptions.RayTaskError``.

    Raises:
      ImportError: Ray is not installed.
      ray.exceptions.RayActorError: a worker has died again and again, or the server.
    """
    ray = require("ray", "ray")
    # Threads of the actor for all workers that wait, and some for pulls and pushes.
    concurrency = len(job.workers) + 4
    actor: Any = ray.remote(gx.ParameterServer).options(max_concurrency=concurrency)
    workers: list[Any] = []
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            stack.callback(_uninterrupted(ray.shutdown))
            _start_cluster(len(job.workers) + 1)  # As many CPUs as there are actors.
        server = actor.remote(job.params, job.tx)
        stack.callback(ray.kill, server)
        stack.callback(lambda: [ray.kill(each) for each in workers])
        yield Run(_dispatch(ray, job, server, workers), _RayServer(server), workers)


def _uninterrupted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Puts Ctrl-C off until the function has done all that it does."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return function(*args)  # Another thread is never interrupted.
        pending: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: pending.append(number))
        try:
            return function(*args)
        finally:
            signal.signal(signal.SIGINT, before)
            if pending:
                signal.raise_signal(signal.SIGINT)

    return call


@_uninterrupted  # Processes of half a cluster would live on.
def _start_cluster(num_cpus: int) -> None:
    ray = require("ray", "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # It would report home.
    with warnings.catch_warnings():
        # Ray forks to start its processes, of which JAX warns; they exec at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\)", RuntimeWarning)
        ray.init(
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


def _dispatch(ray: Any, job: Job, server: Any, workers: list[Any]) -> Iterator[Push]:
    """Hands out one gradient at a time, to workers that have nothing to wait for.

    Starts them, and keeps in ``workers`` those that live.
    """
    start = ray.remote(_RayWorker).remote
    for pair in enumerate(job.workers):
        workers.append(start(*pair, server))  # One by one: the next may fail.
    deaths = [0] * len(workers)
    idle = list(range(len(workers)))
    working: dict[Any, int] = {}  # Who computes, by the reference of the push to come,
    waiting: dict[Any, int] = {}  # and who waits, by that of the step to come.
    arrived = 0

    def hand_out() -> None:
        while idle and arrived + len(working) < job.pushes:
            index = idle.pop(0)
            working[workers[index].work.remote()] = index

    hand_out()
    while arrived < job.pushes:
        (ready,), _ = ray.wait([*working, *waiting], num_returns=1)
        if ready in waiting:
            ray.get(ready)  # Raises if the server is gone.
            idle.append(waiting.pop(ready))
            hand_out()
            continue
        index = working.pop(ready)
        try:
            push = ray.get(ready)
        except ray.exceptions.RayTaskError:
            raise  # From the worker's code: the process is well.
        except ray.exceptions.RayActorError:
            deaths[index] += 1
            if deaths[index] > MAX_DEATHS:
                raise
            workers[index] = start(index, job.workers[index], server)
            idle.append(index)
            hand_out()
            continue
        arrived += 1
        if job.required is None:
            idle.append(index)
        else:
            waiting[server.wait.remote(push.local_step)] = index
        hand_out()  # Before the consumer takes its time.
        yield push


class _RayServer:
    """The actor as a :class:`Server`: each call waits for its result."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._get = require("ray", "ray").get

    def pull(self) -> tuple[optax.Params, int]:
        params, global_step = self._get(self._actor.pull.remote())
        return params, global_step

    def push(self, grads: optax.Updates, local_step: int) -> gx.PushResult:
        result: gx.PushResult = self._get(self._actor.push.remote(grads, local_step))
        return result

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._get(self._actor.state.remote())
        return state


class _RayWorker:
    """A worker in a process of its own."""

    def __init__(self, index: int, worker: Worker, server: Any) -> None:
        self._args = index, worker, _RayServer(server), time.sleep

    def work(self) -> Push:
        """One gradient, from pull to push."""
        return _work(*self._args)


def _work(
    index: int, worker: Worker, server: Server, sleep: Callable[[float], object]
) -> Push:
    """One gradient of a worker, from pull to push, in the time that it shall take."""
    params, local_step = server.pull()
    end = time.monotonic() + worker.duration()
    loss, norm, grads = jax.block_until_ready(worker.gradient(params))
    sleep(max(0.0, end - time.monotonic()))
    result = server.push(grads, local_step)
    return Push(index, local_step, float(loss), float(norm), result)


def require(package: str, extra: str) -> Any:
    """Imports a package of which not every user has need.

    Raises:
      ImportError: in one line, with the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        cure = f"run python -m pip install 'gradxform[{extra}]'"
        raise ImportError(f"{error}: {cure}") from error


ENGINES: dict[str, Engine] = {"threads": threads, "ray": ray, "simulated": simulated}
