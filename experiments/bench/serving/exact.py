"""Exact numerics on one GPU: which bits agree, and what they cost.

``python -m experiments.bench.serving.exact`` compares kernels row by row, and log-probabilities of
an engine with those of a training program. Then it times a decode step and a training step, fast
and exact, of layers of Llama 3 8B's shapes. It prints JSON lines.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    stacked,
)
from jaxinfra.config.precision import Numerics, PolicyName, PrecisionConfig
from jaxinfra.config.rope import RopeConfig
from jaxinfra.model.cache import PagedCache
from jaxinfra.model.definition import ModelDefinition, define_model
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import COMPILER_OPTIONS, serving_form, serving_parameters
from jaxinfra.numerics.policy import Policy, policy_of, stored_as_computed
from jaxinfra.ops.exact_rows import ordered_logsumexp
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.sampling import SamplingConfig
from jaxinfra.training.preferences import target_values

BF16 = jnp.dtype("bfloat16")
PRODUCTS = {"qkv": (4096, 6144), "out": (4096, 4096), "up": (4096, 28672), "down": (14336, 4096)}
ROWS = (3, 64, 256, 1024)
ROUNDS = 4  # of fast and exact training steps


def tell(**figures: Any) -> None:
    """Prints one JSON line."""
    print(json.dumps(figures), flush=True)


def random(key: int, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    """Returns normal numbers in bf16."""
    return (scale * jax.random.normal(jax.random.key(key), shape, jnp.float32)).astype(BF16)


def different(a: jax.Array, b: jax.Array) -> int:
    """Counts elements whose bits differ."""
    return (
        int(jnp.sum(a.view(jnp.uint16) != b.view(jnp.uint16)))
        if a.dtype == BF16
        else int(jnp.sum(a.view(jnp.uint32) != b.view(jnp.uint32)))
    )


def milliseconds(call: Callable[..., Any], *operands: Any, rounds: int = 20) -> float:
    """Returns the least of three means of the time of a call."""
    jax.block_until_ready(call(*operands))
    best = []
    for _ in range(3):
        start = time.perf_counter()
        results = [call(*operands) for _ in range(rounds)]
        jax.block_until_ready(results[-1])
        best.append((time.perf_counter() - start) / rounds * 1e3)
    return round(min(best), 5)


def products() -> None:
    """Compares rows of products of any number of rows, and times them."""
    ordered = jax.jit(pallas_kernels.ordered_matmul)
    plain = jax.jit(functools.partial(jnp.dot, preferred_element_type=BF16))
    few = jax.jit(pallas_kernels.few_rows_matmul)
    for name, (depth, width) in PRODUCTS.items():
        x, w = random(1, (ROWS[-1], depth)), random(2, (depth, width), depth**-0.5)
        figures: dict[str, Any] = {"product": name}
        if name in ("qkv", "down"):
            whole, library = ordered(x, w), plain(x, w)
            figures["different"] = {m: different(ordered(x[:m], w), whole[:m]) for m in ROWS}
            figures["library"] = {m: different(plain(x[:m], w), library[:m]) for m in ROWS}
        for m in (64, 8192):
            if m == 64 or name in ("up", "down"):
                rows = random(3, (m, depth))
                both = ordered, few if m == 64 else plain
                figures[f"ms_{m}"] = [milliseconds(call, rows, w) for call in both]
        tell(**figures)
    x, table = random(1, (256, 4096)), random(2, (128256, 4096), 0.02)
    logits = jax.jit(
        lambda x: pallas_kernels.ordered_matmul(
            x, table, transposed=True, out_dtype=jnp.dtype("float32")
        )
    )
    plain = jax.jit(lambda x: jnp.einsum("md,vd->mv", x, table, preferred_element_type=jnp.float32))
    whole = logits(x)
    total = jax.jit(ordered_logsumexp)
    sums = total(whole)
    tell(
        product="logits",
        different={m: different(logits(x[:m]), whole[:m]) for m in (3, 64)},
        logsumexp={m: different(total(whole[:m]), sums[:m]) for m in (3, 64)},
        ms_64=[milliseconds(call, x[:64]) for call in (logits, plain)],
    )


def rows() -> None:
    """Compares rows of the norm, and times the logsumexp beside XLA's."""
    x, scale = random(1, (1024, 4096)), jnp.ones(4096, jnp.float32)
    norm = jax.jit(
        lambda x: pallas_kernels.rms_norm(x, scale, epsilon=1e-5, implementation="hopper")
    )
    whole = norm(x)
    tell(norm={m: different(norm(x[:m]), whole[:m]) for m in ROWS[:-1]})
    logits = jax.random.normal(jax.random.key(2), (4096, 32768), jnp.float32)
    sums = [
        jax.jit(functools.partial(pallas_kernels.logsumexp, implementation=each))
        for each in ("hopper", "xla")
    ]
    tell(logsumexp=logits.shape, ms=[milliseconds(each, logits) for each in sums])


def attention() -> None:
    """Compares attention of decode steps and chunks with that of a whole row, and times steps."""
    heads, kv_heads, width, length, size = 32, 8, 128, 1024, 64
    q = random(1, (2, length, heads, width))
    k, v = (random(key, (2, length, kv_heads, width)) for key in (2, 3))
    whole = jax.jit(functools.partial(pallas_kernels.flash_attention, is_causal=True))(q, k, v)
    pools = [x.reshape(-1, size, kv_heads, width) for x in (k, v)]
    tables = jnp.arange(2 * length // size, dtype=jnp.int32).reshape(2, -1)
    ordered = functools.partial(pallas_kernels.paged_attention, is_ordered=True)
    steps, chunks = {}, {}
    for at in (0, 1, 7, 63, 64, 127, 128, 129, 500, 1023):
        got = jax.jit(ordered)(q[:, at : at + 1], *pools, tables, jnp.full(2, at + 1, jnp.int32))
        steps[at] = different(got, whole[:, at : at + 1])
    for first, count in ((0, 64), (64, 128), (37, 256), (700, 3), (129, 16)):
        part = slice(first, first + count)
        got = jax.jit(ordered)(q[:, part], *pools, tables, jnp.full(2, first + count, jnp.int32))
        chunks[f"{first}+{count}"] = different(got, whole[:, part])
    tell(attention_steps=steps, attention_chunks=chunks)
    for context in (512, 2048):
        pages = context // size
        pools = [random(key, (64 * pages, size, kv_heads, width)) for key in (2, 3)]
        tables = jnp.arange(64 * pages, dtype=jnp.int32).reshape(64, pages)
        q, lengths = random(1, (64, 1, heads, width)), jnp.full(64, context, jnp.int32)
        calls = [
            jax.jit(functools.partial(pallas_kernels.paged_attention, is_ordered=each))
            for each in (True, False)
        ]
        times = [milliseconds(call, q, *pools, tables, lengths) for call in calls]
        tell(attention_64_rows=context, ms=times)


def model(num_layers: int, *, dim: int, heads: int, hidden: int, ids: int) -> ModelConfig:
    """Returns a dense decoder with heads of 128 and four query heads to a kv head."""
    mixer = GroupedAttentionConfig(
        num_q_heads=heads, num_kv_heads=heads // 4, head_dim=128, rope=RopeConfig()
    )
    block = BlockConfig(mixer=mixer, feed_forward=MlpConfig(hidden_dim=hidden))
    return ModelConfig(
        vocab_size=ids, max_positions=4096, model_dim=dim, tie_embeddings=False,
        stacks=stacked(block, num_layers=num_layers),
    )  # fmt: skip


def policy(numerics: Numerics) -> Policy:
    """Returns the policy of bf16."""
    return policy_of(PrecisionConfig(policy=PolicyName.BF16, numerics=numerics))


def weights(definition: ModelDefinition) -> Any:
    """Returns random parameters."""

    def make() -> Any:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(definition.arrays)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        made = []
        for key, (path, leaf) in zip(keys, leaves, strict=True):
            mean = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
            values = mean + 0.03 * jax.random.normal(key, leaf.shape, jnp.float32)
            made.append(values.astype(leaf.dtype))
        return jax.tree.unflatten(treedef, made)

    return jax.jit(make)()


def served_form(definition: ModelDefinition, numbers: Policy) -> ModelDefinition:
    """Returns the form of a decode step on a GPU."""
    execution = execution_on(policy=numbers, decode_form=DecodeForm(packed=True))
    return serving_form(definition, execution)


def scores(numerics: Numerics) -> None:
    """Compares an engine's log-probabilities with those of a training program."""
    numbers = stored_as_computed(policy(numerics))
    config = model(4, dim=1024, heads=8, hidden=2048, ids=4096)
    definition = define_model(config, execution_on(policy=numbers))
    tree, form = weights(definition), served_form(definition, numbers)
    options = EngineOptions(
        max_running=8, page_size=64, num_pages=40, max_step_tokens=264, chunk_sizes=(64, 256),
        max_piece_rows=2, max_context=512,
    )  # fmt: skip
    engine = Engine(form.bind(serving_parameters(form, tree)), options=options)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(1, 4096, n).tolist()) for n in (5, 300, 64, 17, 129, 1, 200)]
    requests = [
        GenerationRequest(
            prompt_ids=prompt, max_new_tokens=40, seed=1, choice=number,
            sampling=SamplingConfig(temperature=1.0, logprobs=0),
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    came = [*engine.run(requests)]
    ids_2BT = np.zeros((2, len(prompts), 384), np.int32)
    for row, (prompt, parts) in enumerate(zip(prompts, came, strict=True)):
        assert parts[-1].error is None, parts[-1].error
        text = [*prompt, *(token for part in parts for token in part.tokens)]
        ids_2BT[:, row, : len(text) - 1] = text[:-1], text[1:]
    each_BT = np.asarray(_gradient(definition)(tree, *ids_2BT)[0][1])
    counted, wrong, most = 0, 0, 0.0
    for row, (prompt, parts) in enumerate(zip(prompts, came, strict=True)):
        given = np.array([s.logprob for part in parts for s in part.scores], np.float32)
        mine = each_BT[row, len(prompt) - 1 :][: given.size]
        counted, wrong = counted + given.size, wrong + int((given != mine).sum())
        most = max(most, float(np.abs(given - mine).max()))
    tell(scores=numerics.value, tokens=counted, different=wrong, largest=most)


def _gradient(definition: ModelDefinition) -> Callable[..., Any]:
    """Returns a training program: log-probabilities of targets, and gradients of their sum."""

    def loss(tree: Any, ids: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = definition.bind(tree).hidden(ids)
        each = target_values(definition, tree, hidden, targets)
        return each.sum(), each

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def decode(numerics: Numerics, *, num_layers: int) -> None:
    """Times a decode step of 64 rows, layers unrolled."""
    config = model(num_layers, dim=4096, heads=32, hidden=14336, ids=32768)
    rows_B, context, size = 64, 1024, 64
    numbers = stored_as_computed(policy(numerics))
    definition = define_model(config, execution_on(policy=numbers))
    form = served_form(definition, numbers)
    tree, pages = serving_parameters(form, weights(definition)), context // size
    tables = jnp.arange(rows_B * pages, dtype=jnp.int32).reshape(rows_B, pages)
    at = jnp.full((rows_B, 1), context - 1, jnp.int32)

    def step(tree: Any, pools: Any, ids: jax.Array) -> tuple[jax.Array, Any]:
        decoder = form.bind(tree)
        out = decoder.run(ids, positions=at, cache=(PagedCache(arrays=pools, tables_BM=tables),))
        chosen = jnp.argmax(decoder.logits(out.x), axis=-1).astype(jnp.int32)
        return chosen, out.cache[0].arrays

    compiled = jax.jit(step, donate_argnums=1, compiler_options=COMPILER_OPTIONS)
    shape = (num_layers, rows_B * pages, size, 8, 128)
    state: list[Any] = [
        jnp.ones((rows_B, 1), jnp.int32),
        {name: jnp.zeros(shape, BF16) for name in "kv"},
    ]

    def one() -> jax.Array:
        state[:] = compiled(tree, state[1], state[0])
        return state[0]

    tell(decode=numerics.value, layers=num_layers, ms=milliseconds(one))


def training(*, num_layers: int) -> None:
    """Times log-probabilities and gradients of 8 rows of 1,024 tokens, fast and exact."""
    config = model(num_layers, dim=4096, heads=32, hidden=14336, ids=32768)
    made = {each: define_model(config, execution_on(policy=policy(each))) for each in Numerics}
    tree = weights(made[Numerics.EXACT])
    ids = jnp.asarray(np.random.default_rng(0).integers(1, 32768, (8, 1024)), jnp.int32)
    steps = {each: _gradient(definition) for each, definition in made.items()}
    rounds = [
        {each: milliseconds(step, tree, ids, ids, rounds=5) for each, step in steps.items()}
        for _ in range(ROUNDS)
    ]
    ratio = float(np.median([ms[Numerics.EXACT] / ms[Numerics.FAST] for ms in rounds]))
    tell(training="exact / fast", layers=num_layers, ratio=ratio, ms=rounds)


def main() -> None:
    """Runs the parts that are named; by default all."""
    parts: dict[str, Callable[[], None]] = {
        "products": products, "rows": rows, "attention": attention,
    }  # fmt: skip
    for each in Numerics:
        parts |= {
            f"scores-{each}": functools.partial(scores, each),
            f"decode-{each}": functools.partial(decode, each, num_layers=8),
        }
    parts["training"] = functools.partial(training, num_layers=2)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default: all")
    for name in parser.parse_args().parts or parts:
        start = time.perf_counter()
        try:
            parts[name]()
        except Exception as error:  # one part's failure leaves the others
            tell(part=name, failed=f"{type(error).__name__}: {str(error)[:1500]}")
        tell(part=name, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main()
