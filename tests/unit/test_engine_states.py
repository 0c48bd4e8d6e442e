"""The engine serves layers with a state as they generate alone: shared, preempted, drafted."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.model import BlockConfig, stacked
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.engine import moves
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.mover import Mover
from jaxinfra.serving.engine.options import EngineOptions, Preemption
from jaxinfra.serving.engine.plan import StepPlan
from jaxinfra.serving.engine.program_set import KEEP, RESTORE_STATE, SAVE_STATE
from jaxinfra.serving.engine.programs import DeviceState
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.sampling import GREEDY, SamplingConfig
from tests import small_models
from tests.generation import recomputed
from tests.unit.test_recurrent_mixers import MIXERS, decoder, logits_of
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


def test_drafts_that_do_not_hold_are_taken_out_of_the_state():
    """In turn no draft holds, the first, and both; the text is what one pass over it says."""
    mixer = dataclasses.replace(MIXERS["short_convolution"], bias=False)
    layer = BlockConfig(mixer=mixer, feed_forward=None)
    dense = small_models.dense(tie_embeddings=False)
    small = dataclasses.replace(dense, stacks=stacked(layer, num_layers=1))
    definition = define_model(small, execution_on())
    parameters = drawn_parameters(definition)
    older = parameters["blocks"][0]["attention"]["value_conv"]  # taps, the newest last
    older["weight"] = older["weight"].at[..., :-1].multiply(6.0)
    model = definition.bind(parameters)
    options = dataclasses.replace(OPTIONS, max_running=1, num_drafts=2, num_snapshots=0)
    serving, text = Engine(model, options=options), [3, 9, 4]
    while len(text) < 13:
        padded = np.array([text + [0] * (13 - len(text))], np.int32)
        text.append(int(np.argmax(logits_of(model, padded)[0, len(text) - 1])))
    assert len(set(text)) > 7

    def propose(stream):
        place, right = len(stream.tokens), len(stream.tokens) % 3
        drafts = (*text, 0, 0)[place : place + 2]
        return [x if n < right else (x + 1) % 64 for n, x in enumerate(drafts)]

    serving.scheduler._propose = propose
    (told,) = serving.run([GenerationRequest(prompt_ids=(3, 9, 4), max_new_tokens=10)])
    assert [token for progress in told for token in progress.tokens] == text[3:]
    assert serving.counts.drafted_tokens > serving.counts.accepted_tokens > 2


def test_states_go_to_the_host_and_back():
    """Moves of one step are in turn, so that a slot may be saved and then be filled again."""
    rng = np.random.default_rng(0)
    stored = jnp.asarray(rng.normal(size=(2, 6, 3)), jnp.float32)
    made = functools.partial(DeviceState, pools=(), draft_pools=(), hidden_SD=None, last_S=None)
    state = made(states=({"state": stored}, {}), masks_SW=None, history=None)
    limits = SimpleNamespace(
        num_pages=0, num_host_pages=0, num_host_states=2, host_state_slots=range(6, 8)
    )

    def call(key, *given):
        nonlocal state
        given = jax.tree.map(jnp.asarray, given)
        if key in (KEEP, RESTORE_STATE):
            state = (moves.copy_states if key == KEEP else moves.write_states)(state, *given)
            return None
        assert key == SAVE_STATE
        return moves.read_states(state, *given)

    mover = Mover(state, limits, call=call)
    lists = dict.fromkeys(("saves", "copies", "zeros", "restores", "chunks", "decodes", "verifies"))
    plan = StepPlan(
        **{name: [] for name in lists},
        chunk_length=0,
        states=[(0, 6), (1, 7), (2, 0), (6, 4), (7, 2)],
    )
    mover.move(plan)
    np.testing.assert_array_equal(
        state.states[0]["state"], np.asarray(stored)[:, [2, 1, 1, 3, 0, 5]]
    )


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
