"""Examination of the host: memory, shared memory, file handles, disk and clock."""

import contextlib
import ctypes
import dataclasses
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

from jaxinfra.diagnostics.machine.finding import Finding, Grade, graded, not_known

_WRITTEN = 64 << 20
_SLOW_DISK = 200e6
"""Bytes/s under which saving a checkpoint outlasts what it overlaps with."""
_FILES = 4096
_CPUS_A_GPU = 4
_HELD = 0.2
"""Share of a control group's periods in which its limit may make it wait."""
_UNSYNCHRONIZED = 0x40  # STA_UNSYNC of adjtimex(2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostState:
    """Readings of one host; a reading that the host does not provide is None."""

    memory_bytes: int  # available to new processes
    total_bytes: int
    cgroup_limit: int | None  # of the control group; None where there is none
    cgroup_used: int | None
    cpus: int  # cores that this process may run on
    cpu_limit: float | None  # CPU quota of the control group, in cores; None: no limit
    cpu_throttled: float | None  # fraction of scheduling periods throttled by that quota
    shared_bytes: int | None  # free in /dev/shm
    open_files: int  # most files that a process may have open
    disk_free: int
    write_rate: float | None  # bytes/s of the run directory's disk
    clock_synchronized: bool | None
    clock_error_s: float | None  # largest error of the clock, as the kernel estimates it


def read_host(directory: Path) -> HostState:
    """Reads the host's state; measures the disk by a 64 MiB file in ``directory``."""
    memory = _memory_info()
    there = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    synchronized, error_s = _clock()
    shared = Path("/dev/shm")
    return HostState(
        memory_bytes=memory["MemAvailable"],
        total_bytes=memory["MemTotal"],
        cgroup_limit=_bytes("memory.max", "memory/memory.limit_in_bytes"),
        cgroup_used=_bytes("memory.current", "memory/memory.usage_in_bytes"),
        cpus=len(os.sched_getaffinity(0)),
        cpu_limit=_cpu_limit(),
        cpu_throttled=_cpu_held(),
        shared_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        disk_free=free,
        write_rate=_write_rate(there) if free > 4 * _WRITTEN else 0.0,
        clock_synchronized=synchronized,
        clock_error_s=error_s,
    )


def _memory_info() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {
        name: 1024 * int(value.split()[0])
        for name, _, value in (line.partition(":") for line in lines)
    }


def _control_group(*names: str) -> str | None:
    """Returns what the first of these files of a control group, version 2 or 1, says."""
    for name in names:
        with contextlib.suppress(OSError):
            return (Path("/sys/fs/cgroup") / name).read_text().strip()
    return None


def _bytes(*names: str) -> int | None:
    """Returns a control group's number; None where there is none, or no limit."""
    text = _control_group(*names)
    return int(text) if text and text.isdigit() and int(text) < 1 << 60 else None


def _cpu_limit() -> float | None:
    text = _control_group("cpu.max")
    if text is None:
        quota = _control_group("cpu/cpu.cfs_quota_us")
        text = f"{quota or 'max'} {_control_group('cpu/cpu.cfs_period_us')}"
    limit, period = text.split()
    return int(limit) / int(period) if limit.isdigit() else None


def _cpu_held() -> float | None:
    lines = (_control_group("cpu.stat", "cpu/cpu.stat") or "").splitlines()
    counts = {name: int(count) for name, count in map(str.split, lines)}
    periods = counts.get("nr_periods", 0)
    return counts.get("nr_throttled", 0) / periods if periods else None


def _write_rate(directory: Path) -> float | None:
    block = os.urandom(1 << 20)  # what compresses would tell of the compressor
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            began = time.perf_counter()
            for _ in range(_WRITTEN >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return _WRITTEN / (time.perf_counter() - began)
    except OSError:
        return None


def _clock() -> tuple[bool | None, float | None]:
    """Tells whether a service keeps the clock, and its largest error, by adjtimex(2)."""
    answer = (ctypes.c_long * 64)()  # struct timex, modes 0: only read
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(answer))
    except (AttributeError, OSError):
        return None, None
    if state < 0:
        return None, None
    # struct timex: modes, offset, freq, maxerror, esterror, status, each in a long's room.
    status = ctypes.c_int.from_buffer(answer, 5 * ctypes.sizeof(ctypes.c_long)).value
    return not status & _UNSYNCHRONIZED, answer[3] / 1e6


def host_findings(state: HostState, *, gpu_bytes: int = 0, gpus: int = 0) -> list[Finding]:
    """Compares a host's memory, file handles, disk and clock with what a training job needs.

    Args:
        gpu_bytes: total memory of the GPUs, which a checkpoint copies through the host.
        gpus: number of GPUs in the host.
    """
    return [
        _memory(state, gpu_bytes),
        _cgroup(state),
        _processors(state, gpus),
        _shared(state),
        graded(
            "host: open files",
            f"at most {state.open_files}",
            ok=state.open_files >= _FILES,
            rule=f"at least {_FILES} per process: shards of data, checkpoints, sockets",
            remedy=f"ulimit -n {_FILES} before the job, or LimitNOFILE of its service",
        ),
        *_disk(state),
        _clock_finding(state),
    ]


def _memory(state: HostState, gpu_bytes: int) -> Finding:
    # Of a GPU's memory about half is state, which a checkpoint copies to the host first.
    wanted = max(4 << 30, gpu_bytes // 2)
    rule = f"at least {wanted / 2**30:.0f} GiB can be had: a checkpoint is copied through the host"
    return graded(
        "host: memory",
        f"{state.memory_bytes / 2**30:.1f} of {state.total_bytes / 2**30:.1f} GiB free, "
        f"{state.cpus} CPUs",
        ok=state.memory_bytes >= wanted,
        rule=rule,
        remedy="end what holds it, or shard the state over more hosts",
    )


def _cgroup(state: HostState) -> Finding:
    rule = "a tenth of the control group's memory is free, or the kernel ends the job"
    if state.cgroup_limit is None or state.cgroup_used is None:
        return graded("host: cgroup", "no limit", ok=True, rule=rule, remedy="")
    return graded(
        "host: cgroup",
        f"{state.cgroup_used / 2**30:.1f} of {state.cgroup_limit / 2**30:.1f} GiB in use",
        ok=state.cgroup_used < 0.9 * state.cgroup_limit,
        rule=rule,
        remedy="ask the scheduler for more memory (--mem, resources.limits.memory)",
        otherwise=Grade.FAIL,
    )


def _processors(state: HostState, gpus: int) -> Finding:
    wanted = max(1, _CPUS_A_GPU * gpus)
    there = state.cpus if state.cpu_limit is None else min(state.cpu_limit, state.cpus)
    held = state.cpu_throttled or 0.0
    value = f"{there:g} of {state.cpus}"
    if state.cpu_limit is not None:
        value += f" by the control group, which was made to wait in {held:.0%} of its periods"
    return graded(
        "host: CPUs",
        value,
        ok=there >= wanted and held < _HELD,
        rule=f"at least {wanted}: {_CPUS_A_GPU} per GPU, for launches, input and saves; "
        f"and no limit that makes it wait in {_HELD:.0%} of the time",
        remedy="ask the scheduler for more (--cpus-per-task, resources.limits.cpu)",
    )


def _shared(state: HostState) -> Finding:
    rule = "at least 1 GiB in /dev/shm: NCCL and loaders exchange buffers there"
    if state.shared_bytes is None:
        return not_known("host: shared memory", "no /dev/shm", rule=rule)
    return graded(
        "host: shared memory",
        f"{state.shared_bytes / 2**30:.2f} GiB free",
        ok=state.shared_bytes >= 1 << 30,
        rule=rule,
        remedy="start the container with --shm-size=16g (or an emptyDir of medium Memory)",
        otherwise=Grade.FAIL if state.shared_bytes < 64 << 20 else Grade.WARN,
    )


def _disk(state: HostState) -> list[Finding]:
    speed = f"at least {_SLOW_DISK / 1e6:.0f} MB/s, or saves outlast what they overlap with"
    found = [
        graded(
            "host: disk space",
            f"{state.disk_free / 2**30:.1f} GiB free",
            ok=state.disk_free >= 10 << 30,
            rule="at least 10 GiB free where runs are written",
            remedy="free space, keep fewer checkpoints (checkpoint.keep_last), or name another "
            "--run",
            otherwise=Grade.FAIL if state.disk_free < 1 << 30 else Grade.WARN,
        )
    ]
    if state.write_rate is None:
        return [*found, not_known("host: disk writes", "could not be written", rule=speed)]
    rated = graded(
        "host: disk writes",
        f"{state.write_rate / 1e6:.0f} MB/s ({_WRITTEN >> 20} MiB, synchronized)",
        ok=state.write_rate >= _SLOW_DISK,
        rule=speed,
        remedy="name a faster --run, or save less often (checkpoint.every)",
    )
    return [*found, rated]


def _clock_finding(state: HostState) -> Finding:
    rule = "a time service keeps the clock: ranks' logs and traces are set side by side by it"
    if state.clock_synchronized is None:
        return not_known("host: clock", "not told", rule=rule)
    error = state.clock_error_s
    return graded(
        "host: clock",
        ("synchronized" if state.clock_synchronized else "not synchronized")
        + ("" if error is None else f", off by at most {error:.3f} s"),
        ok=state.clock_synchronized and (error is None or error < 1.0),
        rule=rule,
        remedy="start chrony or systemd-timesyncd",
    )
