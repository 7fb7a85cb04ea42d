"""A server of several processes, each on its own machine; then a machine vanishes."""

import contextlib
import logging
import signal
import tempfile
import warnings

import pytest

from gradxform import engines
from tests.conftest import CLUSTER, OF_RAY
from tests.engines.test_group import OF_TWO, gone, on_group, pids, slow, table_of
from tests.engines.test_ray import assert_counted, wait_until

ray = pytest.importorskip("ray")
# Not the cluster of the other tests: here it has several nodes.
pytestmark = CLUSTER


@contextlib.contextmanager
def machines(count):
    """A cluster of so many nodes that may hold a process of the server each."""
    from ray.cluster_utils import Cluster

    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        # Ray writes the cluster's address there, for each program that looks for one. A
        # path of Ray's sockets has at most 107 letters.
        tempfile.TemporaryDirectory(
            prefix="r", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        for name, value in OF_RAY.items():
            patch.setenv(name, value)
        warnings.simplefilter("ignore")  # That JAX and Ray's forks do not get along.
        each = {"num_cpus": 2, "resources": {"table": 1}, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=each)
        try:
            for _ in range(count - 1):
                cluster.add_node(**each)
            ray.init(
                address=cluster.address,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            signal.signal(signal.SIGTERM, before)  # Ray has one of its own.


def test_each_process_has_its_machine_and_one_may_vanish(tmp_path):
    def where(run):
        return on_group(lambda *_: ray.get_runtime_context().get_node_id(), run)

    job, pushes, killed = slow(100), [], []
    checkpoint = engines.Checkpoint(tmp_path, every_steps=20)
    each = {"CPU": 1, "table": 1}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(machines(3))
        group = ray.util.placement_group([each] * 2, "STRICT_SPREAD")
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        options = {"scheduling_strategy": place, "resources": {"table": 1}}
        options["name"] = "server"
        given = {"checkpoint": checkpoint, "server_options": options, **OF_TWO}
        run = stack.enter_context(engines.ray(job, **given))
        before = where(run)
        assert len({*before}) == 2
        assert ray.get_actor("server")._actor_id == run.server.actor._actor_id
        for push in run.pushes:
            pushes.append(push)
            if push.result.global_step == 50 and not killed:
                killed = pids(run)
                # The driver's own node cannot go.
                node, *_ = [x for x in cluster.worker_nodes if x.node_id in before]
                cluster.remove_node(node, allow_graceful=False)
        assert_counted(run, pushes, job)
        assert run.counts().server_deaths == 1
        assert len({*where(run)} - {node.node_id}) == 2
        table_of(run)
        killed += pids(run)
    wait_until(lambda: all(map(gone, killed)))
