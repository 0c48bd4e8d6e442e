"""The engine serves layers with a state as they generate alone: shared, preempted, drafted."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxinfra.config.cache import CacheFormat
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.model.definition import define_model
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions, Preemption
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.sampling import GREEDY, SamplingConfig
from tests.generation import recomputed
from tests.unit.test_recurrent_mixers import MIXERS, decoder
from tests.unit.test_recurrent_mixers import drawn as drawn_parameters

OPTIONS = EngineOptions(
    max_running=3,
    page_size=4,
    num_pages=13,
    max_step_tokens=24,
    chunk_sizes=(8,),
    max_piece_rows=1,
    max_context=60,
    num_snapshots=4,
)
PREFIX = (7, 25, 3, 9, 4, 8, 1, 2, 3, 40, 11, 5)
PROMPTS = [(*PREFIX, 1, 2), (5,), (*PREFIX, 3, 3, 9, 9), (*PREFIX, 1, 2), (2, 2, 2, 2, 2, 2)]
NEW = 14
WARM = SamplingConfig(temperature=0.7)


@functools.cache
def engine(name, num_drafts=0, **more):
    options = dataclasses.replace(
        OPTIONS, num_drafts=num_drafts, max_step_tokens=24 + 3 * num_drafts, **more
    )
    return Engine(decoder(name), options=options)


@functools.cache
def alone(name, prompt, sampling=GREEDY):
    told = recomputed(decoder(name), [prompt], max_new_tokens=NEW, sampling=sampling)
    return tuple(each.token for each in told)


def drawn(engine, sampling=GREEDY):
    requests = [
        GenerationRequest(prompt_ids=prompt, max_new_tokens=NEW, sampling=sampling)
        for prompt in PROMPTS
    ]
    return [
        tuple(token for progress in told for token in progress.tokens)
        for told in engine.run(requests)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_requests_draw_what_they_draw_alone(name):
    """Requests share prefixes, and there are too few pages to run all of them at once."""
    serving = engine(name)
    want = [alone(name, prompt) for prompt in PROMPTS]
    assert drawn(serving) == want
    assert serving.scheduler.num_preemptions > 0
    used = serving.scheduler.snapshots.num_used
    assert drawn(serving) == want
    assert serving.scheduler.snapshots.num_used >= used + 2


@pytest.mark.slow  # by default `test_recurrent_mixers.py` has a pass whose tokens count in part
@pytest.mark.parametrize("preemption", [*Preemption])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("name", MIXERS)
def test_rejected_drafts_leave_no_state(name, sampling, preemption):
    serving = engine(name, num_drafts=3, preemption=preemption)
    want = [alone(name, prompt, sampling) for prompt in PROMPTS]
    assert drawn(serving, sampling) == want
    assert serving.scheduler.num_preemptions > 0
    assert serving.scheduler.snapshots.num_used > 0
    assert (serving.scheduler.snapshots.num_from_host > 0) == (preemption is Preemption.HOST)
    if sampling is GREEDY:  # sampled texts may repeat nothing that could be proposed
        assert serving.counts.drafted_tokens > serving.counts.accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("name", MIXERS)
def test_states_of_preempted_requests_come_back_from_the_host(name, num_drafts):
    serving = engine(name, num_drafts, preemption=Preemption.HOST, num_snapshots=0)
    assert drawn(serving) == [alone(name, prompt) for prompt in PROMPTS]
    assert serving.scheduler.num_preemptions == serving.scheduler.snapshots.num_from_host > 0
    if not num_drafts:  # each token is computed once
        assert serving.counts.computed_tokens == sum(map(len, PROMPTS)) + len(PROMPTS) * (NEW - 1)


@pytest.mark.slow
def test_snapshots_that_the_device_gives_up_go_on_from_the_host():
    serving = engine("gated_delta", preemption=Preemption.HOST, num_snapshots=1)
    for _ in range(3):
        assert drawn(serving) == [alone("gated_delta", prompt) for prompt in PROMPTS]
    assert serving.scheduler.snapshots.num_from_host > serving.scheduler.num_preemptions


def test_what_states_cannot_have_is_refused():
    model = decoder("gated_delta")
    tight = dataclasses.replace(OPTIONS, preemption=Preemption.HOST, host_bytes=5000)
    with pytest.raises(ConfigError, match=r"no room for a page of .* bytes and two states of"):
        Engine(model, options=tight)
    with pytest.raises(UnsupportedError, match="draft model whose layers keep a state"):
        Engine(model, options=dataclasses.replace(OPTIONS, num_drafts=1), draft=model)


@pytest.mark.slow
def test_states_in_bf16_are_half_as_large_and_texts_nearly_the_same():
    """Requests are preempted to the host, and the engine counts its bytes with theirs."""
    model = decoder("gated_delta")
    execution = dataclasses.replace(model.execution, cache_format=CacheFormat.BF16_STATES)
    definition = define_model(model.config, execution)
    small = definition.bind(drawn_parameters(definition))
    options = dataclasses.replace(OPTIONS, preemption=Preemption.HOST)
    serving, plain = (Engine(each, options=options) for each in (small, model))
    found, want = drawn(serving), drawn(plain)
    assert serving.scheduler.num_preemptions > 0
    assert np.mean(np.array(found) == np.array(want)) > 0.7
    stored, wide = (
        [leaf for each in one.runner._state.states for leaf in each.values()]
        for one in (serving, plain)
    )
    sums = [(a, b) for a, b in zip(stored, wide, strict=True) if a.dtype != b.dtype]
    assert len(sums) == 1
    assert 2 * sums[0][0].nbytes == sums[0][1].nbytes


@pytest.mark.slow
def test_padding_writes_no_state():
    serving = engine("gated_delta")
    drawn(serving)
    for arrays in serving.runner._state.states:
        for stored in arrays.values():
            np.testing.assert_array_equal(stored[:, serving.limits.empty_state], 0)
