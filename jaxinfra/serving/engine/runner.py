"""Runs planned steps on the device with programs that are compiled before the first request."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfra.checkpoint import processes
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.own import OwnLayer
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.definition import Parameters, by_path
from jaxinfra.model.execution import Execution
from jaxinfra.serving.adapter_bank import AdapterRow
from jaxinfra.serving.engine import moves, programs
from jaxinfra.serving.engine.fit import (
    MemoryNeeds,
    budget_bytes,
    device_bytes,
    fitted_limits,
    require_free,
    require_pages,
)
from jaxinfra.serving.engine.inputs import RowWriter
from jaxinfra.serving.engine.mover import Mover
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.plan import (
    PlannedRow,
    RowSample,
    SchedulerLimits,
    StepPlan,
    samples_of_rows,
)
from jaxinfra.serving.engine.program_set import (
    EMPTY,
    LEAST_GREEDY,
    MASK,
    SAVE,
    SAVE_STATE,
    Prepared,
    ProgramKey,
    ProgramSet,
    ScratchRoom,
    first_programs,
    history_program,
    listed_programs,
    most_temporaries,
)
from jaxinfra.serving.engine.programs import (
    WORD_BITS,
    DeviceState,
    NamedArrays,
    ProgramConfig,
    Weights,
)
from jaxinfra.serving.engine.requests import Asked
from jaxinfra.serving.program_store import Noted, ProgramStore
from jaxinfra.serving.sampling import GREEDY, SamplingConfig, SamplingRows, TokenHistory

MOST_BIASES = 300
"""Most token ids in a request's ``logit_bias``, the limit of OpenAI's API."""

_PAGES_TOLERANCE = 0.02  # of the number of pages, within which kept programs are taken
_OF_STATE_ALONE = ("copy", "keep", "restore", "restore_state", "mask", "history")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """A step that the device is computing; ``ModelRunner.read`` waits for its results."""

    rows: list[tuple[list[PlannedRow], Any]]  # rows of each call, and its results on the device


@final
class ModelRunner:
    """Holds weights, KV-cache pools and compiled programs, and runs steps with them.

    Args:
        num_ids: token ids from this one on are never sampled.
        draft: a smaller model of the same vocabulary, which drafts tokens.
        verify_length: tokens per row with drafts; None without speculative decoding.
        adapters: names of the adapters in the model's bank.
        store: where compiled programs are kept; None: nowhere.
    """

    def __init__(
        self,
        model: Decoder,
        limits: SchedulerLimits,
        *,
        num_ids: int,
        draft: Decoder | None = None,
        verify_length: int | None = None,
        adapters: Sequence[str] = (),
        store: ProgramStore | None = None,
    ):
        self._limits = limits
        self._writer = RowWriter(limits, adapters)
        self._config = ProgramConfig(
            graphdef=nnx.graphdef(model),
            num_ids=num_ids,
            draft=None if draft is None else nnx.graphdef(draft),
            drafts_itself=draft is None and verify_length is not None and model.config.mtp,
        )
        self._weights = self._shapes = _shapes(_weights(model, draft))
        self._mask_words = -(-num_ids // WORD_BITS)
        self._verify_length = verify_length
        self._histories: dict[int, tuple[int, int]] = {}  # by slot: request, and tokens it has
        self._sampling: dict[int, tuple[tuple[SamplingConfig, ...], SamplingRows]] = {}
        self._tell: Callable[[ProgramKey, tuple[Any, ...]], None] | None = None
        self._empty = functools.partial(
            _empty_state,
            models=[(each.config, each.execution) for each in (model, draft) if each is not None],
            drafts_itself=self._config.drafts_itself,
            limits=limits,
            num_ids=num_ids,
        )
        layers = [x for block in model.config.blocks for x in (block.mixer, block.feed_forward)]
        has_own = any(isinstance(each, OwnLayer) for each in layers)
        store = None if has_own else store  # the code of a user's layers is in no file's name
        devices = _devices(self._weights)
        described = (self._config, self._weights, self._verify_length)
        # Scratch memory does not depend on the number of pages, which follows from it.
        of_any_size = (*described, dataclasses.replace(limits, num_pages=2), limits.context)
        self.scratch = ScratchRoom(
            Noted(store, devices, "scratch bytes", *of_any_size),
            estimated=self._estimated_scratch(model, draft),
        )
        self._noted_pages = Noted(store, devices, "pages", *of_any_size)
        self.programs = ProgramSet(
            self._prepared,
            devices=devices,
            model=(*described, limits),
            store=store,
            room=self.scratch,
        )
        self._state = self._state_shapes = self._placed_state()
        self._mover = Mover(self._state_shapes, limits, call=self.call)

    @property
    def _one_place(self) -> jax.sharding.Sharding | None:
        """Sharding of arrays on the only device; None for several."""
        if len(_devices(self._shapes)) > 1:
            return None
        sharding = jax.tree.leaves(self._shapes)[0].sharding
        if isinstance(sharding, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        return sharding

    def _placed_state(self) -> DeviceState:
        """Shapes and shardings of the state's arrays."""
        if (sharding := self._one_place) is not None:
            shapes = jax.eval_shape(self._empty)
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
            )
        make: Any = self.programs.get(EMPTY)  # how its results are sharded, the compiler decides
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            jax.eval_shape(self._empty),
            make.output_shardings,
        )

    @property
    def device(self) -> jax.Device:
        """The first of the devices that hold the weights."""
        return _devices(self._shapes)[0]

    def _estimated_scratch(self, *models: Decoder | None) -> int:
        return sum(
            most_temporaries(
                self.keys, each.config, itemsize=each.execution.policy.compute.itemsize
            )
            for each in models
            if each is not None
        )

    def memory_needs(self) -> MemoryNeeds:
        """Returns the bytes of one device that everything but pages needs."""
        state = self._state_shapes
        pools = device_bytes(jax.tree.leaves((state.pools, state.draft_pools)))
        return MemoryNeeds(
            weight_bytes=device_bytes(jax.tree.leaves(self._shapes)),
            temporary_bytes=self.scratch.bytes,
            state_bytes=device_bytes(jax.tree.leaves(state)) - pools,
            page_bytes=-(-pools // self._limits.num_pages),
        )

    def shared_limits(self, limits: SchedulerLimits) -> SchedulerLimits:
        """Returns limits of which programs are kept, if they have nearly as many pages; else
        notes these.

        So a little other memory in use, or another host, costs no compilation.
        """
        noted = self._noted_pages.value or 0
        if limits.num_pages * (1 - _PAGES_TOLERANCE) <= noted <= limits.num_pages:
            return dataclasses.replace(limits, num_pages=noted)
        self._noted_pages.note(limits.num_pages)
        return limits

    @property
    def adapters(self) -> dict[str | None, int]:
        """Numbers of the loaded adapters in the bank by name; None, the model alone, is 0."""
        return self._writer.adapters

    def load_adapter(self, name: str, rows: Mapping[str, AdapterRow], number: int) -> None:
        """Writes an adapter into the bank; steps that are under way keep what was there.

        Args:
            rows: the adapter of each projection in the bank, by the weight's path.
            number: where it is written, from 1; no request may use what is there.
        """
        arrays = self._weights.model.arrays
        for path, row in rows.items():
            for part in dataclasses.fields(row):
                key = f"{path.removesuffix('weight')}adapter/{part.name}/value"
                new = getattr(row, part.name).astype(arrays[key].dtype)
                arrays[key] = _with_row(arrays[key], new, number - 1)
        self.adapters[name] = number

    def limit_scratch(self, limit_bytes: int) -> None:
        """Sets what JAX may allocate on a device, which programs' scratch memory has to fit in."""
        needs = self.memory_needs()
        used = needs.fixed_bytes + self._limits.num_pages * needs.page_bytes
        self.scratch.spare_bytes = max(0, limit_bytes - used)

    def require_memory(self) -> None:
        """Checks that the device has free what weights, programs and pages take, if it is limited.

        Raises:
            DeviceMemoryError: it has not, as when another process uses it.
        """
        if self.scratch.spare_bytes is not None:
            require_free(self.device, self.memory_needs(), num_pages=self._limits.num_pages)

    def attach(self, model: Decoder, draft: Decoder | None = None) -> None:
        """Takes weights of the shapes that the runner was made from, and allocates the pools.

        Raises:
            JaxRuntimeError: the device has no memory for the pools, which are there on return.
        """
        self._take(_weights(model, draft))

    def renew(self, parameters: Parameters) -> None:
        """Takes other weights by their paths, as ``attach`` does; no module is made of them."""
        structure, found = self._shapes.model.structure, by_path(parameters)
        arrays = {name: found[_path_of(name)] for name in structure.names}
        self._take(Weights(model=NamedArrays(arrays=arrays, structure=structure), draft=None))

    def _take(self, weights: Weights) -> None:
        found, expected = jax.tree.leaves(_shapes(weights)), jax.tree.leaves(self._shapes)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
        # Structures are equal only if they are one object; compiled programs know that of shapes.
        self._weights = jax.tree.unflatten(
            jax.tree.structure(self._shapes), jax.tree.leaves(weights)
        )
        self._state = jax.block_until_ready(self.programs.get(EMPTY)())

    def release(self) -> None:
        """Drops the weights, the pools and what is known of requests; ``attach`` comes next."""
        self._weights, self._state = self._shapes, self._state_shapes
        self._histories.clear()

    @property
    def keys(self) -> tuple[ProgramKey, ...]:
        """Keys of all programs that a step may need; the first ones serve every generation."""
        return listed_programs(self._limits, verify_length=self._verify_length)

    def warm_up(
        self,
        progress: Callable[[int, int], None] | None = None,
        *,
        keys: Sequence[ProgramKey] | None = None,
    ) -> None:
        """Compiles or loads all programs that steps may need, or those of the given keys.

        Args:
            progress: called with the number of programs that are ready and of all.
            keys: programs to make; by default all.
        """
        self.programs.make(self.keys if keys is None else keys, progress)
        self.programs.num_late, self.programs.is_warm = 0, True

    def begin_warm_up(self) -> None:
        """Starts ``warm_up`` in the background; ``wait_until_serving`` waits for its first part."""
        self.programs.begin(self.keys)

    def wait_until_serving(self, timeout_s: float | None = None) -> bool:
        """Waits for the programs that can run every step; False if the time is over before."""
        done = self.programs.wait(first_programs(self.keys), timeout_s)
        if done:
            self.programs.num_late, self.programs.is_warm = 0, True
        return done

    def dispatch(self, plan: StepPlan, masks: dict[int, np.ndarray]) -> Dispatched:
        """Starts a planned step on the device, and returns before it is done.

        Args:
            masks: allowed-token masks by slot, for rows whose request has a structure.
        """
        self._mover.move(plan)
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
                drawn += self._call(rows, name, length, masks)
        return Dispatched(rows=drawn)

    def read(self, dispatched: Dispatched) -> list[RowSample]:
        """Waits for a dispatched step, and returns the tokens that it sampled."""
        self._mover.collect()
        result = []
        for rows, (array, *scores) in dispatched.rows:
            result += samples_of_rows(rows, np.asarray(array), jax.tree.map(np.asarray, scores))
        return result

    def _call(
        self, rows: list[PlannedRow], name: str, length: int, masks: dict[int, np.ndarray]
    ) -> list[tuple[list[PlannedRow], Any]]:
        """Calls the program for rows of a step; returns the rows of each call and its results."""
        if name == "step" and length > 1 and rows[0].stream.request.scores_prompt:
            name = "score"
        is_chunk, is_decode = (name == "step" and is_long for is_long in (length > 1, length == 1))
        num_rows = self._limits.rows(len(rows))
        asked = max(row.stream.asks for row in rows)
        is_asked = asked >= Asked.SCORE and any(
            row.stream.request.sampling.logprobs is not None for row in rows
        )
        all_of = Asked.SCORE if name == "verify" else Asked.ALL  # which has no program for scores
        wanted = ProgramKey(
            name=name,
            rows=num_rows,
            length=length,
            is_fresh=is_chunk and all(row.start == 0 for row in rows),
            is_full=is_chunk or (name != "score" and asked >= all_of),
            is_scored=is_decode and asked is Asked.SCORE,
            is_greedy=is_decode and asked is Asked.BEST and num_rows >= LEAST_GREEDY,
        )
        key = self.programs.ready(wanted)
        if len(rows) > key.rows:  # as yet only programs of one row are there
            return [each for row in rows for each in self._call([row], name, length, masks)]
        inputs = self._writer.write(
            rows,
            size=key.rows,
            length=key.length,
            sampling=self._sampling_rows([row.stream.request.sampling for row in rows], key.rows),
            masks=masks,
            counted=self._counted(rows) if asked is Asked.ALL else (),
        )
        arguments: list[Any] = [inputs]
        if name == "score":
            targets_BT = np.zeros((key.rows, key.length), np.int32)
            targets_BT[0, : len(rows[0].targets)] = rows[0].targets
            arguments.append(targets_BT)
        given = self.call(key, *arguments)
        given = given if isinstance(given, tuple) else (given,)
        given = given if is_asked else given[:1]
        for each in jax.tree.leaves(given):
            each.copy_to_host_async()
        return [(rows, given)]

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
        before; padding has the last row's, so that their number does not matter.
        """
        padded = (*configs, *[configs[-1]] * (size - len(configs)))
        known = self._sampling.get(size)
        if known is None or known[0] != padded:
            rows = SamplingRows.of(padded, num_biases=MOST_BIASES)
            known = self._sampling[size] = (padded, rows)
        return known[1]

    def mirror(self, send: Callable[[ProgramKey, tuple[Any, ...]], None]) -> None:
        """Sets a function that sends each program call, before it is made, to the mesh's other
        processes, which make it too.
        """
        self._tell = send

    def call(self, key: ProgramKey, *arguments: Any) -> Any:
        """Runs a program, keeps the new device state, and returns the program's other results."""
        if self._tell is not None:
            arguments = jax.tree.map(np.asarray, arguments)
            self._tell(key, arguments)
        program = self.programs.get(key)
        if key in (SAVE, SAVE_STATE):
            return program(self._state, *arguments)
        if key.name in _OF_STATE_ALONE:
            self._state = program(self._state, *arguments)
            return None
        given, self._state = program(self._weights, self._state, *arguments)
        return given

    def lowered(self, key: ProgramKey) -> jax.stages.Lowered:
        """Lowers a program with its shapes, to compile or inspect it."""
        return self.programs.lowered(key)

    def _prepared(self, key: ProgramKey) -> Prepared:
        if key == EMPTY:
            return Prepared(self._empty, (), results_on=self._one_place)
        state = self._state_shapes
        indices = np.zeros(key.rows, np.int32)
        match key.name:
            case "copy":
                function, arguments = moves.copy_pages, (state, indices, indices)
            case "keep":
                function, arguments = moves.copy_states, (state, indices, indices)
            case "save":
                function, arguments = moves.read_pages, (state, indices)
            case "restore":
                pages = moves.moved_shapes(state)
                function, arguments = moves.write_pages, (state, indices, pages)
            case "save_state":
                function, arguments = moves.read_states, (state, indices)
            case "restore_state":
                states = moves.moved_state_shapes(state)
                function, arguments = moves.write_states, (state, indices, states)
            case "mask":
                masks = np.zeros((key.rows, self._mask_words), np.uint32)
                function, arguments = programs.set_masks, (state, indices, masks)
            case "history":
                ids, one = np.zeros(key.length, np.int32), np.int32(0)
                function, arguments = programs.begin_history, (state, one, ids, one, one)
            case _:
                kind = {} if key.name == "score" else {"is_full": key.is_full}
                if key.name == "step":
                    kind |= {"is_fresh": key.is_fresh, "is_scored": key.is_scored}
                    kind |= {"is_greedy": key.is_greedy}
                program = getattr(programs, key.name)
                function = functools.partial(program, config=self._config, **kind)
                rows = [GREEDY] * key.rows
                sampling = jax.eval_shape(lambda: SamplingRows.of(rows, num_biases=MOST_BIASES))
                blank = self._writer.write((), size=key.rows, length=key.length, sampling=sampling)
                arguments = (self._shapes, state, blank)
                if key.name == "score":
                    arguments = (*arguments, np.zeros((key.rows, key.length), np.int32))
        # The state is given up for the next one; what is saved is read only.
        donates = key not in (SAVE, SAVE_STATE)
        donated = tuple(place for place, each in enumerate(arguments) if each is state and donates)
        return Prepared(function, arguments, donated)


@jax.jit
def _with_row(bank: jax.Array, new: jax.Array, place: jax.Array) -> jax.Array:
    """Returns a bank's array [L, S, ...] with one of its S adapters replaced."""
    return bank.at[:, place].set(new)


def _weights(model: Decoder, draft: Decoder | None) -> Weights:
    return Weights(
        model=NamedArrays.of(nnx.split(model)[1]),
        draft=None if draft is None else NamedArrays.of(nnx.split(draft)[1]),
    )


def _path_of(name: str) -> str:
    """The parameter's path of an array that ``NamedArrays`` names; its variable adds ``value``."""
    head, _, tail = f"{name}/".rpartition("/value/")
    return f"{head}/{tail}".rstrip("/")


def _shapes(arrays: Any) -> Any:
    """Shapes, dtypes and shardings of arrays, or of other shapes."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), arrays
    )


def _devices(weights: Weights) -> tuple[jax.Device, ...]:
    sharding = jax.tree.leaves(weights)[0].sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sharding.device_set) if sharding is not None else (jax.local_devices()[0],)


def _empty_state(
    *,
    models: Sequence[tuple[ModelConfig, Execution]],
    drafts_itself: bool,
    limits: SchedulerLimits,
    num_ids: int,
) -> DeviceState:
    """Makes the state of an engine without requests. Call it under jit."""
    (config, execution), hidden_SD = models[0], None
    if drafts_itself:
        models = [*models, (config.mtp_part, execution)]
        shape = (limits.max_running, config.mtp_part.model_dim)
        hidden_SD = execution.place(jnp.zeros(shape, execution.policy.compute), (None, None))
    pools = [
        programs.empty_pools(*each, num_pages=limits.num_pages, page_size=limits.page_size)
        for each in models
    ]
    words, num_slots = -(-num_ids // WORD_BITS), limits.num_state_slots
    return DeviceState(
        pools=pools[0],
        draft_pools=pools[1] if len(pools) > 1 else (),
        hidden_SD=hidden_SD,
        states=programs.empty_states(*models[0], num_slots=num_slots),
        last_S=jnp.zeros(limits.max_running, jnp.int32),
        masks_SW=jnp.zeros((limits.max_running, words), jnp.uint32),
        history=TokenHistory.empty(batch=limits.max_running, num_ids=num_ids),
    )


def limits_that_fit(
    make: Callable[[SchedulerLimits], ModelRunner],
    limits: SchedulerLimits,
    options: EngineOptions,
    *,
    is_loaded: bool,
    limit_bytes: int | None,
) -> SchedulerLimits:
    """Returns the limits with as many pages as fit into a device's memory beside all else.

    Args:
        make: returns the runner of given limits; it need not have weights.
        options: their number of pages is taken if it fits, where it is given.
        is_loaded: the weights are on the device already.
        limit_bytes: bytes that JAX may allocate on a device; None: no memory is limited.

    Raises:
        DeviceMemoryError: one request of the full context does not fit, or not the given pages.
    """
    if limit_bytes is None:
        return limits
    probe = make(dataclasses.replace(limits, num_pages=1 + limits.table_width))
    needs = probe.memory_needs()
    held_bytes = needs.weight_bytes if is_loaded else 0
    is_given = options.num_pages is not None
    fraction = 1.0 if is_given else options.memory_fraction
    budget = processes.on_first(
        lambda: budget_bytes(
            probe.device, limit_bytes=limit_bytes, fraction=fraction, held_bytes=held_bytes
        )
    )
    if is_given:
        require_pages(limits, needs, budget_bytes=budget)
        return limits
    return probe.shared_limits(fitted_limits(limits, needs, budget_bytes=budget))
