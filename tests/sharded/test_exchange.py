"""The exchange of tokens between devices that share experts: what it gives, counts and sends."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.exchange import ExchangeConfig, ExchangeForm, ExchangeImplementation
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.core.errors import ConfigError
from jaxinfra.layers.execution import within_device
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.experts import ExpertWeights
from jaxinfra.parallel import exchange as subject
from jaxinfra.parallel import travel
from jaxinfra.parallel.collective_bytes import sent_bytes
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.program import collectives
from jaxinfra.parallel.rules import state_rules
from tests.sharded.cases import COMPILER_OPTIONS

CONFIG = ExpertsConfig(num_experts=8, top_k=2, hidden_dim=6)
N, D, B, T = 4, 10, 8, 6
RECIPE = POLICIES[PolicyName.FP32].recipe(Site.EXPERTS)
FORMS = list(ExchangeForm)
EPSILON = float(np.finfo(np.float32).eps)


def placement() -> Placement:
    mesh = MeshConfig(fsdp=N, expert=N)
    return Placement(
        mesh=make_mesh(mesh, devices=jax.devices()[:N]), rules=state_rules(ShardingConfig(), mesh)
    )


@functools.cache
def drawn():
    """x, experts, weights of the choice and of the layer; the first experts are chosen most."""
    rng = np.random.default_rng(0)
    popularity = np.geomspace(1.0, 0.01, CONFIG.num_experts)
    score = rng.gumbel(size=(B, T, CONFIG.num_experts)) + np.log(popularity)
    expert_BTK = np.argsort(-score, axis=-1)[..., : CONFIG.top_k].astype(np.int32)
    expert_BTK[0, :2] = CONFIG.num_experts  # padding

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    inward, outward = (8, D, CONFIG.hidden_dim), (8, CONFIG.hidden_dim, D)
    experts = ExpertWeights(
        gate_EDF=normal(*inward), up_EDF=normal(*inward), down_EFD=normal(*outward)
    )
    weight_BTK = np.where(expert_BTK < 8, normal(B, T, 2), np.float32(0))
    return normal(B, T, D), jnp.asarray(expert_BTK), jnp.asarray(weight_BTK), experts


@functools.cache
def compiled(exchange: ExchangeConfig):
    run = functools.partial(
        subject.exchange_on(placement(), exchange), config=CONFIG, recipe=RECIPE
    )
    return jax.jit(run).lower(*drawn()).compile(COMPILER_OPTIONS)


ONE_DEVICE = jax.jit(
    functools.partial(within_device, config=CONFIG, recipe=RECIPE),
    compiler_options=COMPILER_OPTIONS,
)


def alone_of(*arguments) -> np.ndarray:
    return np.asarray(ONE_DEVICE(*arguments)[0])


@functools.cache
def alone() -> np.ndarray:
    return alone_of(*drawn())


def near(got, want) -> bool:
    """Sums of 10 and 6 products, an activation and a sum of two, on the scale of the largest."""
    return np.max(np.abs(got - want)) <= 32 * EPSILON * np.max(np.abs(want))


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_of_the_formula(form):
    """Of the two all-to-alls of rows, and of what says which experts they are for."""
    exchange = ExchangeConfig(form=form, room_factor=1.5)
    room = subject.room_for(B * T // N, num_devices=N, experts=CONFIG, exchange=exchange)
    expected = subject.exchanged_bytes(
        room, num_devices=N, model_dim=D, itemsize=4, experts=CONFIG, exchange=exchange
    )
    found = [each for each in collectives(compiled(exchange)) if each.kind == "all-to-all"]
    rows = [each for each in found if D in each.shape]
    assert len(rows) == 2
    assert sum(each.sent_bytes for each in rows) == sent_bytes("all-to-all", expected["rows"], N)
    others = sum(each.sent_bytes for each in found if D not in each.shape)
    said = expected["experts"] + expected["weights"]
    assert others == sent_bytes("all-to-all", said, N)


def test_a_token_travels_once_to_a_device():
    """On average N (1 - C(E - e, K) / C(E, K)) devices: fewer rows than choices."""
    sizes = {
        form: subject.room_for(
            B * T // N,
            num_devices=N,
            experts=CONFIG,
            exchange=ExchangeConfig(form=form, room_factor=1.0),
        ).slots
        for form in FORMS
    }
    visited = N * (1 - math.comb(6, 2) / math.comb(8, 2))
    assert sizes[ExchangeForm.PER_DEVICE] == math.ceil(B * T / N * visited / N)
    assert sizes[ExchangeForm.PER_EXPERT] == B * T // N * CONFIG.top_k // N


@pytest.mark.parametrize("form", FORMS)
def test_what_has_no_room_is_counted(form):
    """Loads are uneven, rooms even: the tokens that come first have it on the way, and the experts
    that come first where they arrive.
    """
    exchange = ExchangeConfig(form=form, room_factor=1.5)
    y_BTD, overflowed = compiled(exchange)(*drawn())
    room = subject.room_for(B * T // N, num_devices=N, experts=CONFIG, exchange=exchange)
    x_BTD, expert_BTK, weight_BTK, experts = drawn()
    kept = np.array(expert_BTK).reshape(N, -1, 2)
    for source in range(N):
        sent = np.zeros(N, int)
        for experts_of_token in kept[source]:
            places: dict[int, int] = {}
            for k, device in enumerate(experts_of_token // 2):
                if device < N and (form is ExchangeForm.PER_EXPERT or device not in places):
                    places[device] = sent[device]
                    sent[device] += 1
                if device < N and places[device] >= room.slots:
                    experts_of_token[k] = CONFIG.num_experts
    for device in range(N):
        arrived = [place for place in np.ndindex(kept.shape) if kept[place] // 2 == device]
        in_order = sorted(arrived, key=lambda place: kept[place])
        for place in in_order[room.choices :]:
            kept[place] = CONFIG.num_experts
    lost = np.sum(np.asarray(expert_BTK) < CONFIG.num_experts) - np.sum(kept < CONFIG.num_experts)
    assert lost > 0
    assert int(overflowed) == lost
    want = alone_of(x_BTD, kept.reshape(B, T, 2), weight_BTK, experts)
    assert near(np.asarray(y_BTD), want)


@pytest.mark.parametrize("form", FORMS)
def test_faults_are_caught(form, monkeypatch):
    """The comparison with one device sees a row to the wrong device, and one that came back to the
    wrong token.
    """
    exchange = ExchangeConfig(form=form)
    y_BTD, overflowed = compiled(exchange)(*drawn())
    assert overflowed is None
    assert near(np.asarray(y_BTD), alone())
    real = subject.equal

    def faulty(device_NJ, *args, fault: str, **options) -> travel.Travel:
        right = real(device_NJ, *args, **options)
        if fault == "device":
            return real((device_NJ + 1) % N, *args, **options)
        return dataclasses.replace(right, place_NJ=jnp.roll(right.place_NJ, 1, axis=0))

    for fault in ("device", "token"):
        monkeypatch.setattr(subject, "equal", functools.partial(faulty, fault=fault))
        run = functools.partial(
            subject.exchange_on(placement(), exchange), config=CONFIG, recipe=RECIPE
        )
        got, _ = jax.jit(run, compiler_options=COMPILER_OPTIONS)(*drawn())
        assert not near(np.asarray(got), alone()), fault


@pytest.mark.parametrize("form", FORMS)
def test_ragged_lowers_for_cuda(form):
    exchange = ExchangeConfig(form=form, implementation=ExchangeImplementation.RAGGED)
    run = functools.partial(
        subject.exchange_on(placement(), exchange), config=CONFIG, recipe=RECIPE
    )
    text = jax.jit(run).trace(*drawn()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("ragged_all_to_all") >= 2


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


def test_experts_that_fit_no_axes_are_refused():
    with pytest.raises(ConfigError, match=r"expert=4 does not fit fsdp=2, context=3"):
        MeshConfig(fsdp=2, context=3, expert=4)
