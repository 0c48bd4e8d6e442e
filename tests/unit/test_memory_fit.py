"""Pages follow from a device's memory, and what cannot run is refused with its numbers."""

import dataclasses
import gc
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfra.config.precision import PolicyName
from jaxinfra.diagnostics.memory.serving import ServingCase, fitted_case
from jaxinfra.errors import ConfigError, DeviceMemoryError
from jaxinfra.numerics.policy import POLICIES, stored_as_computed
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.inference import Serving, device_budget, memory_needs, pool_tokens
from jaxinfra.planning.model import find_model
from jaxinfra.serving.engine import fit
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.fit import (
    JAX_FRACTION,
    MemoryNeeds,
    budget_bytes,
    fitted_limits,
    require_pages,
)
from jaxinfra.serving.engine.options import EngineOptions, options_on
from jaxinfra.serving.http import start
from tests.engine_models import CONFIG, OPTIONS, model

NEEDS = MemoryNeeds(weight_bytes=1000, temporary_bytes=200, state_bytes=50, page_bytes=10)
LIMITS = dataclasses.replace(OPTIONS, num_pages=None, max_context=16).limits(CONFIG)


def test_pages_are_what_is_left_and_at_most_what_requests_can_use():
    assert LIMITS.num_pages == 1 + 3 * 4
    assert fitted_limits(LIMITS, NEEDS, budget_bytes=1250 + 79).num_pages == 7
    assert fitted_limits(LIMITS, NEEDS, budget_bytes=9999) == LIMITS
    assert fitted_limits(LIMITS, NEEDS, budget_bytes=1250 + 50).num_pages == 5


def test_a_request_that_does_not_fit_is_refused_with_what_would():
    with pytest.raises(DeviceMemoryError, match=r"16 tokens does not fit.*--max-context 8"):
        fitted_limits(LIMITS, NEEDS, budget_bytes=1250 + 39)
    with pytest.raises(DeviceMemoryError, match="spread the model"):
        fitted_limits(LIMITS, NEEDS, budget_bytes=900)


def test_the_fraction_is_a_share():
    with pytest.raises(ConfigError, match="memory_fraction"):
        EngineOptions(memory_fraction=1.5)


class Device:
    """A device that says how much memory it has and uses."""

    def __init__(self, limit: int, used: int):
        self.stats = {"bytes_limit": limit, "bytes_in_use": used}


def test_what_others_use_is_left_to_them(monkeypatch):
    monkeypatch.setattr(fit, "memory_stats", lambda device: device.stats)
    limit = 10 << 30

    def budget(used: int, held: int = 0) -> float:
        device = Device(limit, used)
        return budget_bytes(device, limit_bytes=limit, fraction=0.5, held_bytes=held)

    assert budget(0) == budget(3 << 30, held=3 << 30) == 5 << 30  # the engine's own do not count
    assert budget(1 << 30) == 4 << 30


def test_memory_that_is_not_there_is_refused_before_weights_are_read(monkeypatch):
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), nnx.state(model())
    )
    absent = nnx.merge(nnx.graphdef(model()), shapes)
    engine = Engine(absent, num_ids=257, options=OPTIONS, limit_bytes=1 << 40)
    engine.runner.require_memory()
    needs = dataclasses.replace(engine.runner.memory_needs(), weight_bytes=1 << 50)
    monkeypatch.setattr(engine.runner, "memory_needs", lambda: needs)
    said: Any = {"read": lambda: 1 / 0, "cluster": None, "say": print}
    with pytest.raises(DeviceMemoryError, match=r"has not free.*1048576.00 GiB.*end the other"):
        start._ready(engine, None, **said)


def test_a_server_keeps_what_its_start_needs_but_no_garbage():
    device = Device(1, 0)
    device.itself = device
    known = weakref.ref(device)
    del device
    with start._frozen():
        assert known() is None
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_an_engine_takes_the_pages_that_memory_predicts(monkeypatch):
    options = dataclasses.replace(OPTIONS, num_pages=None)
    case = ServingCase(model=CONFIG, policy=POLICIES[PolicyName.FP32], engine=options, num_ids=257)
    needs = case.runner().memory_needs()
    few = dataclasses.replace(options, num_pages=1 + case.limits.table_width)
    assert dataclasses.replace(case, engine=few).runner().memory_needs() == needs
    limit = int((needs.fixed_bytes + 40.5 * needs.page_bytes) / options.memory_fraction)
    monkeypatch.setattr(fit, "memory_stats", lambda device: Device(limit, 0).stats)
    predicted = fitted_case(case, limit_bytes=limit)
    engine = Engine(model(), num_ids=257, options=options)
    assert engine.limits.num_pages == predicted.limits.num_pages == 40
    arrays = jax.tree.leaves(engine.runner._state.pools)
    assert sum(each.nbytes for each in arrays) == 40 * needs.page_bytes


def test_a_plan_counts_as_a_server_does():
    """Weights of 16.1 GB on an H200, and what programs need; the rest holds 128 KiB a token."""
    device, serving = find_device("h200"), Serving()
    needs = memory_needs(find_model("llama31_8b"), device, serving)
    tokens = pool_tokens(find_model("llama31_8b"), device, serving)
    room = device_budget(device) - needs.fixed_bytes
    assert abs(tokens * 128 * 1024 - room) <= 2 * needs.page_bytes
    assert 15e9 < needs.weight_bytes < 17e9
    assert needs.temporary_bytes < 0.05 * room


PLAIN_16_BITS = stored_as_computed(POLICIES[PolicyName.BF16])


def case_of(name: str, **options) -> ServingCase:
    engine = dataclasses.replace(options_on("gpu"), **options)
    config = find_model(name).config
    return ServingCase(model=config, policy=PLAIN_16_BITS, engine=engine, is_unrolled=True)


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("name", ["llama32_1b", "llama3_8b"])
def test_a_plan_predicts_the_pool_of_a_server(name, device):
    budget = find_device(device)
    limit = int(budget.visible_bytes * JAX_FRACTION)
    limits = fitted_case(case_of(name), limit_bytes=limit).limits
    tokens = (limits.num_pages - 1) * limits.page_size
    planned = pool_tokens(find_model(name), budget, Serving())
    assert abs(planned - tokens) <= 0.03 * tokens


def drawn_options(rng: np.random.Generator) -> dict[str, Any]:
    """Options as users combine them, some of which cannot run."""
    running = int(rng.choice([1, 16, 64, 256, 1024, 3000]))
    chunks = [(64, 256, 1024), (256,), (64, 256, 1024, 4096)][rng.integers(3)]
    options: dict[str, Any] = {
        "max_running": running,
        "chunk_sizes": chunks,
        "max_step_tokens": running + int(rng.choice([1, 4, 8])) * chunks[-1],
        "page_size": int(rng.choice([16, 64, 128])),
        "memory_fraction": float(rng.choice([0.3, 0.7, 0.9, 0.98])),
    }
    if rng.random() < 0.5:
        options["max_context"] = int(rng.choice([512, 4096, 32768, 131072]))
    if rng.random() < 0.3:
        options["num_pages"] = int(rng.choice([64, 3000, 200_000]))
    return options


def serves_or_is_refused(seed: int) -> bool:
    rng = np.random.default_rng(seed)
    name = ["llama32_1b", "llama3_8b", "llama31_8b", "llama3_70b"][seed % 4]
    limit = int(find_device(["h100", "h200"][seed // 4 % 2]).visible_bytes * JAX_FRACTION)
    case = case_of(name, **drawn_options(rng))
    limits, engine = case.limits, case.engine
    few = dataclasses.replace(engine, num_pages=1 + limits.table_width)
    needs = dataclasses.replace(case, engine=few).runner().memory_needs()
    given = engine.num_pages is not None
    budget = limit * (1.0 if given else engine.memory_fraction)
    check = require_pages if given else fitted_limits
    least = limits.num_pages if given else 1 + limits.table_width
    if needs.fixed_bytes + least * needs.page_bytes > budget:
        with pytest.raises(DeviceMemoryError, match=r"GiB.*; "):
            check(limits, needs, budget_bytes=budget)
        return False
    limits = check(limits, needs, budget_bytes=budget) or limits
    assert needs.fixed_bytes + limits.num_pages * needs.page_bytes <= budget
    # One request of the full context has its pages, and so the first hundred get theirs in turn.
    assert limits.num_pages > limits.table_width
    assert limits.context == case.limits.context
    return True


def test_options_serve_or_are_refused_before_weights_are_read():
    assert {serves_or_is_refused(seed) for seed in range(4)} == {True, False}


@pytest.mark.slow
def test_forty_sets_of_options_serve_or_are_refused():
    served = [serves_or_is_refused(seed) for seed in range(40)]
    assert 10 < sum(served) < 35
