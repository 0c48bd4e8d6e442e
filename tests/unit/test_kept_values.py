"""What layers keep by a budget: the graph beside JAX's own recomputation, the search beside trying
everything, and what a run records.
"""

import dataclasses
import functools
import itertools
import random

import chex
import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

from jaxinfra.config import codec
from jaxinfra.config.run import KeptValues, Remat, RunConfig
from jaxinfra.config.validate import validate
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import define_model
from jaxinfra.model.passes import Pass
from jaxinfra.model.recomputation import kept_by, rematerialized
from jaxinfra.parallel.execution import execution_on
from jaxinfra.runtime.devices import REFERENCE_PEAK
from jaxinfra.training.job import make_job
from jaxinfra.training.recompute.block_graph import (
    MATMUL_SHARE,
    MEMORY_SHARE,
    BlockGraph,
    BlockOperation,
    Layers,
    Option,
    best_options,
    cheapest,
    cost_of_keeping,
    peak_bytes,
    trace_repetition,
)
from jaxinfra.training.recompute.optimal import KeptSearch
from tests.sharded.cases import build, gradients_of, llama_like, packed_batch
from tests.unit.test_recompute import small_run

ROWS, LENGTH = 2, 32


@functools.cache
def model():
    return define_model(llama_like(), execution_on())


@functools.cache
def graph():
    return trace_repetition(model(), 0, rows=ROWS, length=LENGTH)


def traced(names):
    """A repetition's gradient, and what is kept of its forward pass, as JAX does both."""
    decoder = model().bind(model().shapes)
    shape = (ROWS, LENGTH, model().config.model_dim)
    ids = jnp.zeros((ROWS, LENGTH), jnp.int32)
    given = Pass(positions_BT=ids, segment_ids_BT=ids)
    run, stacked = decoder.repetition(slice(0, 1), given, ropes=decoder.rope_tables(ids))
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
    step = rematerialized(run, names, in_loop=True)

    def objective(x, parameters):
        (x, _), _ = step((x, None), (None, parameters, None))
        return jnp.sum(x)

    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    gradient = jax.make_jaxpr(jax.grad(objective, argnums=(0, 1)))(x, one)
    pulled = jax.make_jaxpr(lambda *args: jax.vjp(objective, *args)[1])(x, one)
    inputs = set(pulled.jaxpr.invars)
    kept = {out for out in pulled.jaxpr.outvars if out not in inputs}
    return sum(_dots(gradient.jaxpr)), sum(out.aval.size * 4 for out in kept)


def _dots(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name == "dot_general"
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _dots(inner)


HEADS = ("attention.query", "attention.key", "attention.value")
SETS = [
    ("mlp.gate", "attention_out"),
    (*HEADS, "attention_out", "mlp"),
    (*HEADS, "attention_out", "attention.out", "mlp.up", "mlp_norm"),
]


def test_the_graph_says_what_jax_computes_again_and_keeps():
    everything = (*graph().names, *kept_by(Remat.DOTS))
    least_dots, _ = traced(everything)
    assert cost_of_keeping(graph(), frozenset(everything), REFERENCE_PEAK).matmuls == 0
    for names in SETS:
        dots, size = traced(names)
        kept = cost_of_keeping(graph(), frozenset(names), REFERENCE_PEAK)
        assert dots - least_dots == kept.matmuls, names
        # Beside what is kept by name JAX holds tables of rotary embeddings and segments.
        assert 0 <= size - kept.bytes <= 4 * ROWS * LENGTH * 64, names
    assert cost_of_keeping(graph(), frozenset(), REFERENCE_PEAK).bytes == 0


def test_fixed_policies_are_not_better_than_the_options():
    options = best_options(graph(), REFERENCE_PEAK)
    assert options[0].bytes == 0
    assert options[-1].seconds == 0.0
    for remat in (Remat.DOTS, Remat.MLP, Remat.NAMED, Remat.FULL):
        kept = cost_of_keeping(graph(), frozenset(kept_by(remat)), REFERENCE_PEAK)
        beside = [each for each in options if each.bytes <= kept.bytes]
        assert min(each.matmuls for each in beside) <= kept.matmuls


def some_layers(seed: int) -> list[Layers]:
    rng = random.Random(seed)

    def options():
        found = [Option(names=(), bytes=rng.randint(0, 3), seconds=9.0, matmuls=0)]
        for at in range(rng.randint(1, 4)):
            more = found[-1].bytes + rng.randint(1, 9)
            less = found[-1].seconds - rng.uniform(0.1, 2.0)
            found.append(Option(names=(str(at),), bytes=more, seconds=less, matmuls=0))
        return tuple(found)

    return [
        Layers(
            options=options(),
            count=rng.choice([1, 1, 3]),
            fixed_bytes=rng.randint(0, 2),
            gradient_bytes=rng.randint(0, 6),
        )
        for _ in range(4)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_no_choice_is_cheaper_than_the_searchs(seed):
    layers = some_layers(seed)

    def price(chosen):
        return sum(o.seconds * each.count for o, each in zip(chosen, layers, strict=True))

    every = list(itertools.product(*(each.options for each in layers)))
    for room in range(5, 120, 7):  # below BINS: bytes are not rounded
        fitting = [price(chosen) for chosen in every if peak_bytes(layers, chosen) <= room]
        found = cheapest(layers, room=room)
        assert (found is None) == (not fitting)
        if found is not None:
            assert peak_bytes(layers, found) <= room
            assert price(found) == pytest.approx(min(fitting))


def small_graph(seed: int) -> BlockGraph:
    """Nine operations of values before them, five with a name, of which some are read backward."""
    rng = random.Random(seed)
    operations, named = [], set(rng.sample(range(2, 11), 5))
    for value in range(2, 11):  # 0 and 1 are inputs
        operations.append(
            BlockOperation(
                inputs=tuple(rng.sample(range(value), rng.randint(1, 2))),
                outputs=(value,),
                flops=float(rng.choice([0, 1, 5, 20])) * 1e9,
                is_kernel=True,
                name=f"v{value}" if value in named else None,
            )
        )
    return BlockGraph(
        operations=tuple(operations),
        sizes=tuple(rng.randint(1, 9) * 10 for _ in range(11)),
        stored=frozenset(range(11)),
        needed=frozenset(rng.sample(range(2, 11), 4)),
        makers={value: value - 2 for value in range(2, 11)},
    )


def price_of(graph: BlockGraph, names: frozenset[str]) -> tuple[int, float]:
    """Bytes and seconds of keeping values of these names, by what each read value asks for."""
    made: dict[int, bool] = {}  # value to whether it is computed again

    def ask(value: int) -> None:
        if value < 2 or value in made:
            return
        operation = graph.operations[value - 2]
        made[value] = operation.name not in names
        if made[value]:
            for before in operation.inputs:
                ask(before)

    for value in graph.needed:
        ask(value)
    again = [graph.operations[value - 2] for value, is_again in made.items() if is_again]
    touched = {value for each in again for value in (*each.inputs, *each.outputs)}
    flops = sum(each.flops for each in again) / (MATMUL_SHARE * REFERENCE_PEAK.bf16_flops)
    moved = sum(graph.sizes[value] for value in touched)
    seconds = flops + moved / (MEMORY_SHARE * REFERENCE_PEAK.hbm_bytes_per_s)
    return sum(graph.sizes[value] for value, is_again in made.items() if not is_again), seconds


@pytest.mark.parametrize("seed", range(6))
def test_of_all_sets_of_two_blocks_none_is_cheaper_than_what_is_chosen(seed):
    """From a graph to the choice, beside every set of names of every block."""
    graphs = small_graph(2 * seed), small_graph(2 * seed + 1)
    layers = [Layers(options=best_options(each, REFERENCE_PEAK)) for each in graphs]
    prices = [
        {
            price_of(graph, frozenset(names))
            for number in range(6)
            for names in itertools.combinations(graph.names, number)
        }
        for graph in graphs
    ]
    pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in itertools.product(*prices)]
    for room in range(10, 400, 30):  # below BINS: bytes are not rounded
        fitting = [seconds for size, seconds in pairs if size <= room]
        found = cheapest(layers, room=room)
        assert found is not None
        assert peak_bytes(layers, found) <= room
        assert sum(each.seconds for each in found) == pytest.approx(min(fitting))


def alike(count: int) -> tuple[Layers, ...]:
    options = tuple(
        Option(names=names, bytes=100 * number, seconds=1.0 - 0.3 * number, matmuls=0)
        for number, names in enumerate([(), ("a",), ("a", "b"), ("a", "b", "c")])
    )
    return (Layers(options=options, gradient_bytes=50),) * count


@pytest.mark.parametrize("budget", [5_500, 6_000, 6_800, 7_900])
def test_a_search_learns_what_steps_need(budget):
    """Of a compiler whose steps need more than is predicted, the more the more they keep."""
    stacks = [(alike(8), 8)]
    search = KeptSearch(stacks, budget_bytes=budget)

    def need(kept):
        each = [run.names for run in kept for _ in range(run.layers)]
        return 5_000 + 50 * 8 + int(1.2 * sum(100 * len(names) for names in each))

    choice = search.run(need)
    assert need(choice.kept) == choice.need_bytes <= budget
    assert sum(run.layers for run in choice.kept) == 8
    assert choice.need_bytes > budget - 400  # three more values of 100 at most would fit
    assert "8 layers" in choice.describe() or len(choice.kept) > 1
    sizes, seconds = zip(*choice.tradeoff.cheapest, strict=True)
    assert list(sizes) == sorted(sizes)
    assert list(seconds) == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(8 * 0.1)  # all is kept that has a name
    # The choice is the best of the curve that fits.
    fitting = [each for size, each in choice.tradeoff.cheapest if size <= budget]
    assert choice.seconds <= min(fitting) + 0.3


def test_a_budget_below_the_least_is_refused():
    search = KeptSearch([(alike(2), 2)], budget_bytes=2**30)
    with pytest.raises(ConfigError, match=r"needs 2\.00 GiB at least .* 1\.00 GiB; more training"):
        search.run(lambda kept: 2 * 2**30)


def test_layers_that_are_alike_lie_in_order():
    search = KeptSearch([(alike(4), 4)], budget_bytes=1)
    chosen = cheapest(search.layers, room=700)
    assert chosen is not None
    sizes = [each.bytes for each in chosen]
    assert sizes == sorted(sizes)


CHOSEN = (
    KeptValues(layers=1, names=("attention_out",)),
    KeptValues(layers=1, names=("attention.query", "mlp.gate", "mlp")),
)
MISSPELT = (KeptValues(layers=2, names=("mlp.gates",)),)


def test_a_config_records_what_was_chosen():
    config = small_run(remat=Remat.CHOSEN, kept=CHOSEN, unroll=2)
    assert codec.from_dict(RunConfig, codec.to_dict(config)) == config
    validate(config)


@pytest.mark.parametrize(
    ("training", "why"),
    [
        ({"remat": Remat.CHOSEN}, "named where remat=chosen"),
        ({"remat": Remat.DOTS, "kept": CHOSEN}, "named where remat=chosen"),
        ({"remat": Remat.CHOSEN, "kept": CHOSEN[:1]}, "values of 1 layers"),
        ({"remat": Remat.CHOSEN, "kept": CHOSEN, "unroll": 1}, "layers of a loop"),
        ({"remat": Remat.CHOSEN, "kept": MISSPELT}, r"'mlp\.gates', .*mean 'mlp\.gate'"),
    ],
)
def test_what_cannot_be_kept_is_refused(training, why):
    with pytest.raises(ConfigError, match=why):
        make_job(small_run(**training))


def learned(**settings):
    step = build(llama_like(), **settings)
    state, metrics = step.step(step.state(), packed_batch())
    return jax.device_get((metrics.loss, gradients_of(state)))


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [1, 2])
def test_gradients_are_those_of_keeping_everything(unroll):
    kept = CHOSEN if unroll > 1 else (dataclasses.replace(CHOSEN[1], layers=2),)
    plain, chosen = learned(unroll=unroll), learned(unroll=unroll, remat=Remat.CHOSEN, kept=kept)
    chex.assert_trees_all_close(plain, chosen, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [1, 2])
def test_a_job_keeps_what_saves_most_within_its_budget(unroll):
    def need(**training):
        config = small_run(unroll=unroll, remat=Remat.OPTIMAL, **training)
        job = make_job(config)
        return job.config.training, job.choice

    with pytest.raises(ConfigError, match="at least"):
        need(memory_budget_gib=1e-4)
    _, most = need(memory_budget_gib=1.0)
    assert most.seconds == 0.0
    middle = (most.need_bytes + 2_700_000) / 2
    training, choice = need(memory_budget_gib=middle / 2**30)
    assert choice.need_bytes <= middle
    assert choice.seconds > 0.0
    assert training == small_run(unroll=unroll, remat=Remat.CHOSEN, kept=choice.kept).training
