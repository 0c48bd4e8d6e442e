"""Rank of a process, size of its job and address of the coordinator, from the environment.

Launchers are tried in this order; the first whose variables are set is used:

plain       JAXINFRA_COORDINATOR=host:port, JAXINFRA_NUM_PROCESSES, JAXINFRA_PROCESS_ID
            (``jaxinfra launch`` sets them)
Slurm       SLURM_STEP_NUM_TASKS, SLURM_PROCID, SLURM_STEP_NODELIST (``srun`` sets them)
OpenMPI     OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK; one node, or MASTER_ADDR for several
JobSet      JOBSET_NAME, REPLICATED_JOB_NAME, JOB_INDEX, JOB_COMPLETION_INDEX and NUM_PROCESSES
            (the last by hand, the others through Kubernetes' downward API)

In addition to any of them: JAXINFRA_TOKEN or JAXINFRA_TOKEN_FILE, a secret shared by all processes
of the job and no other program, and JAXINFRA_BIND, the address that process 0 listens on.
"""

import dataclasses
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import read_bytes, whole_number

COORDINATOR = "JAXINFRA_COORDINATOR"
NUM_PROCESSES = "JAXINFRA_NUM_PROCESSES"
PROCESS_ID = "JAXINFRA_PROCESS_ID"
LOCAL_ID = "JAXINFRA_LOCAL_ID"
NUM_LOCAL = "JAXINFRA_NUM_LOCAL"
ATTEMPT = "JAXINFRA_ATTEMPT"
LAUNCHER = "JAXINFRA_LAUNCHER_PID"
PORT = "JAXINFRA_PORT"
BIND = "JAXINFRA_BIND"
TOKEN = "JAXINFRA_TOKEN"
TOKEN_FILE = "JAXINFRA_TOKEN_FILE"

_TOKEN_BYTES = 4096
_MAX_NODES = 1 << 16
# Below Linux's ephemeral ports, above those of services; a job's own number keeps two jobs of one
# node apart.
_FIRST_PORT, _NUM_PORTS = 20000, 10000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Rank of a process in its job, the number of processes, and their coordinator."""

    host: str  # of process 0
    port: int
    num_processes: int
    process_id: int
    local_id: int  # among the processes of this node
    num_local: int  # processes of this node; 0: not known
    source: str  # launcher whose variables were read
    bind: str | None = None  # address that process 0 listens on; None: its own address by ``host``
    token: str = ""  # secret that only this job's processes know; empty: none

    def __post_init__(self) -> None:
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"{self.source}: process {self.process_id} of {self.num_processes}: it must be "
                "in [0, number of processes)"
            )
        if not 1 <= self.port < 65536:
            raise ConfigError(f"{self.source}: port {self.port} must be in [1, 65536)")

    @property
    def coordinator(self) -> str:
        """The coordinator's address as host:port."""
        return f"{self.host}:{self.port}"


def detect_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Returns the rank and job of this process; None if it is the job's only process.

    Raises ConfigError if some variables of a launcher are missing or malformed.
    """
    for found in (_plain, _slurm, _open_mpi, _job_set):
        cluster = found(environment)
        if cluster is not None and cluster.num_processes > 1:
            return dataclasses.replace(
                cluster, bind=environment.get(BIND) or None, token=read_token(environment)
            )
        if cluster is not None:
            return None
    return None


def read_token(environment: Mapping[str, str]) -> str:
    """Reads the secret that proves that a process belongs to this job; empty if there is none."""
    name = environment.get(TOKEN_FILE)
    if name is None:
        return environment.get(TOKEN, "")
    data = read_bytes(Path(name), limit=_TOKEN_BYTES)
    token = data.decode(errors="replace").strip()
    if not token:
        raise ConfigError(f"{TOKEN_FILE}={name!r} is empty; write a random token into it")
    return token


def _plain(environment: Mapping[str, str]) -> Cluster | None:
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    given = [name for name in names if environment.get(name)]
    if not given:
        return None
    absent = [name for name in names if name not in given]
    if absent:
        raise ConfigError(f"{given[0]} is set, {' and '.join(absent)} not; set all three or none")
    host, _, port = environment[COORDINATOR].rpartition(":")
    number = whole_number(port)
    if number is None or not host:
        raise ConfigError(f"{COORDINATOR}={environment[COORDINATOR]!r} must be host:port")
    return Cluster(
        host=host,
        port=number,
        num_processes=_number(environment, NUM_PROCESSES),
        process_id=_number(environment, PROCESS_ID),
        local_id=_number(environment, LOCAL_ID, default=0),
        num_local=_number(environment, NUM_LOCAL, default=0),
        source="plain",
    )


def _slurm(environment: Mapping[str, str]) -> Cluster | None:
    # A batch script outside of srun has SLURM_PROCID too, but is no task of a step.
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return None
    nodes = expand_nodes(environment.get("SLURM_STEP_NODELIST", ""))
    if not nodes:
        raise ConfigError(
            "Slurm: SLURM_STEP_NODELIST names no node; start the processes with srun, or set "
            f"{COORDINATOR}, {NUM_PROCESSES} and {PROCESS_ID}"
        )
    return Cluster(
        host=nodes[0],
        port=_port(environment, job=_number(environment, "SLURM_JOB_ID", default=0)),
        num_processes=_number(environment, "SLURM_STEP_NUM_TASKS"),
        process_id=_number(environment, "SLURM_PROCID"),
        local_id=_number(environment, "SLURM_LOCALID", default=0),
        num_local=_tasks_here(environment),
        source="Slurm",
    )


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Tasks of this node from SLURM_STEP_TASKS_PER_NODE such as ``8(x3),4``; 0: not known."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return 0
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environment, "SLURM_NODEID", default=0)
    return counts[node] if node < len(counts) else 0


def _open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    size = _number(environment, "OMPI_COMM_WORLD_SIZE")
    num_local = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", default=size)
    host = environment.get("MASTER_ADDR")
    if host is None:
        if num_local != size:
            raise ConfigError(
                f"OpenMPI: {size} processes over several nodes, and nothing says where process 0 "
                "is; start them with mpirun -x MASTER_ADDR=<its host>"
            )
        host = "127.0.0.1"
    # The name of the job differs from one mpirun to the next.
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or ""
    return Cluster(
        host=host,
        port=_port(environment, job=sum(job.encode())),
        num_processes=size,
        process_id=_number(environment, "OMPI_COMM_WORLD_RANK"),
        local_id=_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", default=0),
        num_local=num_local,
        source="OpenMPI",
    )


def _job_set(environment: Mapping[str, str]) -> Cluster | None:
    if "JOBSET_NAME" not in environment:
        return None
    names = ("REPLICATED_JOB_NAME", "JOB_INDEX", "JOB_COMPLETION_INDEX", "NUM_PROCESSES")
    absent = [name for name in names if not environment.get(name)]
    if absent:
        raise ConfigError(
            f"Kubernetes JobSet: JOBSET_NAME is set, {', '.join(absent)} not; the job file must "
            "pass them on, as experiments/launch/jobset.yaml does"
        )
    jobset, job = environment["JOBSET_NAME"], environment["REPLICATED_JOB_NAME"]
    num_processes = _number(environment, "NUM_PROCESSES")
    pods_a_job = _number(environment, "PODS_PER_JOB", default=num_processes)
    index = _number(environment, "JOB_INDEX") * pods_a_job
    return Cluster(
        host=f"{jobset}-{job}-0-0.{environment.get('JOBSET_SUBDOMAIN') or jobset}",
        port=_port(environment, job=0),  # a pod's network is its own
        num_processes=num_processes,
        process_id=index + _number(environment, "JOB_COMPLETION_INDEX"),
        local_id=0,
        num_local=1,
        source="Kubernetes JobSet",
    )


def _port(environment: Mapping[str, str], *, job: int) -> int:
    return _number(environment, PORT, default=_FIRST_PORT + job % _NUM_PORTS)


def _number(environment: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    number = None if text is None else whole_number(text)
    if number is None:
        raise ConfigError(f"{name}={text!r} in the environment must be a whole number")
    return number


def expand_nodes(text: str) -> list[str]:
    """Expands a Slurm node list: ``gpu[01-03,7],head`` becomes gpu01, gpu02, gpu03, gpu7, head."""
    nodes: list[str] = []
    for part in re.findall(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*(?:,|$)", text):
        nodes += _expand(part.rstrip(","))
    return [node for node in nodes if node]


def _expand(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    head, ranges, tail = match.groups()
    names = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        lowest, highest = whole_number(first), whole_number(last or first)
        if lowest is None or highest is None:
            raise ConfigError(f"Slurm node list {part!r}: {piece!r} is no range of numbers")
        if highest - lowest >= _MAX_NODES:
            raise ConfigError(f"Slurm node list {part!r} names more than {_MAX_NODES:,} nodes")
        for number in range(lowest, highest + 1):
            names += _expand(f"{head}{number:0{len(first)}d}{tail}")
    return names


def free_port(address: str = "127.0.0.1") -> int:
    """Returns a TCP port that is free on an address of this machine; empty: on all."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def attempt(environment: Mapping[str, str] = os.environ) -> int:
    """Returns how often the launcher has restarted this job: 0 at the first start."""
    return whole_number(environment.get(ATTEMPT, "0")) or 0
