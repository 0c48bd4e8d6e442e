"""A process joins its job, and leaves it."""

import os
import sys
from collections.abc import Mapping

import jax

from jaxinfra.errors import LostPeerError
from jaxinfra.runtime.cluster import Cluster, detect_cluster
from jaxinfra.runtime.rendezvous import bind_address, meet

# Our own watchdogs name who is gone within seconds; JAX's, which aborts without naming anybody, is
# for what they do not see.
_HEARTBEAT_S = 100
_START_S = 60
_SHUTDOWN_S = 60


def connect(environment: Mapping[str, str] | None = None) -> Cluster | None:
    """Joins the job that the environment describes; None where this process is all of it.

    To be called before anything asks JAX for devices.

    Raises:
        ConfigError: the environment is incomplete.
        PortTakenError, LostPeerError: who did not come, or why they could not.
    """
    cluster = detect_cluster(os.environ if environment is None else environment)
    if cluster is None or jax.distributed.is_initialized():
        return cluster
    port = meet(cluster)
    # Otherwise JAX takes SIGTERM for itself, and the run is not told of it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            f"{cluster.host}:{port}",
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            local_device_ids=_own_devices(cluster),
            cluster_detection_method="deactivate",
            initialization_timeout=_START_S,
            heartbeat_timeout_seconds=_HEARTBEAT_S,
            shutdown_timeout_seconds=_SHUTDOWN_S,
            coordinator_bind_address=f"{bind_address(cluster) or '[::]'}:{port}",
        )
    except jax.errors.JaxRuntimeError as error:
        raise LostPeerError(
            f"process {cluster.process_id} of {cluster.num_processes} met the others at "
            f"{cluster.coordinator}, and then JAX could not connect them: {error}"
        ) from error
    return cluster


def _own_devices(cluster: Cluster) -> list[int] | None:
    """One GPU each where a node has several processes; all of them where it has one."""
    if cluster.num_local < 2 or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(visible.split(",")) < cluster.num_local:
        return None  # whoever started this process has chosen its devices
    return [cluster.local_id]


def leave(code: int, *, together: bool, wait: bool = True) -> int:
    """Ends this process's part in the job; returns ``code``, or does not return.

    Args:
        together: all processes end here now. If not, waiting for the others at the exit would hang
            on those that are stuck or gone, so the process ends at once.
        wait: for this process's own threads, as Python does at its exit.
    """
    connected = jax.distributed.is_initialized()
    if connected and together:
        jax.distributed.shutdown()
    if not wait or (connected and not together):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
