"""Every schedule computes what one device computes: the loss and each gradient.

The bound is that of rounding (``tests/sharded/oracle.py``).
"""

import dataclasses
import itertools
from unittest import mock

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import ExpertsConfig, stacked
from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.config.presets.runs import tiny
from jaxinfra.config.run import ContextMethod, Remat
from jaxinfra.config.validate import validate
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.parallel import loss as loss_on_meshes
from jaxinfra.runtime.compile_cache import cache_for_stages
from jaxinfra.training.recompute.budget import CHEAPEST_FIRST
from tests.sharded.cases import gemma_like, gpt_like, llama_like, mla_like
from tests.sharded.pipeline_cases import Case, alone, compiled, exact, loss_and_gradients
from tests.tolerance import assert_within_rounding

GPIPE, ONE, INTERLEAVED, ZB_H1, ZB_V = PipelineSchedule


def with_layers(make, num_layers: int):
    return make().with_layers(num_layers)


def check(case: Case) -> None:
    assert_within_rounding(loss_and_gradients(case), exact(case.model, case.rows), what=str(case))


# Tied embeddings, and layers that do not divide over the runs; one model, so that what both are
# compared with is compiled once.
SAMPLE = {
    f"{schedule.value} with {', '.join(others)}": Case(
        model=with_layers(llama_like, 5),
        mesh=MeshConfig(pipe=2, **others),
        micro_batches=4,
        schedule=schedule,
        remat=Remat.DOTS,
    )
    for schedule, others in ((INTERLEAVED, {"fsdp": 2, "tensor": 2}), (ZB_V, {"context": 2}))
}


def test_stages_with_experts_are_one_device():
    """Sums differ by their order alone; a micro-batch or a stage too few or too many, and a token
    that went to another expert, would move them by parts in a hundred.
    """
    experts = ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8)
    block = dataclasses.replace(llama_like().blocks[0], feed_forward=experts)
    model = dataclasses.replace(llama_like(), stacks=stacked(block, num_layers=2))
    mesh = MeshConfig(pipe=2, fsdp=2, expert=2)
    case = Case(model=model, mesh=mesh, micro_batches=2, rows=8)
    got, want = loss_and_gradients(case), alone(model, 2, case.remat, case.rows)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())


def test_stages_on_cpu_devices_are_not_read_from_a_cache(tmp_path):
    """XLA gives such a program's collectives no order among one another."""
    was = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )
    _keep_in(str(tmp_path), 0.0)
    try:
        kept = []
        for num_stages in (2, 1):
            with cache_for_stages(num_stages):
                jax.jit(lambda x: x * 3 + 1).lower(np.float32(2)).compile()
            kept.append(len(list(tmp_path.glob("*-cache"))))
    finally:
        _keep_in(*was)
    assert kept == [0, 1]


def _keep_in(directory: str | None, seconds: float) -> None:
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    compilation_cache.reset_cache()


@pytest.mark.slow  # by default the stages above
@pytest.mark.parametrize("case", SAMPLE.values(), ids=SAMPLE)
def test_pipeline_equals_one_device(case):
    check(case)


def cases():
    """Cases of every schedule: stage counts, other mesh axes, uneven layers, remat and models."""
    each, deep = PipelineSchedule, with_layers(llama_like, 8)
    for schedule, pipe, multiple in itertools.product(each, (2, 4), (1, 2, 4)):
        yield deep, {"pipe": pipe}, {"schedule": schedule, "micro_batches": pipe * multiple}
    meshes = ({"fsdp": 2}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}, {"replica": 2, "fsdp": 2})
    for schedule, others in itertools.product(each, meshes):
        yield with_layers(llama_like, 4), others, {"schedule": schedule, "remat": Remat.DOTS}
    sequences = (
        (llama_like, ContextMethod.ALL_GATHER, {}),
        (llama_like, ContextMethod.AUTO, {"fsdp": 2}),
        (gemma_like, ContextMethod.ULYSSES, {"tensor": 2}),
        (gemma_like, ContextMethod.ALL_GATHER, {"fsdp": 2}),
        (mla_like, ContextMethod.AUTO, {"tensor": 2}),
    )
    for schedule, (make, method, others) in itertools.product(each, sequences):
        model, how = with_layers(make, 4 * len(make().blocks)), {"context_method": method}
        yield model, {"context": 2, **others}, {"schedule": schedule, **how}
    for schedule, num, make in itertools.product(each, (5, 7), (llama_like, gemma_like)):
        yield with_layers(make, num * len(make().blocks)), {}, {"schedule": schedule}
    makes = (llama_like, gpt_like, gemma_like)
    for remat, schedule, make in itertools.product(CHEAPEST_FIRST, (ONE, ZB_H1), makes):
        yield with_layers(make, 4), {}, {"schedule": schedule, "remat": remat}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "axes", "how"), list(cases()))
def test_every_schedule_equals_one_device(model, axes, how):
    check(Case(model=model, mesh=MeshConfig(**{"pipe": 2, **axes}), **{"micro_batches": 4, **how}))


def test_sends_between_devices_of_a_stage_are_refused():
    """By the config, and by attention itself. Whoever waits for another stage's send may wait for
    one that waits in turn.
    """
    mesh, base, method = MeshConfig(pipe=2, context=2), tiny(), ContextMethod.RING
    with pytest.raises(ConfigError, match=r"context_method=ring .* pipe=2"):
        validate(
            dataclasses.replace(
                base,
                model=llama_like(),
                mesh=mesh,
                training=dataclasses.replace(
                    base.training, sequence_length=16, context_method=method
                ),
            )
        )
    case = Case(model=llama_like(), mesh=mesh, micro_batches=2, context_method=method)
    with pytest.raises(UnsupportedError, match="use context_method=all_gather or ulysses"):
        compiled(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(pipe=4), MeshConfig(pipe=2, fsdp=2, tensor=2), MeshConfig(pipe=2, context=2)],
    ids=str,
)
@pytest.mark.parametrize("make", [llama_like, gpt_like])
def test_the_last_stage_takes_the_loss_of_own_tokens(monkeypatch, make, mesh):
    """As a step without stages does on Hopper, where a kernel computes it."""
    taken = mock.Mock(return_value=True)
    monkeypatch.setattr(loss_on_meshes, "shards_by_tokens", taken)
    check(Case(model=with_layers(make, 4), mesh=mesh, micro_batches=4))
    assert taken.called


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [4, 5])
@pytest.mark.parametrize("schedule", [INTERLEAVED, ZB_V])
def test_dropout_masks_are_those_of_one_device(schedule, num_layers):
    """A mask that differed in one element would move gradients by parts in a thousand."""
    model = dataclasses.replace(with_layers(llama_like, num_layers), dropout_rate=0.25)
    loss, gradients = loss_and_gradients(
        Case(model=model, mesh=MeshConfig(pipe=2), micro_batches=4, schedule=schedule)
    )
    plain_loss, plain = alone(model, 4, Remat.NONE, 32)
    epsilon = np.finfo(np.float32).eps
    np.testing.assert_allclose(loss, plain_loss, rtol=8 * epsilon)
    for got, expected in zip(*map(jax.tree.leaves, (gradients, plain)), strict=True):
        assert np.max(np.abs(got - expected)) <= 100 * epsilon * np.max(np.abs(expected))


@pytest.mark.slow_cases("1f1b")
@pytest.mark.parametrize(
    "schedule",
    [ONE, *(pytest.param(s, marks=pytest.mark.slow) for s in (INTERLEAVED, ZB_H1, ZB_V))],
)
def test_temporaries_do_not_grow_with_the_micro_batches(schedule):
    few, many = (temporaries(schedule, micro_batches) for micro_batches in (2, 16))
    assert many <= 1.05 * few


@pytest.mark.slow
def test_gpipes_temporaries_grow_with_the_micro_batches():
    few, many = (temporaries(GPIPE, micro_batches) for micro_batches in (2, 16))
    assert many > 3 * few


def temporaries(schedule: PipelineSchedule, micro_batches: int) -> int:
    """Bytes a device of a compiled step whose micro-batches have 4 rows each, however many."""
    case = Case(
        model=with_layers(llama_like, 4),
        mesh=MeshConfig(pipe=2),
        micro_batches=micro_batches,
        schedule=schedule,
        rows=4 * micro_batches,
    )
    return compiled(case)[0].memory_analysis().temp_size_in_bytes
