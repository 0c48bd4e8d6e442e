"""A GPU's events in a profiler trace: one per kernel or copy, with scope and mesh axes.

A trace names kernels and the operations that launched them, but no mesh axes. Those are in the
compiled program, which ``training.profile`` writes beside the trace.
"""

import collections
import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any, TypedDict, final

import jax

from jaxinfra.errors import DataError
from jaxinfra.runtime.files import read_bytes, read_json
from jaxinfra.training.profile import COLLECTIVES_FILE

_TRACE_BYTES = 8 << 30

SCOPES = (
    "attention/core",
    "attention",
    "routing",
    "exchange/nodes",
    "exchange",
    "experts",
    "combine",
    "shared",
    "mlp",
    "loss",
    "optimizer",
    "embedding",
    "final_norm",
    "collective",
)
"""Named scopes of the step, the more specific first; the rest counts as "other". Of a layer of
experts ``mlp`` has the rest: the sort of tokens by expert, and norms.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """One kernel or copy that ran on one GPU, from a profiler trace."""

    kernel: str
    hlo_op: str  # the HLO instruction that launched it
    op_name: str  # place in the source program: jit(train_step)/layer/.../dot
    program: str  # the compiled module
    start_ns: float
    duration_ns: float
    started_by: str = ""  # for an asynchronous event, the instruction that starts it, if known

    @property
    def end_ns(self) -> float:
        """The time at which the kernel or copy ended, in nanoseconds."""
        return self.start_ns + self.duration_ns


_RANK = re.compile(r"rank-(\d{5})")
_GPU = re.compile(r"/device:GPU:(\d+)")


def traced_ranks(trace: Path) -> dict[int, Path]:
    """Returns each rank's newest trace under a directory, by rank; may be empty."""
    found: dict[int, Path] = {}
    for file in sorted(trace.rglob("*.xplane.pb"), key=lambda file: file.lstat().st_mtime):
        names = [
            match for part in file.relative_to(trace).parts if (match := _RANK.fullmatch(part))
        ]
        found[int(names[-1][1]) if names else 0] = file
    return dict(sorted(found.items()))


def events_by_device(trace: Path, *, rank: int = 0) -> dict[int, list[TraceEvent]]:
    """Reads the kernels and copies of each GPU from a rank's newest trace, by start time.

    Raises DataError where there is no trace, or no GPU in it.
    """
    file, profile = _read(trace, rank)
    try:
        devices = [int(match[1]) for p in profile.planes if (match := _GPU.match(p.name))]
        starts = _starts(profile)
        return {
            each: _launches(profile, f"/device:GPU:{each}", starts, where=file)
            for each in sorted(devices) or [0]
        }
    except (RuntimeError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is no trace, or a damaged one ({error})") from error


def _read(trace: Path, rank: int) -> tuple[Path, jax.profiler.ProfileData]:
    files = traced_ranks(trace)
    if rank not in files:
        there = f"; there are those of ranks {', '.join(map(str, files))}" if files else ""
        what = f"of rank {rank} " if files else ""
        raise DataError(
            f"{trace} holds no trace {what}(*.xplane.pb){there}; make one with --profile START:STOP"
        )
    data = read_bytes(files[rank], limit=_TRACE_BYTES, error=DataError)
    try:
        return files[rank], jax.profiler.ProfileData.from_serialized_xspace(data)
    except RuntimeError as error:
        raise DataError(f"{files[rank]} is no trace, or a damaged one ({error})") from error


def _launches(
    profile: jax.profiler.ProfileData, name: str, starts: dict[str, str], *, where: Path
) -> list[TraceEvent]:
    plane = next((p for p in profile.planes if re.match(rf"{name}(?!\d)", p.name)), None)
    if plane is None and not any(p.name.startswith("/device:") for p in profile.planes):
        raise DataError(
            f"{where} is of a CPU, whose operations a profile does not tell apart; profile a "
            f"step on a GPU, or open this trace with: tensorboard --logdir {where.parent}. What a "
            "GPU's looks like, jaxinfra trace --example shows"
        )
    if plane is None:
        names = ", ".join(p.name for p in profile.planes) or "none at all"
        raise DataError(f"{where} has no plane {name}, only {names}")
    events = []
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue  # derived lines repeat the kernels, grouped
        for event in line.events:
            with warnings.catch_warnings():  # the extension's own types lack __module__
                warnings.simplefilter("ignore", DeprecationWarning)
                stats = dict(event.stats)
            events.append(
                TraceEvent(
                    kernel=event.name,
                    hlo_op=str(stats.get("hlo_op", "")),
                    op_name=str(stats.get("name", "")),
                    program=str(stats.get("hlo_module", "")),
                    start_ns=event.start_ns,
                    duration_ns=event.duration_ns,
                    started_by=starts.get(str(stats.get("hlo_op", "")), ""),
                )
            )
    return sorted(events, key=lambda event: event.start_ns)


_START = re.compile(r"[\w-]+-start(\.\d+)*")


def _starts(profile: jax.profiler.ProfileData) -> dict[str, str]:
    """Map from asynchronous launches to the instructions that start them, such as
    ``{all-gather.271: all-gather-start.50}``. Launches name the wrapped operation, and host threads
    nest both names.
    """
    found: dict[str, str] = {}
    for plane in profile.planes:
        if plane.name != "/host:CPU":
            continue
        for line in plane.lines:
            begun, until = "", 0.0
            for event in sorted(line.events, key=lambda e: (e.start_ns, -e.duration_ns)):
                if _START.fullmatch(event.name):
                    begun, until = event.name, event.start_ns + event.duration_ns
                elif begun:  # the first thing in it
                    if event.start_ns < until:
                        found[event.name] = begun
                    begun = ""
    return found


def scope_of(op_name: str) -> str:
    """Returns the scope in an HLO ``op_name``: ``mlp``, ``mlp backward`` or ``mlp recomputed``."""
    # Autodiff and remat wrap scopes: transpose(jvp(mlp)), rematted_computation/mlp.
    plain = re.sub(r"[\w.]+\(|\)", "", op_name)
    scope = next((scope for scope in SCOPES if f"/{scope}/" in f"/{plain}/"), "other")
    if "rematted_computation" in op_name:
        return f"{scope} recomputed"
    return f"{scope} backward" if "transpose(" in op_name else scope


_COLLECTIVE = r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?!.*fusion)"
_KINDS = (
    # What is fused behind one, and named after it, computes.
    # The only copies from peer to peer are XLA's permutes.
    ("collective", rf"nccl|memcpyp2p|{_COLLECTIVE}"),
    ("copy", r"memcpy|memset|dynamic_update_slice|copy"),
    ("matmul", r"nvjet|gemm|cutlass|xmma|cublas"),
    ("attention", r"fmha|sdpa|flash"),
    ("reduction", r"reduce|softmax"),
)
_MOSAIC = "_mosaic_gpu"
_MOSAIC_KINDS = (
    # As ``pallas_kernels`` names its own.
    ("collective", r"sum_rows|open_mailbox"),
    ("matmul", r"matmul|cross_entropy|decode_layers"),
    ("attention", r"attention|append_heads"),
    ("reduction", r"softmax|norm"),
    ("elementwise", r"quantize"),
)
KINDS = ("matmul", "attention", "reduction", "elementwise", "copy", "collective")


def kind_of(event: TraceEvent) -> str:
    """Returns an event's kind, one of ``KINDS``, from its kernel's name."""
    text = f"{event.kernel} {event.hlo_op}".lower()
    if _MOSAIC in text:
        return _mosaic_kind(event)
    return next((kind for kind, pattern in _KINDS if re.search(pattern, text)), "elementwise")


def _mosaic_kind(event: TraceEvent) -> str:
    """Returns the kind of a Mosaic kernel by its name, else by its call site."""
    name = event.kernel.lower().partition(_MOSAIC)[0]
    for kind, pattern in _MOSAIC_KINDS:
        if re.search(pattern, name):
            return kind
    path = re.sub(r"[\w.]+\(|\)", "/", f"/{event.op_name}/")
    if "/attention/" in path:
        return "attention"
    return "matmul" if "/loss/" in path or "/experts/" in path else "elementwise"


UNKNOWN = "unknown"
_KIND = re.compile("all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute")


class _Collective(TypedDict):
    axes: list[str]
    instruction: str
    kind: str
    scope: str
    sent_bytes: float


@final
class CollectiveAxes:
    """Mesh axes and bytes of a compiled program's collectives, by instruction."""

    def __init__(self, collectives: list[dict[str, Any]]):
        self._by_name: dict[str, str] = {}
        by_place: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
        by_kind: dict[str, set[str]] = collections.defaultdict(set)
        self.sent_bytes: dict[str, float] = collections.defaultdict(float)
        for each in collectives:
            axes = " x ".join(each["axes"])
            self._by_name[each["instruction"]] = axes
            by_place[each["kind"], each["scope"]].add(axes)
            by_kind[each["kind"]].add(axes)
            self.sent_bytes[axes] += each["sent_bytes"]
        self._by_place = {place: " or ".join(sorted(axes)) for place, axes in by_place.items()}
        self._by_kind = {kind: min(axes) for kind, axes in by_kind.items() if len(axes) == 1}

    def of(self, event: TraceEvent) -> str:
        """Returns a collective event's mesh axes: ``fsdp``, ``fsdp x tensor``, or ``unknown``."""
        # Asynchronous ones are launched under the name of what they wrap, which the program's text
        # leaves out. Where the host's side of the trace does not say what started them, both still
        # say where in the source they come from.
        if axes := self._by_name.get(event.hlo_op) or self._by_name.get(event.started_by):
            return axes
        found = _KIND.search(event.hlo_op.replace("_", "-"))
        is_copy = event.kernel == "MemcpyP2P"  # a trace names no permute of it
        kind = found[0] if found else "collective-permute" if is_copy else ""
        if axes := self._by_place.get((kind, event.op_name)):
            return axes
        return self._by_kind.get(kind, UNKNOWN)  # where all of a kind go over the same


def mesh_axes(trace: Path) -> CollectiveAxes | None:
    """Reads the collectives' mesh axes from the newest program description beside a trace.

    Returns None if no description exists: for a run on one device, or another program's trace.
    """
    found = newest(trace, COLLECTIVES_FILE, holds=list[_Collective])
    return None if found is None else CollectiveAxes(found)


def newest(trace: Path, name: str, *, holds: Any) -> Any:
    """Reads the newest JSON file called ``name`` under a trace's directory, or returns None.

    Args:
        holds: the type to read the JSON values as.
    """
    files = sorted(trace.rglob(name), key=lambda file: file.stat().st_mtime)
    return read_json(files[-1], holds=holds) if files else None
