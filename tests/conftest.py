"""Every test runs on 8 virtual CPU devices, under strict promotion, with warnings as errors and the
shapes that the product's annotations name checked.
"""

import contextlib
import gc
import hashlib
import os
import pathlib
import platform
import sys

import fast_compiling

# A GPU suite sets JAX_PLATFORMS itself; everything else must not touch an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is what a suite waits for.
if os.environ["JAX_PLATFORMS"] != "cpu":
    # Several workers share a GPU, so each gives memory back as its arrays die; by default a process
    # keeps the most that it ever had. Plain references need no fast matmuls.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    quick = "--xla_gpu_autotune_level=0"
else:
    quick = fast_compiling.FLAGS
if quick.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()
# Beside flags of whoever starts the suite, and where it has a GPU, too.
if fast_compiling.PATIENCE not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += f" {fast_compiling.PATIENCE}"

import hypothesis
import hypothesis.internal.conjecture.providers
import jax
import jaxlib
import pytest
import shape_checks
from hypothesis.internal import charmap
from hypothesis.internal.intervalsets import IntervalSet

# By default a seventh of the time goes to collecting garbage. Rarer than in commands
# (jaxinfra.cli.entry), whose programs are few: traces of many leave more behind.
gc.set_threshold(100_000, 20, 10)

_CACHE_BYTES = 2 << 30


def _keep_compiled_programs() -> None:
    """In the checkout, for the suite's other workers and for later runs; ``make clean`` removes it.

    The key of an entry has the program, its flags and the versions, but not what the CPU can do.
    No size is given to JAX: with one it reads the whole directory at each entry that it writes.
    """
    facts = pathlib.Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    key = f"{jaxlib.__version__} {platform.machine()} {platform.processor()} {features}"
    cpu = hashlib.sha256(key.encode()).hexdigest()[:16]
    place = pathlib.Path(__file__).parents[1] / ".jax_cache" / cpu
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _drop_oldest(place)
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _drop_oldest(place: pathlib.Path) -> None:
    """Leaves the newest ``_CACHE_BYTES``, before the workers of a session begin."""
    kept = 0
    with contextlib.suppress(FileNotFoundError):  # another session drops them, or there are none
        for file in sorted(os.scandir(place), key=lambda file: -file.stat().st_mtime_ns):
            kept += file.stat().st_size
            if kept > _CACHE_BYTES:
                os.unlink(file)


if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)
    if jax.config.jax_compilation_cache_dir is None:
        _keep_compiled_programs()
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
shape_checks.install()

# A busy machine is no fault: pytest's own limit ends what hangs.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")
# By default every worker reads the syntax of all product modules, for constants to draw from.
hypothesis.internal.conjecture.providers.is_local_module_file = lambda path: False
# And in a new checkout tries which of all characters UTF-8 has: all but surrogates.
_UTF8 = IntervalSet(((0, 0xD7FF), (0xE000, sys.maxunicode))), IntervalSet(())
charmap.intervals_from_codec = {"utf-8": _UTF8}.__getitem__


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what a command's -m does not name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow what ``slow_cases`` names, and all but what ``quick_cases`` names; a name that
    is no case of its test is an error.
    """
    unknown: dict[str, set[str]] = {}
    for item in items:
        for mark in (*item.iter_markers("slow_cases"), *item.iter_markers("quick_cases")):
            test, _, _ = item.nodeid.partition("[")
            unknown.setdefault(test, set(mark.args)).discard(item.callspec.id)
            if (item.callspec.id in mark.args) == (mark.name == "slow_cases"):
                item.add_marker(pytest.mark.slow)
    unknown = {test: names for test, names in unknown.items() if names}
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"marks name cases that are not there: {unknown}")


def pytest_collection_finish() -> None:
    """All that was imported stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()
