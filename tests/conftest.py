"""Strict JAX for every test and doctest: no silent promotion, broadcast or warning."""

import collections
import contextlib
import functools
import gc
import itertools
import logging
import os
import signal
import tempfile
import warnings
import zlib

# What one process has compiled the others load, until the tests end, or the next run
# too, where JAX_COMPILATION_CACHE_DIR names a folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    CACHE = tempfile.TemporaryDirectory(prefix="gradxform-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Ray gives its processes a low priority: beside tests that compute they hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")
# Ray kills its processes if the machine is short of memory, whoever uses it.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
# Who called what, in each line of a program, takes a sixth of the time that tests take.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)
if not hasattr(jax, "enable_x64"):  # Before JAX 0.8.
    from jax.experimental import enable_x64

    jax.enable_x64 = enable_x64


def xla_flags(level):
    """What makes programs slower, and compiling them quicker, unless others are set."""
    flags = f"--xla_backend_optimization_level={level}"
    flags += " --xla_cpu_parallel_codegen_split_count=1"
    if jax.__version_info__ < (0, 11):  # Later ones have no other emitters.
        flags += " --xla_cpu_use_fusion_emitters=false"
    return os.environ.get("XLA_FLAGS", flags)


# For processes that a test kills. Such a process may leave half of a file, which makes
# later ones warn, so it reads what others compiled and adds nothing.
KILLED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "inf"}
# Nobody hears warnings of Ray's processes. They have a folder of their own.
OF_RAY = {
    "JAX_COMPILATION_CACHE_DIR": os.path.join(
        os.environ["JAX_COMPILATION_CACHE_DIR"], "of-ray"
    ),
    "XLA_FLAGS": xla_flags(level=1),
}

# Programs here run a few times on a few numbers: nearly all the time goes into making
# them fast. A process that a test starts compiles as a user's does, unless the test
# says otherwise.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XLA_FLAGS", xla_flags(level=0))
    jax.devices()  # Reads them.

# A program that a shell starts in the background ignores Ctrl-C. Tests should not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Figures of memory and of bytes are those of the newest JAX's compilers. With any other
# JAX only numbers are tested.
NEWEST_JAX = jax.__version_info__ >= (0, 12)


def pytest_collection_finish():
    """The garbage collector need not look at imports and tests again and again.

    It also looks less often at objects of traces. That took 5 % of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def is_long(item):
    """Whether a test may take half a minute, or waits for processes."""
    folder, name = item.path.parts[-2:]
    return folder in ("engines", "soak") or name == "test_notebooks.py"


@pytest.hookimpl(tryfirst=True)  # Before pytest leaves out what `-m` does not name.
def pytest_collection_modifyitems(config, items):
    """Of a function with many cases the quick part takes one, by the function's name.

    If a mark ``quick_case`` names the id of a cheaper one, it takes that. Where JAX is
    not the newest, tests of figures are skipped. Long tests come first, so that in the
    end all processes have something to do.
    """
    items.sort(key=lambda item: not is_long(item))
    functions = collections.defaultdict(list)
    older = pytest.mark.skip(reason="figures are those of the newest JAX")
    for item in items:
        if not NEWEST_JAX and item.get_closest_marker("figures"):
            item.add_marker(older)
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and not marks & {"slow", "every"}:
            functions[item.path, item.originalname].append(item)
    for (_, name), cases in functions.items():
        taken = zlib.crc32(name.encode()) % len(cases)
        if named := cases[0].get_closest_marker("quick_case"):
            ids, (cheap,) = [item.callspec.id for item in cases], named.args
            if cheap in ids:
                taken = ids.index(cheap)
            # An older JAX may lack it, and so may a run of named cases.
            elif NEWEST_JAX and not any("[" in arg for arg in config.args):
                raise pytest.UsageError(f"{name} has no case {cheap!r} for quick_case.")
        for number, item in enumerate(cases):
            if number != taken:
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.more)


ENDED = itertools.count(1)  # Modules of this process.


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs():
    """What some modules have compiled is of little use to others, and slows them down.

    Operations that run outside of `jit` are of use, so not each module forgets.
    """
    yield
    if next(ENDED) % 6 == 0:
        jax.clear_caches()


@contextlib.contextmanager
def promotion():
    """What optax's own code needs, on all threads."""
    names = "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion"
    before = {name: getattr(jax.config, name) for name in names}
    for name, setting in zip(names, ("standard", "allow"), strict=True):
        jax.config.update(name, setting)
    try:
        yield
    finally:
        for name in names:
            jax.config.update(name, before[name])


@pytest.fixture
def standard_promotion():
    """Lets optax's own code promote dtypes and ranks, where a test runs it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        yield


@pytest.fixture(params=[True, False], ids=["in context", "not in context"])
def in_context(request):
    """A mesh as JAX's own pages set it, and one that is known from the arrays alone."""
    return jax.set_mesh if request.param else contextlib.nullcontext


def half(*factors):
    """Every second case of a product of parameters.

    For all values of all parameters but one, whichever that is, a case is there.
    """
    indices = itertools.product(*(range(len(values)) for values in factors))
    cases = zip(indices, itertools.product(*factors), strict=True)
    return [case for index, case in cases if sum(index) % 2 == 0]


def pairwise(first, second):
    """All cases of two parameters, with two switches; any two values meet in one."""
    cases = itertools.product(enumerate(first), enumerate(second))
    return [(x, y, (i + j) % 2 == 1, (j + i // 2) % 2 == 1) for (i, x), (j, y) in cases]


@pytest.fixture
def bounded():
    """A test that hangs fails."""

    def fail(*_):
        raise TimeoutError("the test hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(600)  # A busy machine may need minutes.
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def cluster():
    """One local cluster of Ray for all tests of a module."""
    import ray

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        for name, value in OF_RAY.items():
            patch.setenv(name, value)
        warnings.simplefilter("ignore")  # That JAX and Ray's forks do not get along.
        before = signal.getsignal(signal.SIGTERM)
        ray.init(
            address="local",  # Not a cluster that somebody else has started here.
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)  # Ray has one of its own.


# Ray leaves sockets and processes to the garbage collector.
ON_RAY = [
    pytest.mark.slow,
    pytest.mark.usefixtures("bounded", "cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def on_cluster(test):
    """Marks a test, or all tests of a function, that run on a cluster."""
    return functools.reduce(lambda test, mark: mark(test), ON_RAY, test)


CLUSTER = [mark for mark in ON_RAY if mark.name != "usefixtures"]


@pytest.fixture
def ray_in_process(bounded):
    """A stand-in for the module `ray`."""
    from tests import ray_here

    with ray_here.stand_in() as ray:
        yield ray


@pytest.fixture(params=["here", pytest.param("cluster", marks=CLUSTER)])
def either_ray(request, bounded):
    """The module `ray`: a stand-in, and in the slow part a cluster."""
    if request.param == "here":
        return request.getfixturevalue("ray_in_process")
    import ray

    request.getfixturevalue("cluster")
    return ray
