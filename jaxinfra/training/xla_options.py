"""XLA compiler options of a run's programs: defaults that measured faster, and the user's own.

They are passed with each compilation. An unknown name raises an error here; in ``XLA_FLAGS`` it
would end the process.
"""

from collections.abc import Iterable, Mapping

import jax
import jaxlib

from jaxinfra.config.run import RunConfig
from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import whole_number

type Options = dict[str, str | int | bool]


# Larger messages take a quarter less of the links' time (1.4% of the 1.2B step on four H200s:
# docs/parallelism.md). Gradients no further than a layer's: at 2**28 they leave when the last
# matmuls are over. In a loop over layers messages would be a whole turn's, nothing beside them.
LARGE_MESSAGES: Options = {
    "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**26,
}
"""Options of a step on several GPUs whose layers are unrolled."""

# Permutes between GPUs of a process go by DMA engines, and a matmul beside them keeps its SMs
# (docs/parallelism.md). ``parallel.copies`` sends weights and gradients so.
PEER_COPIES: Options = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
"""Options of a step that sends by copies."""

# XLA replays whole stretches of a GPU program as CUDA graphs, and a trace then names the graph
# where it would name the operation and its scope.
_TRACEABLE_ON_GPU: Options = {"xla_gpu_enable_command_buffer": ""}


def compiler_options(
    config: RunConfig, *, on_gpu: bool, traceable: bool, by_copies: bool
) -> Options | None:
    """Returns a training step's XLA options: measured defaults, overridden by the config's; None
    for none.

    Args:
        traceable: whether a profiler's trace must name every operation, at some cost in launches.
        by_copies: whether the step sends by ``parallel.copies``.
    """
    options: Options = {}
    if on_gpu:
        unrolled = config.training.unroll >= config.model.num_layers
        if unrolled and config.mesh.num_devices > 1:
            options |= LARGE_MESSAGES
        options |= PEER_COPIES if by_copies else {}
        options |= _TRACEABLE_ON_GPU if traceable else {}
    named = parse_options(config.training.xla_options)
    require_known(named)
    return options | named or None


def parse_options(settings: Iterable[str]) -> Options:
    """Parses settings "name=value" into ``{name: value}``; names may begin with the two dashes of
    an XLA flag.

    Raises ConfigError for a setting of any other form.
    """
    options: Options = {}
    for setting in settings:
        name, separator, value = setting.strip().lstrip("-").partition("=")
        if not (separator and name):
            raise ConfigError(f"XLA option {setting!r} has another form than name=value")
        if value.lower() in ("true", "false"):
            options[name] = value.lower() == "true"
        else:
            number = whole_number(value.removeprefix("-"))
            sign = -1 if value.startswith("-") else 1
            options[name] = value if number is None else sign * number
    return options


def require_known(options: Mapping[str, str | int | bool]) -> None:
    """Raises ConfigError for an option name or value that this version of XLA does not accept."""
    for name, value in options.items():
        try:
            jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(
                f"XLA option {name}={value}: {str(error).splitlines()[0]} (jaxlib "
                f"{jaxlib.__version__}); mend it or leave it out of training.xla_options"
            ) from error


def describe_options(options: Mapping[str, str | int | bool] | None) -> str:
    """Formats XLA options as a config file writes them; "none" if there are none."""

    def text(value: str | int | bool) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    return ", ".join(f"{name}={text(value)}" for name, value in (options or {}).items()) or "none"
