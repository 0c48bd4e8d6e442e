"""Regenerates tools/requirements/*.lock with the locked uv: `make lock`, ARGS=--upgrade for newer;
ARGS=docs regenerates that one alone.

The locks hold versions and hashes and no host names; they serve every platform and Python that
pyproject.toml admits. Only the main index is asked: an extra one may lack some files of a version.
"""

import os
import pathlib
import re
import sys

import bootstrap_index
from bootstrap import JAX_SERIES, ROOT, Request, Setup, obtain_uv, series_suffix
from bootstrap_run import SetupError, run, say

FORM = ["--universal", "--generate-hashes", "--no-header", "--no-annotate"]
NO_HOSTS = ["--no-emit-index-url", "--no-emit-find-links"]
GROUP = ["--group", "pyproject.toml:dev", "--extra", "serve", "pyproject.toml"]


def lowest_python() -> str:
    """The oldest Python that pyproject.toml admits."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    return re.findall(r'^requires-python = ">=([\d.]+)"', text, re.MULTILINE)[0]


def locks_of(jax: str, python: list[str]) -> dict[str, list[str]]:
    """The inputs of a series' locks; the CUDA lock first, so that the CPU lock agrees with it."""
    suffix = series_suffix(jax)
    held = ROOT / ".bootstrap" / f"jax{jax}.in"  # uv takes constraints from files only
    held.parent.mkdir(exist_ok=True)
    held.write_text(f"jax=={jax}.*\n", "utf-8")
    inputs = [*python, *GROUP, "--constraint", str(held)]
    return {
        f"cuda{suffix}": [*inputs, "--extra", "cuda"],
        f"cpu{suffix}": [*inputs, "--constraint", f"tools/requirements/cuda{suffix}.lock"],
    }


def main(arguments: list[str]) -> int:
    """Writes the locks."""
    env = bootstrap_index.uv_environment(os.environ, pathlib.Path.home())
    for name in ("UV_INDEX", "UV_FIND_LINKS", "UV_INDEX_STRATEGY"):
        env.pop(name, None)
    python = ["--python-version", lowest_python()]
    locks = {"bootstrap": ["--python-version", "3.8", "tools/requirements/bootstrap.in"]}
    locks["docs"] = [*python, "--group", "pyproject.toml:docs"]
    for jax in JAX_SERIES:
        locks.update(locks_of(jax, python))
    chosen = [each for each in arguments if each in locks] or list(locks)
    options = [each for each in arguments if each not in locks]
    try:
        uv = obtain_uv(Setup(ROOT, Request(), "cpu"), [pathlib.Path(sys.executable)])
        for name in chosen:
            lock = f"tools/requirements/{name}.lock"
            command = [str(uv), "pip", "compile", *FORM, *NO_HOSTS, *options]
            command += [*locks[name], "--output-file", lock]
            run(command, {**env, "UV_NO_PROGRESS": "1"}, ROOT, doing=f"locking {lock}")
            say(f"wrote {lock}")
    except SetupError as error:
        print(f"lock: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
