"""Runs planned steps on the device with programs that are compiled before the first request."""

import concurrent.futures
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfra.model.decoder import Decoder
from jaxinfra.model.serving_form import COMPILER_OPTIONS
from jaxinfra.serving.engine import programs
from jaxinfra.serving.engine.inputs import RowWriter
from jaxinfra.serving.engine.pages import NULL_PAGE
from jaxinfra.serving.engine.plan import Drawn, PlannedRow, SchedulerLimits, StepPlan, drawn_of_rows
from jaxinfra.serving.engine.programs import (
    PAGES_AT_ONCE,
    WORD_BITS,
    DeviceState,
    HostMemory,
    NamedArrays,
    ProgramConfig,
    Weights,
    batches,
)
from jaxinfra.serving.sampling import GREEDY, SamplingConfig, SamplingRows, TokenHistory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramKey:
    """Identifies a compiled program by its function, its shapes and its variant."""

    name: str
    rows: int
    length: int = 1
    is_fresh: bool = False
    is_full: bool = False

    def __str__(self) -> str:
        kind = " from position 0" * self.is_fresh + " with all settings" * self.is_full
        return f"{self.name} {self.rows} x {self.length}{kind}"


COPY = ProgramKey(name="copy", rows=PAGES_AT_ONCE)
SAVE = ProgramKey(name="save", rows=PAGES_AT_ONCE)
RESTORE = ProgramKey(name="restore", rows=PAGES_AT_ONCE)
MASK = ProgramKey(name="mask", rows=1)


def listed_programs(
    limits: SchedulerLimits, *, verify_length: int | None
) -> tuple[ProgramKey, ...]:
    """Returns the keys of all programs that a step may need.

    Args:
        verify_length: tokens per row with drafts; None without speculative decoding.
    """
    # All settings cost passes over the logits, which beside a chunk's own work are nothing.
    keys = [
        ProgramKey(name="step", rows=rows, is_full=is_full)
        for rows in limits.row_sizes
        for is_full in (False, True)
    ]
    keys += [
        ProgramKey(name="step", rows=rows, length=length, is_fresh=is_fresh, is_full=True)
        for rows, length in limits.chunk_shapes
        for is_fresh in (True, False)
    ]
    keys += [
        ProgramKey(name="score", rows=limits.rows(1), length=length)
        for length in limits.chunk_sizes
        if length <= limits.max_step_tokens
    ]
    if verify_length is not None:
        keys += [
            ProgramKey(name="verify", rows=rows, length=verify_length) for rows in limits.row_sizes
        ]
    if limits.num_host_pages:
        keys += [SAVE, RESTORE]
    return (*keys, COPY, history_program(limits), MASK)


def history_program(limits: SchedulerLimits) -> ProgramKey:
    """Returns the key of the program that fills a slot's token history for a new request."""
    return ProgramKey(name="history", rows=1, length=limits.context)


MOST_BIASES = 300
"""Most token ids in a request's ``logit_bias``, the limit of OpenAI's API."""

_OF_STATE_ALONE = ("copy", "restore", "mask", "history")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """A step that the device is computing; ``ModelRunner.read`` waits for its results."""

    rows: list[tuple[list[PlannedRow], Any]]  # and what their call gave


@final
class ModelRunner:
    """Holds weights, KV-cache pools and compiled programs, and runs steps with them.

    Args:
        num_ids: token ids from this one on are never sampled.
        draft: a smaller model of the same vocabulary, which drafts tokens.
        verify_length: tokens per row with drafts; None without speculative decoding.
        allocates: allocate the pools; if False, ``model`` may hold shapes only, and nothing can
            run.
        adapters: names of the adapters in the model's bank.
    """

    def __init__(
        self,
        model: Decoder,
        limits: SchedulerLimits,
        *,
        num_ids: int,
        draft: Decoder | None = None,
        verify_length: int | None = None,
        allocates: bool = True,
        adapters: Sequence[str] = (),
    ):
        self._limits = limits
        self._writer = RowWriter(limits, adapters)
        graphdef, parameters = nnx.split(model)
        draft_graphdef, draft_parameters = (None, None) if draft is None else nnx.split(draft)
        self._weights = Weights(
            model=NamedArrays.of(parameters),
            draft=None if draft_parameters is None else NamedArrays.of(draft_parameters),
        )
        self._config = ProgramConfig(graphdef=graphdef, num_ids=num_ids, draft=draft_graphdef)
        self._mask_words = -(-num_ids // WORD_BITS)
        self._verify_length = verify_length
        self._compiled: dict[ProgramKey, Callable[..., Any]] = {}
        self._histories: dict[int, tuple[int, int]] = {}  # by slot: request, and tokens it has
        self._sampling: dict[int, tuple[tuple[SamplingConfig, ...], SamplingRows]] = {}
        self._tell: Callable[[ProgramKey, tuple[Any, ...]], None] | None = None
        self.num_compiled = 0
        self.num_late = 0  # compiled after ``warm_up``
        self._is_warm = False

        @jax.jit
        def empty() -> DeviceState:
            pools = functools.partial(
                programs.empty_pools, num_pages=limits.num_pages, page_size=limits.page_size
            )
            return DeviceState(
                pools=pools(model.config, model.execution),
                draft_pools=() if draft is None else pools(draft.config, draft.execution),
                last_S=jnp.zeros(limits.max_running, jnp.int32),
                masks_SW=jnp.zeros((limits.max_running, self._mask_words), jnp.uint32),
                history=TokenHistory.empty(batch=limits.max_running, num_ids=num_ids),
            )

        self._state = empty() if allocates else _shapes_of(empty.lower())
        self._host: HostMemory | None = None
        if allocates and limits.num_host_pages:
            shapes = programs.moved_shapes(self._state)
            self._host = HostMemory(shapes, num_slots=limits.num_host_pages)

    @property
    def keys(self) -> tuple[ProgramKey, ...]:
        """Keys of all programs that a step may need."""
        return listed_programs(self._limits, verify_length=self._verify_length)

    def warm_up(
        self,
        progress: Callable[[int, int], None] | None = None,
        *,
        keys: Sequence[ProgramKey] | None = None,
    ) -> None:
        """Compiles all programs that steps may need, or those of the given keys.

        Args:
            progress: called with the number of compiled programs and of all.
            keys: programs to compile; by default all.
        """
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            # Programs are traced one after another, and compiled side by side meanwhile.
            compiling = {
                pool.submit(self.lowered(key).compile): key
                for key in (self.keys if keys is None else keys)
                if key not in self._compiled
            }
            done = concurrent.futures.as_completed(compiling)
            for number, each in enumerate(done, start=1):
                self._compiled[compiling[each]] = each.result()
                self.num_compiled += 1
                if progress is not None:
                    progress(number, len(compiling))
        self.num_late, self._is_warm = 0, True

    def dispatch(self, plan: StepPlan, masks: dict[int, np.ndarray]) -> Dispatched:
        """Starts a planned step on the device, and returns before it is done.

        Args:
            masks: allowed-token masks by slot, for rows whose request has a structure.
        """
        self._save(plan.saves)
        self._copy(plan.copies)
        self._copy([(NULL_PAGE, page) for page in plan.zeros])
        self._restore(plan.restores)
        for slot, mask_W in masks.items():
            # Ids beyond those that are drawn, and those that the structure does not know: not now.
            words_1W = np.zeros((1, self._mask_words), np.uint32)
            known = mask_W[: self._mask_words]
            words_1W[0, : len(known)] = known
            self.call(MASK, np.array([slot], np.int32), words_1W)
        drawn = []
        for rows, name, length in (
            (plan.chunks, "step", plan.chunk_length),
            (plan.decodes, "step", 1),
            (plan.verifies, "verify", self._verify_length),
        ):
            if rows:
                assert length is not None
                drawn.append((rows, self._call(rows, name, length, masks)))
        return Dispatched(rows=drawn)

    def read(self, dispatched: Dispatched) -> list[Drawn]:
        """Waits for a dispatched step, and returns the tokens that it sampled."""
        if self._host is not None:
            self._host.collect()
        result = []
        for rows, (array, *told) in dispatched.rows:
            scores = [jax.tree.map(np.asarray, each) for each in told]
            result += drawn_of_rows(rows, np.asarray(array), scores)
        return result

    def _call(
        self, rows: Sequence[PlannedRow], name: str, length: int, masks: dict[int, np.ndarray]
    ) -> Any:
        if name == "step" and length > 1 and rows[0].stream.request.scores_prompt:
            name = "score"
        is_chunk = name == "step" and length > 1
        is_plain = all(row.stream.is_plain for row in rows)
        is_asked = not is_plain and any(
            row.stream.request.sampling.logprobs is not None for row in rows
        )
        key = ProgramKey(
            name=name,
            rows=self._limits.rows(len(rows)),
            length=length,
            is_fresh=is_chunk and all(row.start == 0 for row in rows),
            is_full=is_chunk or (name == "step" and not is_plain),
        )
        inputs = self._writer.write(
            rows,
            size=key.rows,
            length=length,
            sampling=self._sampling_rows([row.stream.request.sampling for row in rows], key.rows),
            masks=masks,
            counted=() if is_plain else self._counted(rows),
        )
        arguments: list[Any] = [inputs]
        if name == "score":
            targets_BT = np.zeros((key.rows, length), np.int32)
            targets_BT[0, : len(rows[0].targets)] = rows[0].targets
            arguments.append(targets_BT)
        given = self.call(key, *arguments)
        drawn, *told = given if isinstance(given, tuple) else (given,)
        given = (drawn, *told) if is_asked else (drawn,)
        for each in jax.tree.leaves(given):
            each.copy_to_host_async()
        return given

    def _counted(self, rows: Sequence[PlannedRow]) -> list[int]:
        """Rows whose tokens are new to their slots' histories, among the slots that have one."""
        return [
            place
            for place, row in enumerate(rows)
            if row.stream.request.sampling.is_penalized and self._is_counted(row)
        ]

    def _is_counted(self, row: PlannedRow) -> bool:
        """Returns whether a row's input token is yet to be counted; starts its slot's history if
        needed.
        """
        stream, (number, known) = row.stream, self._histories.get(row.slot, (None, 0))
        # It may have drawn tokens in another slot since it was in this one.
        seen = row.start if row.count == 1 else len(stream.tokens)
        if number != stream.number or known < seen:
            known = len(stream.tokens)
            key = history_program(self._limits)
            ids_T = np.zeros(key.length, np.int32)
            ids_T[:known] = stream.tokens[: key.length]
            prompt = len(stream.request.prompt_ids)
            self.call(key, np.int32(row.slot), ids_T, np.int32(prompt), np.int32(known))
        is_new = row.count == 1 and row.start >= known
        self._histories[row.slot] = (stream.number, known + is_new)
        return is_new

    def _sampling_rows(self, configs: Sequence[SamplingConfig], size: int) -> SamplingRows:
        """Returns sampling settings on the device, cached as most steps repeat those of the step
        before.
        """
        padded = (*configs, *[GREEDY] * (size - len(configs)))
        known = self._sampling.get(size)
        if known is None or known[0] != padded:
            rows = SamplingRows.of(padded, num_biases=MOST_BIASES)
            known = self._sampling[size] = (padded, rows)
        return known[1]

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        for _, padded in batches(pairs, (NULL_PAGE, self._limits.num_pages)):
            sources, targets = np.array(padded, np.int32).T.copy()
            self.call(COPY, sources, targets)

    def _save(self, pairs: list[tuple[int, int]]) -> None:
        """Starts copying pages from the device into host slots."""
        for count, padded in batches(pairs, (NULL_PAGE, 0)):
            pages, slots = zip(*padded, strict=True)
            assert self._host is not None
            given = self.call(SAVE, np.array(pages, np.int32))
            self._host.take([*slots[:count]], given)

    def _restore(self, pairs: list[tuple[int, int]]) -> None:
        """Copies host slots into pages on the device."""
        for _, padded in batches(pairs, (0, self._limits.num_pages)):
            slots, pages = zip(*padded, strict=True)
            assert self._host is not None
            given = self._host.pages([*slots])
            self.call(RESTORE, np.array(pages, np.int32), given)

    def mirror(self, tell: Callable[[ProgramKey, tuple[Any, ...]], None]) -> None:
        """Sets a function that is told of each program call before it is made, so that the mesh's
        other processes can make it too.
        """
        self._tell = tell

    def call(self, key: ProgramKey, *arguments: Any) -> Any:
        """Runs a program, keeps the new device state, and returns the program's other results."""
        if self._tell is not None:
            arguments = jax.tree.map(np.asarray, arguments)
            self._tell(key, arguments)
        program = self._program(key)
        if key == SAVE:
            return program(self._state, *arguments)
        if key.name in _OF_STATE_ALONE:
            self._state = program(self._state, *arguments)
            return None
        given, self._state = program(self._weights, self._state, *arguments)
        return given

    def _program(self, key: ProgramKey) -> Callable[..., Any]:
        if key not in self._compiled:
            if self._is_warm:
                _log.warning("compiling %s while requests wait; it is not among those listed", key)
            self.num_compiled += 1
            self.num_late += 1
            self._compiled[key] = self.lowered(key).compile()
        return self._compiled[key]

    def lowered(self, key: ProgramKey) -> jax.stages.Lowered:
        """Lowers a program with its shapes, to compile or inspect it."""
        indices = np.zeros(key.rows, np.int32)
        match key.name:
            case "copy":
                function, arguments = programs.copy_pages, (self._state, indices, indices)
            case "save":
                function, arguments = programs.read_pages, (self._state, indices)
            case "restore":
                pages = programs.moved_shapes(self._state)
                function, arguments = programs.write_pages, (self._state, indices, pages)
            case "mask":
                masks = np.zeros((key.rows, self._mask_words), np.uint32)
                function, arguments = programs.set_masks, (self._state, indices, masks)
            case "history":
                ids, one = np.zeros(key.length, np.int32), np.int32(0)
                function, arguments = programs.begin_history, (self._state, one, ids, one, one)
            case _:
                function = functools.partial(getattr(programs, key.name), config=self._config)
                if key.name == "step":
                    kind = {"is_fresh": key.is_fresh, "is_full": key.is_full}
                    function = functools.partial(function, **kind)
                sampling = self._sampling_rows((), key.rows)
                blank = self._writer.write((), size=key.rows, length=key.length, sampling=sampling)
                arguments = (self._weights, self._state, blank)
                if key.name == "score":
                    arguments = (*arguments, np.zeros((key.rows, key.length), np.int32))
        # The state is given up for the next one; what is saved is read only.
        donated = tuple(
            place for place, each in enumerate(arguments) if each is self._state and key != SAVE
        )
        jitted = jax.jit(function, donate_argnums=donated, compiler_options=COMPILER_OPTIONS)
        return jitted.lower(*arguments)


def _shapes_of(lowered: jax.stages.Lowered) -> Any:
    """Shapes and shardings of a program's outputs."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        lowered.out_info,
        lowered.compile().output_shardings,
    )
