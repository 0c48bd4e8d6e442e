"""Recomputation: a layer keeps named values for its backward pass and recomputes all others."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxinfra.config.model import ModelConfig, Stack
from jaxinfra.config.run import KeptValues, Remat
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.model.execution import Execution
from jaxinfra.model.layer_loop import opened
from jaxinfra.model.projection import HIDDEN, PROJECTION
from jaxinfra.ops.attention import ATTENTION_NAMES, is_attention_result
from jaxinfra.ops.experts import CHOICE_NAME, HIDDEN_NAMES, OUT_NAME
from jaxinfra.ops.fp8 import QUANTIZED
from jaxinfra.ops.multiply import GATHERED

ALWAYS = (GATHERED, CHOICE_NAME)
"""Kept whatever else is computed again."""
ATTENTION = ATTENTION_NAMES[0]
"""Entry of ``KeptValues.names`` for all values that attention's backward pass reads."""
SHARED_NAMES = (PROJECTION, HIDDEN)
"""Names that several values of a block have, beside one of their own."""

_OUTPUTS = (QUANTIZED, PROJECTION, OUT_NAME)
_SAVED_NAMES = {
    Remat.DOTS: (*_OUTPUTS, HIDDEN, *HIDDEN_NAMES, ATTENTION),
    Remat.MLP: (*_OUTPUTS, ATTENTION),
    Remat.NAMED: (ATTENTION,),
    Remat.FULL: (),
}


def kept_by(remat: Remat) -> tuple[str, ...] | None:
    """Returns the names of the values that a fixed remat policy keeps; None: all values."""
    return None if remat is Remat.NONE else _SAVED_NAMES[remat]


def rematerialized(
    repetition: Callable[..., Any], names: Sequence[str] | None, *, in_loop: bool
) -> Callable[..., Any]:
    """Wraps a repetition of a block pattern to keep only its inputs and values of these names.

    Args:
        names: names of values to keep; None keeps everything.
        in_loop: whether it is the body of a loop. There, XLA's common-subexpression elimination
            cannot undo recomputation, so it stays allowed; forbidding it would cost fusions.
    """
    if names is None:
        return repetition
    policies = jax.checkpoint_policies
    if ATTENTION in names:
        policy = policies.save_from_both_policies(
            policies.save_only_these_names(*ALWAYS, *names, *ATTENTION_NAMES), is_attention_result
        )
    else:
        policy = policies.save_only_these_names(*ALWAYS, *names)
    return jax.checkpoint(repetition, policy=policy, prevent_cse=not in_loop)


def check_kept(config: ModelConfig, execution: Execution, labels: Iterable[str]) -> None:
    """Raises ConfigError where ``kept`` names values or layers that the model does not have.

    Args:
        labels: names of values in the model's blocks.
    """
    how = execution.recomputation
    if how.remat is not Remat.CHOSEN:
        return
    named, layers = sum(run.layers for run in how.kept), sum(s.repeats for s in config.stacks)
    if named != layers:
        raise ConfigError(
            f"kept names the values of {named} layers, and the model repeats its blocks {layers} "
            "times; name all of them, or train with remat=optimal"
        )
    known = {*labels, *_SAVED_NAMES[Remat.DOTS]}
    for name in itertools.chain(*(run.names for run in how.kept)):
        if name not in known:
            raise ConfigError(
                f"kept names {name!r}, no value of this model's blocks{nearest(name, known)}"
            )
    first = 0
    for stack in config.stacks:
        each = set(kept_in_stack(how.kept, config, first_block=first))
        first += len(stack.pattern)
        if len(each) > 1 and repeats_in_body(stack, how.unroll) < stack.repeats:
            raise ConfigError(
                f"kept names {len(each)} different sets of values for the {stack.repeats} layers "
                "of a loop, whose body is one program; name one set, or set training.unroll to "
                "the layers"
            )


def repeats_in_body(stack: Stack, unroll: int) -> int:
    """Returns the number of repetitions of a stack's pattern per loop body; all means no loop."""
    return min(max(1, unroll // len(stack.pattern)), stack.repeats)


def steps_of_stack(
    repetitions: Sequence[Callable[..., Any]],
    execution: Execution,
    config: ModelConfig,
    first_block: int,
    *,
    in_loop: bool,
) -> list[Callable[..., Any]]:
    """Returns the step function of each repetition of a stack; equal repetitions share one.

    Args:
        repetitions: function of each repetition; equal repetitions share one object.
        first_block: index of the stack's first block among the blocks of all patterns.
    """
    kept: Sequence[tuple[str, ...] | None]
    how = execution.recomputation
    if how.remat is Remat.CHOSEN:
        kept = kept_in_stack(how.kept, config, first_block=first_block)
    else:
        kept = [kept_by(how.remat)] * len(repetitions)
    each = list(zip(repetitions, kept, strict=True))
    steps = {
        (repetition, names): rematerialized(opened(repetition), names, in_loop=in_loop)
        for repetition, names in dict.fromkeys(each)
    }
    return [steps[key] for key in each]


def kept_in_stack(
    kept: Sequence[KeptValues], config: ModelConfig, *, first_block: int
) -> list[tuple[str, ...]]:
    """Returns the names of the values that each repetition of a stack keeps.

    Args:
        kept: names for the repetitions of all stacks, one stack after another.
        first_block: index of the stack's first block among the blocks of all patterns.
    """
    each = [run.names for run in kept for _ in range(run.layers)]
    first = block = 0
    for stack in config.stacks:
        if block == first_block:
            return each[first : first + stack.repeats]
        first, block = first + stack.repeats, block + len(stack.pattern)
    raise AssertionError(f"no stack begins with block {first_block}")


def as_kept(each: Sequence[tuple[str, ...]]) -> tuple[KeptValues, ...]:
    """Groups consecutive repetitions that keep the same names into one ``KeptValues`` each."""
    runs: list[KeptValues] = []
    for names in each:
        if runs and runs[-1].names == names:
            runs[-1] = KeptValues(layers=runs[-1].layers + 1, names=names)
        else:
            runs.append(KeptValues(layers=1, names=names))
    return tuple(runs)
