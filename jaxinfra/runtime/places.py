"""Where things of a user are kept."""

import os
import re
from pathlib import Path

from jaxinfra.errors import ConfigError


def local_path(place: str | Path) -> Path:
    """The path of a run; raises ConfigError for a URL such as gs://bucket/run.

    Checkpoints are committed by renaming, which an object store does not do at once.
    """
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", str(place)):
        raise ConfigError(
            f"{place} is a URL: runs are kept in directories that all processes see, as a shared "
            "file system has them; name one, and copy the run when it is done"
        )
    return Path(place)


def user_cache() -> Path:
    """Where tokenized corpora, compiled programs and measurements are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxinfra"
