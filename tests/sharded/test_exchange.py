"""The exchange of tokens between devices that share experts: what it gives, counts and sends."""

import collections
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.exchange import ExchangeConfig, ExchangeForm, ExchangeImplementation
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.routing import RoutingConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hlo.collective_bytes import sent_bytes
from jaxinfra.hlo.program import collectives
from jaxinfra.model.execution import within_device
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.experts import ExpertWeights
from jaxinfra.parallel import exchange as subject
from jaxinfra.parallel.exchange import (
    BufferSizes,
    RowTransfer,
    buffer_sizes,
    chosen_probability,
    exchanged_bytes,
)
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement
from tests.sharded.cases import COMPILER_OPTIONS

CONFIG = ExpertsConfig(num_experts=8, top_k=3, hidden_dim=6)
N, D, B, T, E, K = 4, 10, 8, 6, CONFIG.num_experts, CONFIG.top_k
RECIPE = POLICIES[PolicyName.FP32].recipe(Site.EXPERTS)
PER_EXPERT, PER_DEVICE = ExchangeForm
FORMS = list(ExchangeForm)
EPSILON = float(np.finfo(np.float32).eps)


def placement(num_devices: int) -> Placement:
    mesh = MeshConfig(fsdp=num_devices, expert=num_devices)
    return Placement(
        mesh=make_mesh(mesh, devices=jax.devices()[:num_devices]),
        rules=state_rules(ShardingConfig(), mesh),
    )


@functools.cache
def drawn():
    """x, experts, weights of the choice and of the layer; the first experts are chosen most."""
    rng = np.random.default_rng(0)
    popularity = np.geomspace(1.0, 0.01, E)
    score = rng.gumbel(size=(B, T, E)) + np.log(popularity)
    expert_BTK = np.argsort(-score, axis=-1)[..., :K].astype(np.int32)
    expert_BTK[0, :2] = E  # padding

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    inward, outward = (E, D, CONFIG.hidden_dim), (E, CONFIG.hidden_dim, D)
    experts = ExpertWeights(
        gate_EDF=normal(*inward), up_EDF=normal(*inward), down_EFD=normal(*outward)
    )
    weight_BTK = jnp.where(expert_BTK < E, normal(B, T, K), 0.0)
    return normal(B, T, D), jnp.asarray(expert_BTK), weight_BTK, experts


def exchanging(exchange: ExchangeConfig, num_devices: int):
    port = subject.ShardedExchange(placement=placement(num_devices), config=exchange)
    return functools.partial(port, config=CONFIG, recipe=RECIPE)


@functools.cache
def compiled(exchange: ExchangeConfig, num_devices: int):
    run = exchanging(exchange, num_devices)
    return jax.jit(run).lower(*drawn()).compile(COMPILER_OPTIONS)


@functools.cache
def alone() -> np.ndarray:
    run = functools.partial(within_device, config=CONFIG, recipe=RECIPE)
    return np.asarray(jax.jit(run, compiler_options=COMPILER_OPTIONS)(*drawn())[0])


def near(got, want) -> bool:
    """Sums of 10 and 6 products, an activation and a sum of three, on the scale of the largest."""
    return np.max(np.abs(got - want)) <= 32 * EPSILON * np.max(np.abs(want))


def bounded(form: ExchangeForm, *, num_devices: int = N, node_size: int | None = None):
    """An exchange that has less room than the loads ask for, and that room."""
    exchange = ExchangeConfig(form=form, room_factor=1.5, node_size=node_size)
    shared = {"num_devices": num_devices, "experts": CONFIG, "exchange": exchange}
    return exchange, buffer_sizes(B * T // num_devices, **shared)


def check_bytes(program: jax.stages.Compiled, room: BufferSizes) -> None:
    """Of the two all-to-alls of rows, and of what says which experts they are for; in two levels of
    each, and those that cross nodes go between devices of one number in their nodes.
    """
    found = [
        each
        for each in collectives(program)
        if each.kind == "all-to-all" and "transpose(" not in each.scope
    ]
    for level in room.levels:
        across = level is not room.levels[-1]
        expected = exchanged_bytes(level, model_dim=D, itemsize=4, top_k=K)
        calls = [each for each in found if ("exchange/nodes" in each.scope) == across]
        stride = room.levels[-1].members if across else 1
        assert all(each.group == tuple(range(0, stride * level.members, stride)) for each in calls)
        rows = [each for each in calls if D in each.shape]
        assert len(rows) == 2
        sent = functools.partial(sent_bytes, "all-to-all", num_devices=level.members)
        assert sum(each.sent_bytes for each in rows) == sent(expected["rows"])
        others = sum(each.sent_bytes for each in calls if D not in each.shape)
        assert others == sent(expected["experts"] + expected["weights"])


@pytest.mark.slow_cases("per_device")
@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_of_the_formula(form):
    exchange, room = bounded(form)
    assert len(room.levels) == 1
    check_bytes(compiled(exchange, N), room)


def test_a_token_travels_once_to_a_device_and_once_to_a_node():
    """On average N (1 - C(E - e, K) / C(E, K)) devices: fewer rows than choices. Of 4 nodes of 2, a
    token of even loads crosses to 4 p(4) instead of to 8 p(8) devices.
    """
    even = functools.partial(buffer_sizes, 56, num_devices=8, experts=CONFIG)
    one = {form: even(exchange=ExchangeConfig(form=form, room_factor=1.0)) for form in FORMS}
    assert one[PER_EXPERT].levels == ((8, 56 * K // 8, PER_EXPERT),)
    assert one[PER_DEVICE].levels == ((8, 56 * K // 8, PER_DEVICE),)  # one expert on a device
    two = even(exchange=ExchangeConfig(room_factor=1.0, node_size=2))
    to_a_node = 1 - math.comb(6, K) / math.comb(8, K)
    assert two.levels == ((4, math.ceil(56 * to_a_node), PER_DEVICE), (2, 4 * 21, PER_DEVICE))
    wide = even(exchange=ExchangeConfig(node_size=2))
    assert wide.levels == ((4, 56, PER_DEVICE), (2, 4 * 56, PER_DEVICE))


GROUPED = [(1, 1, 3), (2, 1, 3), (4, 2, 3), (4, 2, 4), (4, 3, 2), (8, 4, 2), (8, 3, 3)]


@pytest.mark.parametrize(("num_groups", "top_groups", "top_k"), GROUPED)
def test_how_often_a_share_of_experts_is_visited_is_counted(num_groups, top_groups, top_k):
    """By going through all choices of groups, and of experts in them. Where nodes are groups, or
    parts of them, a token chosen_probability as many nodes as groups at most.
    """
    routing = RoutingConfig(num_groups=num_groups, top_groups=top_groups)
    experts = ExpertsConfig(num_experts=8, top_k=top_k, hidden_dim=4, routing=routing)
    size = 8 // num_groups
    every = [
        chosen
        for groups in itertools.combinations(range(num_groups), top_groups)
        for chosen in itertools.combinations([e for e in range(8) if e // size in groups], top_k)
    ]
    for shares in (1, 2, 4, 8):
        visited = [len({e * shares // 8 for e in chosen}) for chosen in every]
        assert chosen_probability(experts, shares) == pytest.approx(
            np.mean(visited) / shares, rel=1e-12
        )
        if shares <= num_groups:
            assert max(visited) <= top_groups


def kept(room, num_devices: int) -> np.ndarray:
    """The experts of each choice, E where it finds no room: tokens that come first have it on the
    way, and where they arrive the experts that come first.
    """
    expert_NTK = np.array(drawn()[1]).reshape(num_devices, -1, K)
    node_size = room.levels[-1].members

    def device_of(choice) -> int:
        return int(expert_NTK[choice]) * num_devices // E

    held = [
        [
            [(d, t, k) for k in range(K) if expert_NTK[d, t, k] < E]
            for t in range(expert_NTK.shape[1])
        ]
        for d in range(num_devices)
    ]
    for level in room.levels:
        arrived, sent = [[] for _ in range(num_devices)], collections.Counter()
        for d, row in ((sender, row) for sender, rows in enumerate(held) for row in rows):
            parts: dict = {}
            for choice in row:
                target = device_of(choice)
                if level is not room.levels[-1]:
                    target = target // node_size * node_size + d % node_size
                alone = choice if level.form is PER_EXPERT else None
                parts.setdefault((target, alone), []).append(choice)
            for (target, _), choices in parts.items():
                sent[d, target] += 1
                if sent[d, target] <= level.slots:
                    arrived[target].append(choices)
        held = arrived
    found = np.full_like(expert_NTK, E)
    for rows in held:
        there = sorted(itertools.chain(*rows), key=lambda choice: expert_NTK[choice])
        for choice in there[: room.choices]:
            found[choice] = expert_NTK[choice]
    return found


@pytest.mark.slow_cases("per_device")
@pytest.mark.parametrize("form", FORMS)
def test_what_has_no_room_is_counted(form):
    """Loads are uneven, rooms even."""
    exchange, room = bounded(form)
    y_BTD, overflowed = compiled(exchange, N)(*drawn())
    x_BTD, expert_BTK, weight_BTK, experts = drawn()
    found = kept(room, N)
    lost = np.sum(np.asarray(expert_BTK) < E) - np.sum(found < E)
    assert lost > 0
    assert int(overflowed) == lost
    run = jax.jit(functools.partial(within_device, config=CONFIG, recipe=RECIPE))
    want, _ = run(x_BTD, jnp.asarray(found.reshape(B, T, K)), weight_BTK, experts)
    assert near(np.asarray(y_BTD), np.asarray(want))


@pytest.mark.slow_cases("per_expert-4")
@pytest.mark.parametrize(("form", "node_size"), [(PER_DEVICE, 2), (PER_EXPERT, 4)])
def test_two_levels_are_one_device_forward_and_back(form, node_size):
    """Of 8 devices, with the choices that find room on both levels: y, what is left out, and
    gradients of x, of the choices' weights and of the experts' (sums over 48 tokens of sums of 10,
    6 and 3 products); and the bytes of each level.
    """
    x_BTD, expert_BTK, weight_BTK, experts = drawn()

    def program(port):
        def objective(x_BTD, weight_BTK, experts, expert_BTK):
            y_BTD, left_out = port(x_BTD, expert_BTK, weight_BTK, experts)
            return jnp.sum(jnp.sin(y_BTD)), (y_BTD, left_out)

        run = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))
        return run.lower(x_BTD, weight_BTK, experts, expert_BTK).compile(COMPILER_OPTIONS)

    exchange, room = bounded(form, num_devices=8, node_size=node_size)
    assert [level.members for level in room.levels] == [8 // node_size, node_size]
    two = program(exchanging(exchange, 8))
    one = program(functools.partial(within_device, config=CONFIG, recipe=RECIPE))
    check_bytes(two, room)
    found = kept(room, 8)
    (_, (y_BTD, left_out)), gradients = two(x_BTD, weight_BTK, experts, expert_BTK)
    (_, (wanted_BTD, _)), wanted = one(
        x_BTD, weight_BTK, experts, jnp.asarray(found.reshape(B, T, K))
    )
    assert int(left_out) == np.sum(np.asarray(expert_BTK) < E) - np.sum(found < E) > 0
    assert near(np.asarray(y_BTD), np.asarray(wanted_BTD))
    for mine, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        error = np.max(np.abs(np.asarray(mine) - np.asarray(theirs)))
        assert error <= 128 * EPSILON * np.max(np.abs(theirs))


@pytest.mark.slow  # of the bound, six programs
@pytest.mark.parametrize(("form", "node_size"), [(PER_EXPERT, None), (PER_DEVICE, 2)])
def test_faults_are_caught(form, node_size, monkeypatch):
    """The comparison with one device sees a row to the wrong device, and one that came back to the
    wrong token: of two levels, on the way across nodes.
    """
    exchange = ExchangeConfig(form=form, node_size=node_size)
    y_BTD, overflowed = compiled(exchange, N)(*drawn())
    assert overflowed is None
    assert near(np.asarray(y_BTD), alone())
    real = subject.plan_padded

    def faulty(device_NJ, members, *args, fault: str, peers) -> RowTransfer:
        right = real(device_NJ, members, *args, peers=peers)
        if peers.groups is not None and peers.groups[0][:2] == (0, 1):
            return right  # within a node
        if fault == "device":
            turned = jnp.where(device_NJ < members, (device_NJ + 1) % members, members)
            return real(turned, members, *args, peers=peers)
        return dataclasses.replace(right, place_NJ=jnp.roll(right.place_NJ, 1, axis=0))

    for fault in ("device", "token"):
        monkeypatch.setattr(subject, "plan_padded", functools.partial(faulty, fault=fault))
        run = exchanging(exchange, N)
        got, _ = jax.jit(run, compiler_options=COMPILER_OPTIONS)(*drawn())
        assert not near(np.asarray(got), alone()), fault


@pytest.mark.slow_cases("per_device-None", "per_expert-None")
@pytest.mark.parametrize(
    ("form", "node_size"), [(PER_EXPERT, None), (PER_DEVICE, None), (PER_DEVICE, 2)]
)
def test_ragged_lowers_for_cuda(form, node_size):
    exchange = ExchangeConfig(
        form=form, implementation=ExchangeImplementation.RAGGED, node_size=node_size
    )
    run = exchanging(exchange, N)
    text = jax.jit(run).trace(*drawn()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("ragged_all_to_all") >= (2 if node_size is None else 4)


@pytest.mark.parametrize(
    ("mesh", "axes", "expert_axes"),
    [
        ({"fsdp": 8, "expert": 2}, {"fsdp": 4, "expert": 2}, ("expert",)),
        ({"fsdp": 2, "context": 2, "expert": 4}, {"expert": 2, "context": 2}, None),
        ({"replica": 2, "fsdp": 2, "expert": 4}, {"replica": 2, "expert": 2}, None),
        ({"context": 4, "expert": 4}, {"context": 4}, ("context",)),
    ],
)
def test_experts_take_a_part_of_the_data_axes(mesh, axes, expert_axes):
    config = MeshConfig(**mesh)
    assert {axis: size for axis, size in config.device_axes.items() if size > 1} == axes
    assert config.expert_axes == (tuple(axes) if expert_axes is None else expert_axes)
    assert math.prod(config.device_axes.values()) == config.num_devices


def test_nodes_that_experts_do_not_fill_are_refused():
    exchange = ExchangeConfig(node_size=3)
    with pytest.raises(ConfigError, match=r"expert=8 is no multiple of exchange.node_size=3"):
        exchange.num_nodes(8)
    with pytest.raises(ConfigError, match=r"exchange node_size=0 must be at least 1"):
        ExchangeConfig(node_size=0)
    assert [exchange.num_nodes(expert) for expert in (1, 2, 3, 6)] == [1, 1, 1, 2]


def test_experts_that_fit_no_axes_are_refused():
    with pytest.raises(ConfigError, match=r"expert=4 does not fit fsdp=2, context=3"):
        MeshConfig(fsdp=2, context=3, expert=4)
