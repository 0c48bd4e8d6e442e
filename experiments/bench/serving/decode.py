"""A whole decode step with sampling on the host's clock, in 16 and in fewer bits.

python -m experiments.bench.serving.decode --out experiments/results/decode-h200.json
python -m experiments.bench.serving.decode --presets llama3_8b --only "llama3_8b 1 x" \\
    --formats bf16 int4 fp8 --out experiments/results/quantized-decode-h200.json
python -m experiments.bench.serving.decode --tensor 1 2 --presets llama32_1b \\
    --only "llama32_1b 1 x" --out experiments/results/decode-h200-x2.json # over one GPU and two

Random weights in the serving form; embeddings and the projection onto the vocabulary stay in
bfloat16. The state is donated and stays on the device, and each step takes the tokens of the one
before, as a server calls it. The time "ms" is the median of rounds in which formats and numbers of
GPUs alternate. The bound "floor_ms" reads weights and cached keys and values once, at the rate of a
copy in the same process on each GPU. The "prefill" rows are whole prompts into an empty cache;
their FLOPs are those of weights, of attention to earlier tokens only, and of one row of logits
each.
"""

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import jax.stages
from flax import nnx

from experiments.bench.harness import copied, options, table_of
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import GroupedAttentionConfig, ModelConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.presets import MODELS
from jaxinfra.hf.config import from_hf_config
from jaxinfra.model.cache import after_pass, recurrent_bytes
from jaxinfra.model.decoder import KVCache
from jaxinfra.model.definition import ModelDefinition, Parameters, by_path, define_model, nest
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import COMPILER_OPTIONS, serving_form, serving_parameters
from jaxinfra.numerics.policy import POLICIES, stored_as_computed
from jaxinfra.ops.quantized import Activations, WeightCode, WeightFormat, round_weight
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.engine.programs import NamedArrays
from jaxinfra.serving.load import serving_placement
from jaxinfra.serving.sampling import GREEDY, SamplingConfig, SamplingNeeds, SamplingRows, sample


def qwen35_9b() -> ModelConfig:
    """Qwen3.5's shapes: three layers with a state to one with attention, 9 billion parameters."""
    return from_hf_config(
        {
            "model_type": "qwen3_5_text",
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "hidden_act": "silu",
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
            },
            "tie_word_embeddings": False,
        }
    )


PRESETS = MODELS | {"qwen35_9b": qwen35_9b}
SHAPES = {
    "llama3_8b": ((1, 2048), (16, 2048), (64, 1024), (64, 2048), (128, 1024)),
    "llama32_1b": ((1, 2048), (64, 2048)),
    "qwen35_9b": ((1, 2048), (64, 2048)),
    "gpt_oss_20b": ((1, 2048), (64, 2048)),
    "tiny": ((2, 32),),
}
PREFILLS = dict.fromkeys(SHAPES, ())
PREFILLS |= {"llama3_8b": ((8, 2048),), "llama32_1b": ((1, 128),)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServedFormat:
    """Formats of a served model's weights and cache."""

    weights: WeightFormat | None = None
    cache: CacheFormat = CacheFormat.PLAIN


_FP8 = WeightFormat(code=WeightCode.E4M3, activations=Activations.E4M3)
FORMATS = {
    "bf16": ServedFormat(),
    "int4 g128": ServedFormat(weights=WeightFormat(code=WeightCode.INT4, group_rows=128)),
    "int8": ServedFormat(weights=WeightFormat(code=WeightCode.INT8)),
    "fp8": ServedFormat(weights=WeightFormat(code=WeightCode.E4M3)),
    "w8a8 fp8": ServedFormat(weights=_FP8),
    "w8a8 fp8, fp8 cache": ServedFormat(weights=_FP8, cache=CacheFormat.FP8),
    "w8a8 int8": ServedFormat(
        weights=WeightFormat(code=WeightCode.INT8, activations=Activations.INT8)
    ),
    "bf16 states": ServedFormat(cache=CacheFormat.BF16_STATES),
}
STEPS, ROUNDS, SLACK = 40, 3, 256
_POLICY = stored_as_computed(POLICIES[PolicyName.BF16])


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Static arguments that a step is compiled for, besides shapes."""

    graphdef: nnx.GraphDef
    num_ids: int
    needs: SamplingNeeds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """Contiguous rows in the midst of generation."""

    cache: KVCache
    positions_B: jax.Array  # where each row's next token goes
    keys_B: jax.Array
    sampling: SamplingRows


def decode_rows(
    parameters: nnx.State, state: DecodeState, tokens_B: jax.Array, *, config: StepConfig
) -> tuple[jax.Array, DecodeState]:
    """A step: every row takes in a token, and draws the next one."""
    model = nnx.merge(config.graphdef, parameters)
    positions_B1 = state.positions_B[:, None]
    out = model.run(tokens_B[:, None], positions=positions_B1, cache=state.cache)
    state = dataclasses.replace(state, cache=out.cache, positions_B=state.positions_B + 1)
    return _drawn(model, out.x, state, config), state


@functools.partial(
    jax.jit, static_argnames=("config", "num_slots"), compiler_options=COMPILER_OPTIONS
)
def prefill(
    parameters: nnx.State,
    ids_BT: jax.Array,
    lengths_B: jax.Array,
    keys_B: jax.Array,
    sampling: SamplingRows,
    *,
    config: StepConfig,
    num_slots: int,
) -> tuple[jax.Array, DecodeState]:
    """Whole prompts of one length into an empty cache, and the token after each."""
    model = nnx.merge(config.graphdef, parameters)
    cache = model.empty_cache(batch=len(ids_BT), num_slots=num_slots)
    out = model.run(ids_BT, cache=cache)
    state = DecodeState(cache=out.cache, positions_B=lengths_B, keys_B=keys_B, sampling=sampling)
    return _drawn(model, out.x[:, -1:], state, config), state


def _drawn(model: Any, x_B1D: jax.Array, state: DecodeState, config: StepConfig) -> jax.Array:
    logits_BV = model.logits(x_B1D)[:, 0, : config.num_ids]
    keys_B = jax.vmap(jax.random.fold_in)(state.keys_B, state.positions_B)
    return sample(logits_BV, keys_B, rows=state.sampling, needs=config.needs).ids_B


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A model with random weights in the serving form."""

    definition: ModelDefinition
    weights: nnx.State
    graphdef: nnx.GraphDef

    @functools.cached_property
    def arrays(self) -> NamedArrays:
        """The weights as the engine passes them: Python would walk through a state."""
        return NamedArrays.of(self.weights)

    def config(self, sampling: SamplingConfig) -> StepConfig:
        """The static part of a step."""
        return StepConfig(
            graphdef=self.graphdef,
            num_ids=self.definition.config.vocab_size,
            needs=SamplingNeeds.of([sampling]),
        )

    def state(self, batch: int, context: int, sampling: SamplingConfig) -> DecodeState:
        """Rows in the midst of generation; numbers, as zeros take less power."""
        decoder = nnx.merge(self.graphdef, self.weights)

        def random(shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return jax.random.normal(jax.random.key(3), shape, jnp.bfloat16).astype(dtype)

        def caches() -> tuple:
            empty = decoder.empty_cache(batch=batch, num_slots=context + SLACK)
            return tuple(
                after_pass(each, {n: random(x.shape, x.dtype) for n, x in each.arrays.items()})
                for each in empty
            )

        return DecodeState(
            cache=jax.jit(caches)(),
            positions_B=jnp.full((batch,), context, jnp.int32),
            keys_B=jax.random.split(jax.random.key(1), batch),
            sampling=SamplingRows.of([sampling] * batch),
        )


@functools.partial(jax.jit, static_argnames=("form", "contracted"))
def _rounded(weight: jax.Array, form: WeightFormat, contracted: int) -> Any:
    """A stacked weight, layer by layer, so that one layer at a time is in fp32."""
    round_one = functools.partial(
        round_weight, form=form, num_inputs=contracted, scale_dtype=jnp.dtype(jnp.bfloat16)
    )
    return jax.lax.map(round_one, weight)


def in_format(
    definition: ModelDefinition, drawn: Parameters, form: WeightFormat | None
) -> Parameters:
    """The parameters with every projection in a format."""
    if form is None:
        return drawn
    rows = {row.path: row.contracted for row in definition.table()}
    leaves: dict[tuple[Any, ...], Any] = {}
    for path, leaf in by_path(drawn).items():
        keys = tuple(int(key) if key.isdigit() else key for key in path.split("/"))
        contracted = rows.get(path, 0)
        leaves[keys] = _rounded(leaf, form, contracted) if contracted else leaf
    return nest(leaves)


def drawn_parameters(
    preset: str, *, tensor: int = 1, num_layers: int | None = None
) -> tuple[ModelDefinition, Parameters]:
    """The model as in training, or its first layers, with random weights in bfloat16."""
    config = PRESETS[preset]()
    if num_layers is not None:
        config = config.with_layers(num_layers)
    placement = serving_placement(config, MeshConfig(tensor=tensor)) if tensor > 1 else None
    definition = define_model(config, execution_on(placement, policy=_POLICY))
    where = None if placement is None else placement.parameters(definition)
    return definition, jax.jit(definition.initialize, out_shardings=where)(jax.random.key(0))


def served(
    preset: str,
    form: ServedFormat = FORMATS["bf16"],
    *,
    tensor: int = 1,
    drawn: tuple[ModelDefinition, Parameters] | None = None,
) -> Form:
    """The model in its serving form, sharded over tensor devices.

    Args:
        drawn: ``drawn_parameters`` of the same model, for several forms of it.
    """
    definition, parameters = drawn or drawn_parameters(preset, tensor=tensor)
    config = definition.config
    placement = serving_placement(config, MeshConfig(tensor=tensor)) if tensor > 1 else None
    execution = execution_on(
        placement,
        policy=_POLICY,
        cache_format=form.cache,
        decode_form=DecodeForm(packed=True),
    )
    unrolled = serving_form(definition, execution)
    packed = serving_parameters(unrolled, in_format(definition, parameters, form.weights))
    graphdef, state = nnx.split(unrolled.bind(packed))
    return Form(definition=unrolled, weights=state, graphdef=graphdef)


def floor_bytes(form: Form, batch: int, context: int) -> int:
    """Weights that a token is multiplied with, and the cache, read once; states also written.

    Of experts, as many as the tokens are routed to at the most.
    """
    read = {x.path: min(1, batch * x.active) for x in form.definition.table() if x.matmul}
    leaves = nnx.to_flat_state(form.weights)
    weights = sum(
        leaf.get_value().nbytes * read.get("/".join(map(str, path)), 0) for path, leaf in leaves
    )
    config = form.definition.config
    elements = sum(
        block.mixer.cache.elements * repeats * min(context, block.mixer.window or context)
        for block, repeats in zip(config.blocks, config.repeats, strict=True)
    )
    execution = form.definition.execution
    bits = execution.cache_format.bits or 8 * execution.policy.compute.itemsize
    states = 2 * recurrent_bytes(config, accum=execution.state_dtype.itemsize)
    return round(weights) + batch * (elements * bits // 8 + states)


def prefill_flops(form: Form, batch: int, length: int) -> float:
    """Operations of whole prompts."""
    config = form.definition.config
    table = form.definition.table()
    weights = sum(each.size * each.active for each in table if each.matmul)
    vocabulary = config.vocab_size * config.model_dim
    total = 2.0 * batch * (length * (weights - vocabulary) + vocabulary)
    for block, repeats in zip(config.blocks, config.repeats, strict=True):
        if isinstance(block.mixer, GroupedAttentionConfig):
            width = block.mixer.num_q_heads * block.mixer.head_dim
            total += 2.0 * batch * repeats * width * length**2
    return total


def step_of(form: Form, batch: int, context: int) -> jax.stages.Compiled:
    """The compiled greedy step."""
    state = jax.eval_shape(functools.partial(form.state, batch, context, GREEDY))
    config = form.config(GREEDY)

    def step(weights: NamedArrays, state: DecodeState, tokens: jax.Array):
        return decode_rows(weights.state, state, tokens, config=config)

    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
    lowered = jax.jit(step, donate_argnums=1).lower(form.arrays, state, tokens)
    return lowered.compile(compiler_options=COMPILER_OPTIONS)


def timed(step: jax.stages.Compiled, form: Form, batch: int, context: int) -> list[float]:
    """Milliseconds of a step by the host's clock, a few times."""
    state = form.state(batch, context, GREEDY)
    tokens, state = step(form.arrays, state, jnp.arange(batch, dtype=jnp.int32))
    taken = []
    for _ in range(ROUNDS):
        jax.block_until_ready(tokens)
        start = time.perf_counter()
        for _ in range(STEPS):
            tokens, state = step(form.arrays, state, tokens)
        jax.block_until_ready(tokens)
        taken.append(1e3 * (time.perf_counter() - start) / STEPS)
    return taken


def prefilled(form: Form, batch: int, length: int) -> dict[str, Any]:
    """Time and rate of whole prompts into an empty cache, several calls in a row."""
    ids = form.definition.config.vocab_size
    arguments = (
        form.weights,
        jax.random.randint(jax.random.key(5), (batch, length), 0, ids, jnp.int32),
        jnp.full((batch,), length, jnp.int32),
        jax.random.split(jax.random.key(1), batch),
        SamplingRows.of([GREEDY] * batch),
    )
    program = prefill.lower(*arguments, config=form.config(GREEDY), num_slots=length).compile()
    jax.block_until_ready(program(*arguments))
    calls, taken = (4 if batch * length > 1024 else 40), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([program(*arguments)[0] for _ in range(calls)])
        taken.append((time.perf_counter() - start) / calls)
    seconds = statistics.median(taken)
    return {"ms": 1e3 * seconds, "tflop_s": prefill_flops(form, batch, length) / seconds / 1e12}


def main() -> None:
    parser = options(__doc__, budget=300.0)
    parser.add_argument("--presets", nargs="+", default=["llama3_8b", "llama32_1b"])
    parser.add_argument("--formats", nargs="+", default=["bf16"], choices=[*FORMATS])
    parser.add_argument(
        "--tensor", nargs="+", type=int, default=[1], help="numbers of devices that share a layer"
    )
    args = parser.parse_args()
    table = table_of(args)
    rate = 1e9 * table.add("copy", lambda: {"gb_s": copied() / 1e9}).get("gb_s", float("nan"))
    for preset in args.presets:
        forms, num_devices = {}, {}
        for tensor in args.tensor:
            drawn = drawn_parameters(preset, tensor=tensor)
            for name in args.formats:
                label = name if tensor == 1 else f"{name}, tensor={tensor}"
                forms[label] = served(preset, FORMATS[name], tensor=tensor, drawn=drawn)
                num_devices[label] = tensor
            del drawn
        shapes = [
            shape
            for shape in SHAPES[preset]
            if f"{preset} {shape[0]} x {shape[1]}".startswith(tuple(args.only))
        ]
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            steps = {
                (name, shape): pool.submit(step_of, form, *shape)
                for name, form in forms.items()
                for shape in shapes
            }
        for shape in shapes:
            times: dict[str, list[float]] = {name: [] for name in forms}
            for _ in range(ROUNDS):
                for name, form in forms.items():
                    times[name] += timed(steps[name, shape].result(), form, *shape)
            medians = {name: statistics.median(each) for name, each in times.items()}
            for name, form in forms.items():
                row = {
                    "ms": medians[name],
                    "of_bf16": medians["bf16"] / medians[name] if "bf16" in medians else None,
                    "floor_ms": 1e3 * floor_bytes(form, *shape) / rate / num_devices[name],
                }
                table.add(f"{preset} {shape[0]} x {shape[1]}, {name}", lambda row=row: row)
        for batch, length in PREFILLS[preset]:
            name = f"{preset} prefill {batch} x {length}"
            if name.startswith(tuple(args.only)):
                row = functools.partial(prefilled, forms[args.formats[0]], batch, length)
                table.add(name, row)
        del forms, steps


if __name__ == "__main__":
    main()
