"""Regenerates tools/requirements/*.lock: `make lock`, ARGS=--upgrade for newer versions.
They hold versions and hashes for every platform and Python that pyproject.toml admits, and no
hosts. Only the main index is asked: an extra one may lack some files of a version.
"""

import re
import sys

from bootstrap import JAX_SERIES, ROOT, obtain_uv, run, series_suffix, uv_settings

FORM = ["--universal", "--generate-hashes", "--no-header", "--no-annotate"]
FORM += ["--no-emit-index-url", "--no-emit-find-links"]
GROUP = ["--group", "pyproject.toml:dev", "--extra", "serve", "pyproject.toml"]
FOLDER = "tools/requirements"


def inputs() -> dict[str, list[str]]:
    """Inputs of each lock. A CUDA lock comes first, so that the CPU lock agrees with it."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (lowest,) = re.findall(r'^requires-python = ">=([\d.]+)"', text, re.MULTILINE)
    python = ["--python-version", lowest]
    found = {"bootstrap": ["--python-version", "3.8", f"{FOLDER}/bootstrap.in"]}
    found["docs"] = [*python, "--group", "pyproject.toml:docs"]
    for jax in JAX_SERIES:
        suffix, held = series_suffix(jax), ROOT / ".bootstrap" / f"jax{jax}.in"
        held.parent.mkdir(exist_ok=True)
        held.write_text(f"jax=={jax}.*\n", "utf-8")  # uv takes constraints from files only
        common = [*python, *GROUP, "--constraint", str(held)]
        found[f"cuda{suffix}"] = [*common, "--extra", "cuda"]
        found[f"cpu{suffix}"] = [*common, "--constraint", f"{FOLDER}/cuda{suffix}.lock"]
    return found


if __name__ == "__main__":
    extra = ("UV_INDEX", "UV_FIND_LINKS", "UV_INDEX_STRATEGY")
    env = {name: value for name, value in uv_settings().items() if name not in extra}
    uv = str(obtain_uv(ROOT))
    for name, given in inputs().items():
        lock = f"{FOLDER}/{name}.lock"
        command = [uv, "pip", "compile", *FORM, *sys.argv[1:], *given, "--output-file", lock]
        run(command, env, ROOT, doing=f"locking {lock}")
        print(f"wrote {lock}")
