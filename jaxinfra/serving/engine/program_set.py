"""The compiled programs of an engine: which there are, and how they come from a store or compiler.

Programs can be made in the background, those that together serve every request first. Until the
others are there, a step runs a larger program with padding, or one for a row at a time.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax

from jaxinfra.config.model import ModelConfig
from jaxinfra.errors import DeviceMemoryError
from jaxinfra.model.serving_form import COMPILER_OPTIONS
from jaxinfra.runtime.compile_cache import without_cache
from jaxinfra.runtime.signals import UNAWAITED
from jaxinfra.serving.engine.fit import estimated_temporaries, temporary_bytes
from jaxinfra.serving.engine.moves import PAGES_AT_ONCE
from jaxinfra.serving.engine.plan import SchedulerLimits
from jaxinfra.serving.program_store import Noted, ProgramStore, described, program_name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramKey:
    """Identifies a compiled program by its function, its shapes and its variant."""

    name: str
    rows: int
    length: int = 1
    is_fresh: bool = False
    is_full: bool = False
    is_scored: bool = False  # returns the sampled tokens' log-probabilities, as a full one does
    is_greedy: bool = False  # no row has a temperature

    def __str__(self) -> str:
        kind = " from position 0" * self.is_fresh + " with all settings" * self.is_full
        kind += " with scores" * self.is_scored + " without noise" * self.is_greedy
        return f"{self.name} {self.rows} x {self.length}{kind}"

    def covers(self, other: "ProgramKey") -> bool:
        """Returns whether this program can run what ``other`` runs, with padding.

        A program for the prompt of one row also decodes, a row at a time.
        """
        decodes = self.name == "step" and self.rows == 1 and self.length > 1
        return (
            self.name == other.name
            and self.length >= other.length
            and (decodes or self.rows >= other.rows)
            and (decodes or (self.length > 1) == (other.length > 1))
            and (other.is_fresh or not self.is_fresh)
            and (self.is_full or not other.is_full)
            and (self.is_full or self.is_scored or not other.is_scored)
            and (other.is_greedy or not self.is_greedy)
        )


_OF_MODEL = ("step", "verify", "score")  # programs that run the model
EMPTY = ProgramKey(name="empty", rows=1)
COPY = ProgramKey(name="copy", rows=PAGES_AT_ONCE)
KEEP = ProgramKey(name="keep", rows=1)
SAVE = ProgramKey(name="save", rows=PAGES_AT_ONCE)
RESTORE = ProgramKey(name="restore", rows=PAGES_AT_ONCE)
SAVE_STATE = ProgramKey(name="save_state", rows=1)
RESTORE_STATE = ProgramKey(name="restore_state", rows=1)
MASK = ProgramKey(name="mask", rows=1)


LEAST_GREEDY = 128
"""Number of rows from which greedy decoding has programs of its own, without sampling noise."""


def history_program(limits: SchedulerLimits) -> ProgramKey:
    """Returns the key of the program that fills a slot's token history for a new request."""
    return ProgramKey(name="history", rows=1, length=limits.context)


def listed_programs(
    limits: SchedulerLimits, *, verify_length: int | None
) -> tuple[ProgramKey, ...]:
    """Returns the keys of all programs that a step may need; the first serve every generation.

    Args:
        verify_length: tokens per row with drafts; None without speculative decoding.
    """
    # All settings cost passes over the logits, which beside a chunk's own work are nothing.
    *smaller, largest = [
        ProgramKey(name="step", rows=rows, is_full=is_full)
        for rows in limits.row_sizes
        for is_full in (False, True)
    ]
    keys = [largest, *smaller]
    keys += [
        ProgramKey(name="step", rows=rows, length=length, is_fresh=is_fresh, is_full=True)
        for rows, length in limits.chunk_shapes
        for is_fresh in (True, False)
    ]
    if verify_length is not None:
        keys += [
            ProgramKey(name="verify", rows=rows, length=verify_length, is_full=is_full)
            for rows in limits.row_sizes
            for is_full in (False, True)
        ]
    if limits.num_host_pages:
        keys += [SAVE, RESTORE]
    if limits.num_host_states:
        keys += [SAVE_STATE, RESTORE_STATE]
    if limits.num_snapshots:
        keys.append(KEEP)
    keys += [EMPTY, COPY, history_program(limits), MASK]
    keys += [
        ProgramKey(name="step", rows=rows, is_greedy=True)
        for rows in limits.row_sizes
        if rows >= LEAST_GREEDY
    ]
    first = first_programs(keys)
    first = (EMPTY, *(key for key in first if key != EMPTY))
    scores = [
        ProgramKey(name="score", rows=limits.rows(1), length=length)
        for length in limits.chunk_sizes
        if length <= limits.max_step_tokens
    ]
    return (*first, *(key for key in keys if key not in first), *scores)


def first_programs(keys: Sequence[ProgramKey]) -> tuple[ProgramKey, ...]:
    """Returns the fewest programs that can run every step, except for scores of prompts."""
    kept = [key for key in keys if key.name != "score"]
    return tuple(key for key in kept if not any(o != key and o.covers(key) for o in kept))


def most_temporaries(keys: Sequence[ProgramKey], config: ModelConfig, *, itemsize: int) -> int:
    """Estimates the scratch bytes of the program that needs most.

    Args:
        itemsize: bytes of an activation's element.
    """
    return max(
        estimated_temporaries(
            config,
            rows=key.rows,
            length=key.length,
            num_logits=1 if key.name == "step" else key.length,
            itemsize=itemsize,
        )
        for key in keys
        if key.name in _OF_MODEL
    )


class Prepared(NamedTuple):
    """A function with its arguments, to be compiled or to be found in a store."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # arrays or shapes
    donated: tuple[int, ...] = ()  # arguments whose memory results may take
    results_on: jax.sharding.Sharding | None = None  # None: the compiler decides

    def lowered(self) -> jax.stages.Lowered:
        """Traces and lowers the function."""
        placed: dict[str, Any] = (
            {} if self.results_on is None else {"out_shardings": self.results_on}
        )
        jitted = jax.jit(
            self.function, donate_argnums=self.donated, compiler_options=COMPILER_OPTIONS, **placed
        )
        return jitted.lower(*self.arguments)


class ProgramProgress(NamedTuple):
    """Number of programs that are ready, of all, and the time that the others will take."""

    ready: int
    all: int
    seconds_left: float | None  # None before the first one is ready

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        return f"{self.ready} of {self.all} programs{left}"


_log = logging.getLogger(__name__)


@final
class ScratchRoom:
    """Device memory that is kept free for programs: estimated at first, then what was measured.

    Args:
        noted: what an earlier start measured, if it was more.
        estimated: scratch bytes of the program that needs most.
    """

    def __init__(self, noted: Noted, *, estimated: int):
        self._noted = noted
        self.bytes: int = max(estimated, noted.value or 0)
        self._lock = threading.Lock()
        self.spare_bytes: float | None = None  # beyond ``bytes``; None: no memory is limited

    def check(self, key: ProgramKey, measured: int) -> None:
        """Notes a program that needs more than is kept free, for the next start.

        Raises:
            DeviceMemoryError: what JAX may allocate does not suffice for it.
        """
        with self._lock:
            more = measured - self.bytes
            if more <= 0 or self.spare_bytes is None:
                return
            self._noted.note(max(self._noted.value or 0, measured))
        said = f"{key} needs {measured / 2**30:.2f} GiB of scratch memory, {more / 2**30:.2f} more"
        if more > self.spare_bytes:
            raise DeviceMemoryError(
                f"{said} than was kept free, and there is no more: start again (the number is "
                "noted, and there will be fewer pages), or give a lower --memory-fraction"
            )
        _log.warning("%s than was kept free; the next start takes fewer pages", said)


@final
class ProgramSet:
    """Makes programs by their keys: from a store if there is one, else by compiling them.

    Several threads may use it.

    Args:
        prepare: returns the function and the arguments of a program.
        devices: devices of the programs, in the order of their mesh.
        model: description of the model and the limits, part of the names in the store.
        store: where compiled programs are kept; None: nowhere.
        room: checks scratch bytes of each compiled program; None: no memory is limited.
    """

    def __init__(
        self,
        prepare: Callable[[ProgramKey], Prepared],
        *,
        devices: Sequence[jax.Device],
        model: Sequence[object] = (),
        store: ProgramStore | None = None,
        room: "ScratchRoom | None" = None,
    ):
        self._prepare, self._devices = prepare, tuple(devices)
        self._store, self._room = store, room
        self._model = tuple(map(described, model)) if store is not None else ()
        self._made: dict[ProgramKey, Callable[..., Any]] = {}
        self._waited: set[ProgramKey] = set()  # that the background has yet to make
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._begun, self._num_wanted = 0.0, 0
        self.num_compiled = 0
        self.num_loaded = 0
        self.num_late = 0  # that a request waited for
        self.is_warm = False
        self._is_closed = False

    @property
    def progress(self) -> ProgramProgress:
        """Progress of the background thread with the programs requested from it."""
        ready = self._num_wanted - len(self._waited)
        left = None
        if ready:
            left = (time.monotonic() - self._begun) / ready * len(self._waited)
        return ProgramProgress(ready, self._num_wanted, left)

    def make(
        self, keys: Sequence[ProgramKey], report: Callable[[int, int], None] | None = None
    ) -> None:
        """Makes programs: tracing one after another, loading and compiling side by side.

        Args:
            report: called, in whatever thread, with the number of programs that are ready, and of
                all.
        """
        keys = [key for key in keys if key not in self._made]
        most, numbers = os.cpu_count() or 1, itertools.count(1)

        def tell() -> None:
            if report is not None:
                report(next(numbers), len(keys))

        def compile_one(key: ProgramKey, lowered: jax.stages.Lowered) -> None:
            self._compile(key, lowered)
            tell()

        pool = concurrent.futures.ThreadPoolExecutor(most, thread_name_prefix=UNAWAITED)
        with pool:
            loading = {key: pool.submit(self._loaded, key) for key in keys}
            coming: list[concurrent.futures.Future[None]] = []
            first = first_programs(keys) if self._devices[0].platform == "cpu" else ()
            for place, key in enumerate(keys):
                if self._is_closed or any(each.done() and each.exception() for each in coming):
                    break
                if place == len(first):
                    concurrent.futures.wait(coming)  # XLA compiles for a CPU with all its cores
                if loading[key].result() is None:
                    # Tracing further ahead would slow down the programs that are needed first.
                    while sum(not each.done() for each in coming) >= most:
                        concurrent.futures.wait(
                            [each for each in coming if not each.done()],
                            return_when=concurrent.futures.FIRST_COMPLETED,
                        )
                    coming.append(pool.submit(compile_one, key, self.lowered(key)))
                else:
                    tell()
            for each in coming:
                each.result()

    def close(self) -> None:
        """Stops the background thread after the programs that it is compiling, so that the process
        can exit.
        """
        self._is_closed = True

    def begin(self, keys: Sequence[ProgramKey]) -> None:
        """Starts to make programs in the background, in this order."""
        keys = [key for key in keys if key not in self._made]
        self._waited, self._num_wanted = {*keys}, len(keys)
        self._begun = time.monotonic()

        def work() -> None:
            try:
                self.make(keys)
            except BaseException as error:
                with self._changed:
                    self._failure, self._waited = error, set()
                    self._changed.notify_all()

        threading.Thread(target=work, name="programs", daemon=True).start()

    def wait(self, keys: Sequence[ProgramKey], timeout_s: float | None = None) -> bool:
        """Waits until the background thread has made these programs; False after the timeout.

        Raises:
            Exception: the error of the background thread.
        """
        wanted = {*keys}
        with self._changed:
            done = self._changed.wait_for(lambda: not (wanted & self._waited), timeout_s)
            if self._failure is not None:
                raise self._failure
            return done

    def __len__(self) -> int:
        return len(self._made)

    def ready(self, key: ProgramKey) -> ProgramKey:
        """Returns a key whose program is ready and covers ``key``: the smallest; else ``key``."""
        if key in self._made:
            return key
        found = [each for each in list(self._made) if each.covers(key)]
        if not self._waited:  # those with scores alone are none of those that a server makes
            full = dataclasses.replace(key, is_full=True, is_scored=False)
            return full if key.is_scored and full in self._made else key
        return min(found, key=lambda each: each.rows * each.length, default=key)

    def get(self, key: ProgramKey) -> Callable[..., Any]:
        """Returns a compiled program; one that is missing is made now, and counted as late."""
        found = self._made.get(key)
        if found is not None:
            return found
        self.num_late += self.is_warm
        if key in self._waited:
            self.wait([key])
            return self._made[key]
        if self.is_warm:
            _log.warning("making %s while requests wait; it is not among those listed", key)
        if self._loaded(key) is None:
            self._compile(key, self.lowered(key))
        return self._made[key]

    def lowered(self, key: ProgramKey) -> jax.stages.Lowered:
        """Lowers a program with its shapes, to compile or inspect it."""
        return self._prepare(key).lowered()

    def _loaded(self, key: ProgramKey) -> Callable[..., Any] | None:
        if self._store is None:
            return None
        prepared = self._prepare(key)
        in_tree = jax.tree.structure((prepared.arguments, {}))
        found = self._store.load(self._name(key), in_tree, self._devices)
        if found is not None:
            self._add(key, found, is_loaded=True)
        return found

    def _compile(self, key: ProgramKey, lowered: jax.stages.Lowered) -> None:
        if self._is_closed:
            return
        with contextlib.nullcontext() if self._store is None else without_cache():
            compiled = lowered.compile()
        if self._room is not None and key.name in _OF_MODEL:
            self._room.check(key, temporary_bytes(compiled))
        self._add(key, compiled, is_loaded=False)
        if self._store is not None:
            self._store.keep(self._name(key), compiled)

    def _add(self, key: ProgramKey, made: Callable[..., Any], *, is_loaded: bool) -> None:
        with self._changed:
            self._made[key] = made
            self._waited.discard(key)
            self.num_loaded += is_loaded
            self.num_compiled += not is_loaded
            self._changed.notify_all()

    def _name(self, key: ProgramKey) -> str:
        return program_name(self._devices, *self._model, str(key))
