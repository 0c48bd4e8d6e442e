"""Models by their names on the Hugging Face Hub: downloaded once, then read from its cache."""

import importlib
import re
from pathlib import Path

from jaxinfra.errors import ConfigError

_NAME = re.compile(r"([\w.\-]+/[\w.\-]+)(?:@([\w.\-/]+))?")
_READ = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_NOT_READ = [
    "*/*.safetensors",
    "consolidated*",
    "original/*",
    "onnx/*",
]  # the same weights in other layouts
_CACHED = "models--"


def model_path(name_or_path: Path) -> Path:
    """Returns a model's directory; downloads the model if ``name_or_path`` is a name on the Hub.

    A name is ORG/NAME or ORG/NAME@REVISION, unless it or ORG is a directory here. Access tokens,
    the cache's place and the offline mode are those of ``huggingface_hub`` (``HF_TOKEN``,
    ``HF_HOME``, ``HF_HUB_OFFLINE``).

    Raises:
        ConfigError: there is no such model, no access to it, or no network and no copy of it.
    """
    named = _NAME.fullmatch(str(name_or_path))
    if named is None or name_or_path.exists() or Path(name_or_path.parts[0]).exists():
        return name_or_path
    name, revision = named[1], named[2]
    hub = importlib.import_module("huggingface_hub")  # the network is for few commands
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        found = hub.snapshot_download(
            name, revision=revision, allow_patterns=_READ, ignore_patterns=_NOT_READ
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name} asks for access: accept its terms on the Hub, and give a token (HF_TOKEN, or "
            "hf auth login)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{name} has no revision {revision!r}; name a branch, a tag or a commit"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name_or_path} is no directory here, and the Hub has no model of this name, or it is "
            "private and asks for a token (HF_TOKEN)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        why = f"{error.__cause__ or error}".splitlines()[0]
        raise ConfigError(
            f"{name_or_path} is no directory here; as a model of the Hub it is not in the cache, "
            f"and the Hub cannot be reached ({why}); name a directory, or download it where there "
            "is a network (hf download) and copy the cache"
        ) from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"{name} could not be downloaded from the Hub: {why}") from error
    return Path(found)


def model_name(path: Path) -> str:
    """Returns the name of a model: ORG/NAME in the Hub's cache, else that of its directory.

    >>> model_name(Path("/cache/models--org--small/snapshots/0123"))
    'org/small'
    """
    folder = path.parent.parent.name
    if path.parent.name == "snapshots" and folder.startswith(_CACHED):
        return "/".join(folder.removeprefix(_CACHED).split("--"))
    return path.resolve().name
