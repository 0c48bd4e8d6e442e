"""Functions of a model whose frozen parameters are arguments."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxinfra.model.definition import ModelDefinition, Parameters


def of_frozen[**P, R](
    make: Callable[[ModelDefinition], Callable[P, R]], model: ModelDefinition
) -> Callable[..., R]:
    """``make(model)``; where parameters are frozen, they come first among its arguments.

    Closed over, they would be constants of the compiled program.
    """
    if not model.frozen:
        return make(model)

    def function(frozen: Parameters, *args: P.args, **kwargs: P.kwargs) -> R:
        return make(model.freeze(frozen))(*args, **kwargs)

    function.__name__ = make(model).__name__  # by which traces know it
    return function


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """A jitted function of frozen parameters and others, or a stage of it, the former given."""

    stage: Any  # jax.stages.Wrapped, Lowered or Compiled
    frozen: Parameters

    def __call__(self, *args: Any) -> Any:
        """Runs the stage on the frozen parameters and these arguments."""
        return self.stage(self.frozen, *args)

    def lower(self, *args: Any) -> "Bound":
        """Traces the step for these arguments, as the jitted function does."""
        return Bound(self.stage.lower(self.frozen, *args), self.frozen)

    def compile(self) -> "Bound":
        """Compiles the step, as a lowered one does."""
        return Bound(self.stage.compile(), self.frozen)

    def as_text(self) -> str:
        """The program's text, lowered or compiled."""
        return self.stage.as_text()
