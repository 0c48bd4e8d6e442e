"""One JAX/XLA system for training and serving large language models on NVIDIA GPUs."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfra.serving.load import load_model as load_model

__version__ = "0.1.0"

# Public names by module, imported at first use: every import within the package runs this file
# first, so importing them here would make the lowest floor load all of those above it.
_PUBLIC = {"load_model": "jaxinfra.serving.load"}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
