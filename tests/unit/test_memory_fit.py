"""Pages follow from a device's memory, and what cannot run is refused with its numbers."""

import dataclasses

import jax
import pytest

from jaxinfra.config.precision import PolicyName
from jaxinfra.diagnostics.memory.serving import ServingCase, fitted_case
from jaxinfra.errors import ConfigError, DeviceMemoryError
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.inference import Serving, device_budget, memory_needs, pool_tokens
from jaxinfra.planning.model import find_model
from jaxinfra.serving.engine import fit
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.fit import MemoryNeeds, budget_bytes, fitted_limits
from jaxinfra.serving.engine.options import EngineOptions
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

    def memory_stats(self):
        return self.stats


def test_what_others_use_is_left_to_them():
    whole = budget_bytes(Device(10 << 30, 0), fraction=0.5)
    assert whole == 5 << 30
    # The engine's own, and what is less than a step, do not count.
    assert budget_bytes(Device(10 << 30, 3 << 30), fraction=0.5, held_bytes=3 << 30) == whole
    assert budget_bytes(Device(10 << 30, 9 << 20), fraction=0.5) == whole
    assert budget_bytes(Device(10 << 30, 1 << 30), fraction=0.5) == whole - (1 << 30)


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
    needs = memory_needs(find_model("llama3_8b"), device, serving)
    tokens = pool_tokens(find_model("llama3_8b"), device, serving)
    room = device_budget(device) - needs.fixed_bytes
    assert abs(tokens * 128 * 1024 - room) <= 2 * needs.page_bytes
    assert 15e9 < needs.weight_bytes < 17e9
    assert needs.temporary_bytes < 0.05 * room
