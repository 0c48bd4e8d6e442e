"""Builds the documentation site: `make docs`. Its tools have an environment of their own.

Pages are made from the package first (every setting, the presets), then mkdocs builds them with
those of docs/; a warning or a broken link fails it. The result is build/site.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

from bootstrap import ROOT, SetupError, obtain_uv, run, uv_settings

VENV = ROOT / ".venv-docs"
LOCK = ROOT / "tools" / "requirements" / "docs.lock"


def ensure_environment() -> pathlib.Path:
    """The environment's mkdocs; made anew where the lock has changed."""
    stamp, digest = VENV / ".lock-digest", hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text("utf-8") != digest:
        (ROOT / ".bootstrap").mkdir(exist_ok=True)
        uv = str(obtain_uv(ROOT))
        python = str(VENV / "bin" / "python")
        make = [uv, "venv", "--clear", "--no-project", "--python", sys.executable, str(VENV)]
        run(make, uv_settings(), ROOT, doing="making .venv-docs")
        sync = [uv, "pip", "sync", "--require-hashes", "--python", python]
        run([*sync, str(LOCK)], uv_settings(), ROOT, doing="installing docs.lock")
        stamp.write_text(digest, "utf-8")
    return VENV / "bin" / "mkdocs"


def main() -> int:
    """Builds; returns mkdocs' exit code."""
    try:
        mkdocs = ensure_environment()
    except SetupError as error:
        print(f"docs: error: {error}", file=sys.stderr)
        return 1
    pages = ROOT / "build" / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("mkdocs.yml"))
    made = [sys.executable, str(ROOT / "tools" / "docs_pages.py"), str(pages)]
    if subprocess.run(made, cwd=ROOT, check=False).returncode:
        return 1
    build = [str(mkdocs), "build", "--strict", "--quiet", "--config-file", "docs/mkdocs.yml"]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # the theme's word on its successor
    code = subprocess.run(build, cwd=ROOT, env=quiet, check=False).returncode
    if code == 0:
        print(f"wrote {(ROOT / 'build' / 'site').relative_to(ROOT)}/index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
