"""Prefill and decode of a model with random weights, timed for the roofline."""

import contextlib
import dataclasses
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from experiments.bench.kernels import roofline_work as roofline
from experiments.bench.kernels.roofline_work import Point, Work
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.presets import MODELS
from jaxinfra.model.cache import after_pass
from jaxinfra.model.decoder import KVCache
from jaxinfra.model.definition import define_model
from jaxinfra.numerics.policy import POLICIES, held_as_computed
from jaxinfra.parallel.execution import execution_on
from jaxinfra.planning.devices import Device
from jaxinfra.planning.model import PlannedModel, find_model
from jaxinfra.serving.sampling import GREEDY, SamplingNeeds, SamplingRows
from jaxinfra.serving.steps import DecodeState, StepConfig, decode, decode_rows, prefill
from pallas_kernels.common import timing

DECODED = 8  # tokens by which two measurements of decoding differ


def random(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


class Clock:
    """Times calls; or only compiles them, so that all can be compiled side by side first."""

    def __init__(self) -> None:
        self._compiles_only = False

    @contextlib.contextmanager
    def compiling_only(self) -> Iterator[None]:
        """Within, nothing runs and times are infinite. Programs are kept in a folder."""
        settings = {
            "jax_compilation_cache_dir": tempfile.mkdtemp(),
            "jax_persistent_cache_min_compile_time_secs": 0,
        }
        for name, value in settings.items():
            jax.config.update(name, value)
        self._compiles_only = True
        try:
            yield
        finally:
            self._compiles_only = False

    def seconds(self, f: Callable, *args: Any) -> float:
        """Of one call's kernels."""
        if self._compiles_only:
            return self._compile(f, *args)
        return timing.measure({"it": (f, args)}, rounds=2, iterations=4)["it"].median_ms / 1e3

    def wall(self, f: Callable, *args: Any) -> float:
        """Of a call on the host's clock, queued behind others of its kind."""
        if self._compiles_only:
            return self._compile(f, *args)
        jax.block_until_ready(f(*args))
        count = 5
        start = time.perf_counter()
        jax.block_until_ready([f(*args) for _ in range(count)])
        return (time.perf_counter() - start) / count

    def wall_of_decode(self, weights, state, tokens, config: StepConfig) -> float:
        """Of a token as the server would call it: each step takes the last one's state."""
        if self._compiles_only:
            decode.lower(weights, state, tokens, config=config).compile()
            return math.inf
        tokens, state = decode(weights, state, tokens, config=config)
        jax.block_until_ready(tokens)
        count = 6
        start = time.perf_counter()
        for _ in range(count):
            tokens, state = decode(weights, state, tokens, config=config)
        jax.block_until_ready(tokens)
        return (time.perf_counter() - start) / count

    @staticmethod
    def _compile(f: Callable, *args: Any) -> float:
        jitted: Any = f if hasattr(f, "lower") else jax.jit(f)
        jitted.lower(*args).compile()
        return math.inf


CLOCK = Clock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A model with random bf16 weights."""

    weights: nnx.State
    step: StepConfig
    planned: PlannedModel
    config: ModelConfig

    def empty_cache(self, *, batch: int, num_slots: int) -> KVCache:
        """Of zeros."""
        decoder = nnx.merge(self.step.graphdef, self.weights)
        return decoder.empty_cache(batch=batch, num_slots=num_slots)

    def rows(self, batch: int, length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Prompts, their lengths, and a key each."""
        ids = jax.random.randint(jax.random.key(2), (batch, length), 0, self.config.vocab_size)
        keys = jax.random.split(jax.random.key(1), batch)
        return ids, jnp.full((batch,), length, jnp.int32), keys


@functools.lru_cache(maxsize=1)
def served(preset: str) -> Served:
    policy = POLICIES[PolicyName.BF16]
    config = MODELS[preset]()
    definition = define_model(config, execution_on(policy=held_as_computed(policy)))
    drawn = jax.jit(definition.initialize)(jax.random.key(0))
    graphdef, weights = nnx.split(definition.bind(drawn))
    step = StepConfig(graphdef=graphdef, num_ids=config.vocab_size, needs=SamplingNeeds())
    return Served(weights=weights, step=step, planned=find_model(preset), config=config)


def phases(
    device: Device,
    preset: str,
    *,
    prompts: Sequence[tuple[int, int]],
    decodes: Sequence[tuple[int, int]],
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Prefills and decodes of a model, by name; batch and length each."""
    for batch, length in prompts:
        name = f"{preset} prefill {batch} x {length}"
        yield name, functools.partial(prefilled, name, preset, batch, length, device)
    for batch, context in decodes:
        name = f"{preset} decode {batch} after {context}"
        yield name, functools.partial(decoded, name, preset, batch, context, device)


def prefilled(name: str, preset: str, batch: int, length: int, device: Device) -> dict[str, Any]:
    model = served(preset)
    args = (model.weights, *model.rows(batch, length), SamplingRows.of([GREEDY] * batch))
    f = functools.partial(prefill, config=model.step, num_slots=length)
    work = roofline.prefill_work(model.planned, device, batch=batch, length=length)
    return timed(name, "prefill", work, CLOCK.seconds(f, *args), CLOCK.wall(f, *args))


def decoded(name: str, preset: str, batch: int, context: int, device: Device) -> dict[str, Any]:
    model = served(preset)
    ids, lengths, keys = model.rows(batch, context)
    zeros = model.empty_cache(batch=batch, num_slots=context + 2 * DECODED)
    # Numbers, as a prefill would leave them: zeros take less power.
    cache = tuple(
        after_pass(each, {n: random(3, *x.shape, dtype=x.dtype) for n, x in each.arrays.items()})
        for each in zeros
    )
    del zeros
    sampling = SamplingRows.of([GREEDY] * batch)
    state = DecodeState(cache=cache, positions_B=lengths, keys_B=keys, sampling=sampling)
    tokens = ids[:, 0]
    several = jax.jit(functools.partial(decode_several, config=model.step))
    # The program copies the cache once, which a server does not: the difference has no copy.
    longer, shorter = (
        CLOCK.seconds(several, model.weights, state, tokens, jnp.int32(count))
        for count in (2 * DECODED, DECODED)
    )
    work = roofline.decode_work(model.planned, device, batch=batch, context=context)
    host = CLOCK.wall_of_decode(model.weights, state, tokens, model.step)
    return timed(name, "decode", work, (longer - shorter) / DECODED, host)


def timed(name: str, group: str, work: Work, taken: float, wall_s: float) -> dict[str, Any]:
    return {
        "point": Point(name=name, group=group, work=work, seconds=taken),
        "wall_ms": 1e3 * wall_s,
    }


def decode_several(weights, state, tokens, count, *, config: StepConfig) -> jax.Array:
    """Tokens after ``count`` steps in one program."""

    def one(_, carry):
        tokens, state = carry
        return decode_rows(weights, state, tokens, config=config)

    return lax.fori_loop(0, count, one, (tokens, state))[0]
