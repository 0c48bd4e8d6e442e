"""JAX's own cache of compiled programs, which every command uses."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def keep_compiled_programs(cache_dir: Path) -> None:
    """Caches compiled programs on disk, so that a second start on the same devices skips
    compilation. A user's ``JAX_COMPILATION_CACHE_DIR`` and time limit are respected.
    """
    if jax.config.jax_compilation_cache_dir is None:
        directory = cache_dir / "xla"
        directory.mkdir(parents=True, exist_ok=True)  # JAX itself would only warn
        jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # A start has many programs that compile within JAX's default of a second.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


_lock = threading.Lock()
_num_without = 0
_was_enabled = True


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Compiles without JAX's cache within a ``with`` block, in all threads of the process.

    Executables that come from JAX's cache cannot be serialized again: XLA leaves out functions.
    """
    global _num_without, _was_enabled
    with _lock:
        if not _num_without:
            _was_enabled = jax.config.jax_enable_compilation_cache
            _enable(False)
        _num_without += 1
    try:
        yield
    finally:
        with _lock:
            _num_without -= 1
            if not _num_without:
                _enable(_was_enabled)


def cache_for_stages(num_stages: int) -> contextlib.AbstractContextManager[None]:
    """Compiles without JAX's cache within a ``with`` block if a pipeline's stages are CPU devices.

    XLA's CPU runtime keeps the order of all collectives of a program that it compiled. In one that
    it reads back, only those within one loop or branch have an order. A stage's actions are
    branches, so a device met its neighbours in other collectives: values were wrong, or it waited
    for ever.
    """
    if num_stages > 1 and jax.default_backend() == "cpu":
        return without_cache()
    return contextlib.nullcontext()


def _enable(value: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", value)
    compilation_cache.reset_cache()  # JAX looks at the setting once, until then
