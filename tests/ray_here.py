"""Ray in this process: actors are threads here, and a test takes milliseconds.

All that goes to an actor, into the store or back is pickled as Ray does it: arrays
beside the message, and references by their number. Errors are Ray's own classes. Some
tests that run on it run on a cluster, too, in the slow part, with the same assertions.
"""

import concurrent.futures
import contextlib
import functools
import io
import itertools
import pickle
import queue
import signal
import sys
import threading
import traceback
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from gradxform._ray import followers, leader, process, transport, wire
from gradxform._server.store import Store

real = pytest.importorskip("ray")
cloudpickle, exceptions = real.cloudpickle, real.exceptions

HERE = threading.local()  # In a thread of an actor: which one it is.
ALL = {}  # References and actors by their numbers.
SERIALIZERS = {}  # By the class: what somebody has registered.


class Pickler(cloudpickle.CloudPickler):
    """Ray's, with the serializers that somebody has registered."""

    def reducer_override(self, x):
        if own := SERIALIZERS.get(type(x)):
            serializer, deserializer = own
            return deserializer, (serializer(x),)
        return super().reducer_override(x)


def packed(x):
    file, beside = io.BytesIO(), []
    Pickler(file, protocol=5, buffer_callback=beside.append).dump(x)
    return file.getvalue(), [stored(buffer.raw()) for buffer in beside]


def stored(buffer):
    """A copy that nobody can change, where JAX takes it over as it is."""
    room = np.empty(buffer.nbytes + 63, np.uint8)
    begin = -room.ctypes.data % 64
    room[begin : begin + buffer.nbytes] = buffer
    return memoryview(room[begin : begin + buffer.nbytes]).toreadonly()


def unpacked(message):
    own, beside = message
    return pickle.loads(own, buffers=beside)


class Numbered:
    """What is pickled by its number."""

    numbers = itertools.count()

    def __init__(self):
        self._number = next(self.numbers)
        ALL[self._number] = self

    def __reduce__(self):
        return with_number, (self._number,)


def with_number(number):
    return ALL[number]


class Ref(Numbered):
    """A value that is there or will be."""

    def __init__(self):
        super().__init__()
        self.future = concurrent.futures.Future()

    def answer(self, x, *, raised=None):
        """The first answer counts: a killed actor may have another.

        Of an error it also has the text, in case that nobody can unpickle the error.
        """
        message = packed(x)
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.future.set_result((message, raised))


class Actor(Numbered):
    """An actor and its handle: each group of calls has threads of its own."""

    def __init__(self, of, options, args, kwargs):
        super().__init__()
        self.process, self.group = 0, None  # Of a server of several.
        self._of, self._given = of, packed((args, kwargs))
        self._name = options.get("name")
        self._made, self._dead = threading.Event(), threading.Event()
        self._asked, self._self = [], None
        groups = {None: options.get("max_concurrency") or 1}
        groups |= options.get("concurrency_groups", {})
        self._calls = {name: queue.SimpleQueue() for name in groups}
        self.threads = [
            threading.Thread(target=self._serve, args=(name, k == 0), daemon=True)
            for name, count in groups.items()
            for k in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def __getattr__(self, name):
        if name.startswith("_") and not name.startswith("__ray_"):
            raise AttributeError(name)
        return Method(self, name)

    def _serve(self, group, first):
        HERE.actor = self
        if first and group is None:
            try:
                args, kwargs = unpacked(self._given)
                self._self = self._of(*map(value, args), **kwargs)
            except BaseException:
                self.die()
            self._made.set()
        self._made.wait()
        while (call := self._calls[group].get()) is not None:
            self._run(*call)

    def _run(self, ref, name, given):
        if self._dead.is_set():
            return
        try:
            args, kwargs = unpacked(given)
            args = [*map(value, args)]
            if name == "__ray_call__":
                answer = args[0](self._self, *args[1:], **kwargs)
            elif name != "__ray_ready__":
                answer = getattr(self._self, name)(*args, **kwargs)
            else:
                answer = True
            ref.answer(answer)
        except Exception as error:
            where = {"proctitle": "an actor", "pid": 1, "ip": "10.0.0.7"}
            if isinstance(error, exceptions.RayTaskError):
                error = error.cause
            text = "".join(traceback.format_exception(error))
            error = exceptions.RayTaskError(name, text, error, **where)
            ref.answer(error, raised=text)
        except BaseException:  # As `sys.exit`.
            self.die()

    @property
    def has_ended(self):
        return self._dead.is_set()

    def die(self):
        self._dead.set()
        store = getattr(self._self, "_store", None)
        if store and store._folder:
            store._folder.release()  # As the system does when a process ends.
        for ref in self._asked:
            ref.answer(exceptions.ActorDiedError(), raised="The actor died.")
        for name in ("_cause", "_failures"):  # These calls wait for good.
            if words := getattr(self._self, name, None):
                words.put("")
        for calls, _ in itertools.product(self._calls.values(), range(100)):
            calls.put(None)

    def _ask(self, group, name, args, kwargs):
        ref, given = Ref(), packed((args, kwargs))
        self._asked.append(ref)
        self._calls[group].put((ref, name, given))
        if self._dead.is_set():
            ref.answer(exceptions.ActorDiedError(), raised="The actor died.")
        return ref


class Method:
    def __init__(self, actor, name, group=None):
        self._actor, self._name, self._group = actor, name, group

    def options(self, concurrency_group):
        return Method(self._actor, self._name, concurrency_group)

    def remote(self, *args, **kwargs):
        return self._actor._ask(self._group, self._name, args, kwargs)


class Maker:
    """What makes actors of a class."""

    def __init__(self, of, options):
        self._of, self._options = of, options

    def options(self, **more):
        return Maker(self._of, self._options | more)

    def remote(self, *args, **kwargs):
        ray = sys.modules["ray"]
        assert ray.up, "Ray would start a cluster"
        name = self._options.get("name")
        if name and any(a._name == name and not a._dead.is_set() for a in ray.actors):
            raise ValueError(f"there is an actor {name!r}")
        actor = Actor(self._of, self._options, args, kwargs)
        ray.actors.append(actor)
        return actor


def value(x):
    """The value of an argument: a reference stands for the value in the store."""
    return sys.modules["ray"].get(x) if isinstance(x, Ref) else x


def on_sigterm(*_):
    sys.exit(1)


on_sigterm.__module__ = "ray.stand_in"


def present():
    return sys.modules["ray"]


class Ray(types.ModuleType):
    """The module `ray`."""

    exceptions, cloudpickle = exceptions, cloudpickle

    def __init__(self):
        super().__init__("ray")
        self.actors, self.jobs = [], 0
        self.written = []  # Snapshots of followers.
        self.up = False
        self.given = {}  # The options of `init`.
        self.util = types.SimpleNamespace(
            register_serializer=self._register,
            get_node_ip_address=lambda: "10.0.0.7",
        )

    def __reduce__(self):
        return present, ()

    def _register(self, of, *, serializer, deserializer):
        SERIALIZERS[of] = serializer, deserializer

    def init(self, **options):
        assert not self.up
        self.up, self.given, self.jobs = True, options, self.jobs + 1
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)

    def shutdown(self):
        self.up = False
        for actor in self.actors:
            actor.die()
        for thread in (thread for actor in self.actors for thread in actor.threads):
            thread.join(2.0)

    def is_initialized(self):
        return self.up

    def get_runtime_context(self):
        assert self.up
        return types.SimpleNamespace(
            get_job_id=lambda: f"{self.jobs}",
            get_node_id=lambda: "here",
            was_current_actor_reconstructed=False,
        )

    def remote(self, of=None, **options):
        if of is None:
            return functools.partial(self.remote, **options)
        return Maker(type(of.__name__, (of,), {"__ray_actor_class__": of}), options)

    def put(self, x):
        ref = Ref()
        ref.answer(x)
        return ref

    def get(self, refs, timeout=None):
        if isinstance(refs, list):
            return [self.get(ref, timeout) for ref in refs]
        try:
            message, raised = refs.future.result(timeout)
        except concurrent.futures.TimeoutError:
            raise exceptions.GetTimeoutError from None
        if raised is None:
            return unpacked(message)
        try:
            error = unpacked(message)
        except Exception:
            raise exceptions.UnserializableException(raised) from None
        if isinstance(error, exceptions.RayTaskError):
            error = error.as_instanceof_cause()
        raise error

    def wait(self, refs, *, num_returns=1, timeout=None):
        assert 0 < num_returns <= len({*refs}) == len(refs)
        if num_returns == 1:
            when = concurrent.futures.FIRST_COMPLETED
        else:
            assert num_returns == len(refs)
            when = concurrent.futures.ALL_COMPLETED
        futures = [ref.future for ref in refs]
        concurrent.futures.wait(futures, timeout, when)
        done = [ref for ref in refs if ref.future.done()][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def kill(self, actor):
        actor.die()


def end_leader(code):
    """In place of `os._exit`: ends the leader that calls it, and nobody else."""
    caller = sys._getframe(1).f_locals["self"]
    for actor in [x for x in ALL.values() if isinstance(x, Actor)]:
        if actor._self is caller:
            actor.die()


# Also after a test, when a leader finds out that its followers have ended.
leader.os = types.SimpleNamespace(_exit=end_leader)


class FollowersStore(Store):
    """Keeps what it should write: the leader's arrays are whole here."""

    def write_soon(self, take):
        present().written.append(take())


class Group:
    """The processes of a server in this one.

    Each has the same mesh, of devices of this process, and arrays of its own. A part of
    such an array waits for the parts of the others.
    """

    def __init__(self):
        self._groups = {}  # By the coordinator: parts, and where their owners meet.

    def enter(self, coordinator, process, processes):
        new = [None] * processes, threading.Barrier(processes, timeout=20.0)
        HERE.actor.process = process
        HERE.actor.group = self._groups.setdefault(coordinator, new)
        return Mesh(np.array(jax.local_devices()[:processes]), ("server",))

    def assembled(self, sharding, part):
        parts, barrier = HERE.actor.group
        parts[HERE.actor.process] = part
        barrier.wait()
        axis = [*sharding.spec].index("server")
        whole = np.concatenate(parts, axis)
        barrier.wait()
        return jax.device_put(whole, sharding)

    def part_of(self, x):
        """A server makes answers on a thread of its own, and leaders have servers."""
        actor = getattr(HERE, "actor", None)
        return x.addressable_data(actor.process if actor else 0)

    def patch(self, patch):
        patch.setattr(process, "enter", self.enter)
        for module in (process, followers, transport):
            patch.setattr(module, "part_of", self.part_of)
        patch.setattr(followers, "Store", FollowersStore)
        patch.setattr(jax, "make_array_from_process_local_data", self.assembled)


@contextlib.contextmanager
def stand_in(*, connected=True):
    """In the context `ray` is this one."""
    ray, before = Ray(), signal.getsignal(signal.SIGTERM)
    sys.modules["ray"] = ray
    wire.register.cache_clear()
    if connected:
        ray.init()
    try:
        with pytest.MonkeyPatch.context() as patch:
            Group().patch(patch)
            yield ray
    finally:
        ray.shutdown()
        sys.modules["ray"] = real
        wire.register.cache_clear()
        ALL.clear()
        SERIALIZERS.clear()
        signal.signal(signal.SIGTERM, before)
