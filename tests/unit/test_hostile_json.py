"""JSON that parses and says anything: each reader takes it or refuses it in words.

Every node of real artefacts is replaced by every value of a list, or left out.
"""

import copy
import functools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxinfra.checkpoint import directory_layout, metadata
from jaxinfra.checkpoint.model_directory import FORMAT, read_model_directory
from jaxinfra.checkpoint.tensor_files import open_tensor_files
from jaxinfra.config import codec
from jaxinfra.config.presets import run_preset
from jaxinfra.config.run import RunConfig
from jaxinfra.data.chat_template import load_chat_template
from jaxinfra.data.tokenizer import Tokenizer, bytes_tokenizer
from jaxinfra.errors import ConfigError, JaxinfraError
from jaxinfra.hf import from_hf_config
from jaxinfra.runtime.files import require_type
from jaxinfra.serving.load import sampling_defaults

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
_LEFT_OUT = object()
VALUES = (
    *(None, True, False, [], {}, [[]], {"a": 1}, ["x", 5], [None], "", "x", "\ud800", "llama"),
    *(0, -1, 1, 2, 3, 7, -5, 1 << 40, 10**30, 10**400, 1.5, -0.0, 1e308, 1e-320, 1e20, "9" * 400),
    _LEFT_OUT,
)
_FEW = 80  # of an artefact, where not all are tried

type Read = Callable[[Any], object]


def nodes(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of a value and of what is in it; of long lists the first three."""
    yield path
    parts: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        parts = enumerate(value[:3])
    for name, part in parts:
        yield from nodes(part, (*path, name))


def replaced(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    value = copy.deepcopy(value)
    parent = functools.reduce(lambda node, name: node[name], path[:-1], value)
    if new is _LEFT_OUT:
        parent.pop(path[-1], None) if isinstance(parent, dict) else parent.pop(path[-1])
    else:
        parent[path[-1]] = new
    return value


def hf_configs() -> dict[str, dict]:
    """Each with the keys that the others have: what one family ignores another computes with."""
    found = {
        file.parent.name: json.loads(file.read_text()) for file in GOLDEN.glob("*/config.json")
    }
    return dict(sorted(found.items()))


def read_hf(values: Any) -> None:
    require_type(values, dict[str, Any], where="config.json", error=ConfigError)
    from_hf_config(values)


def read_run(values: Any) -> None:
    require_type(values, dict[str, Any], where="config.json", error=ConfigError)
    codec.from_dict(RunConfig, values)


def of_file(file: Path, read: Callable[[Path], object]) -> Read:
    def write_and_read(values: Any) -> None:
        file.write_text(json.dumps(values))
        read(file.parent)

    return write_and_read


def of_run_config(place: Path) -> tuple[Any, Read]:
    return json.loads(codec.to_json(run_preset("tiny_moe"))), read_run


def of_tokenizer(place: Path) -> tuple[Any, Read]:
    bytes_tokenizer().save(place / "tokenizer.json")
    values = json.loads((place / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    values["model"]["vocab"] = {name: vocabulary[name] for name in list(vocabulary)[:5]}
    file = place / "tokenizer.json"
    return values, of_file(file, lambda _: Tokenizer.load(file).encode("ab c"))


def of_chat_template(place: Path) -> tuple[Any, Read]:
    values = {
        "chat_template": [{"name": "default", "template": "{{ bos_token }}{{ messages[0].role }}"}],
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
    }
    message = {"role": "user", "content": "x"}
    file = place / "tokenizer_config.json"
    return values, of_file(file, lambda path: load_chat_template(path).render([message]))


def of_separators(place: Path) -> tuple[Any, Read]:
    bytes_tokenizer().save(place / "tokenizer.json")
    values = {"eos_token_id": [1, 2], "temperature": 0.5}

    def read(path: Path) -> None:
        Tokenizer.load(path / "tokenizer.json")
        sampling_defaults(path)

    return values, of_file(place / "generation_config.json", read)


def of_model_config(place: Path) -> tuple[Any, Read]:
    values = {"format": FORMAT, "model": codec.to_dict(run_preset("tiny").model), "hf": None}
    return values, of_file(place / "config.json", read_model_directory)


def of_index(place: Path) -> tuple[Any, Read]:
    shutil.copytree(GOLDEN / "qwen3", place, dirs_exist_ok=True)
    file = place / "model.safetensors.index.json"
    return json.loads(file.read_text()), of_file(file, open_tensor_files)


def of_tensor_file(place: Path) -> tuple[Any, Read]:
    data = (GOLDEN / "llama" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    def read(values: Any) -> None:
        said = json.dumps(values).encode()
        rest = data[8 + length :]
        (place / "model.safetensors").write_bytes(len(said).to_bytes(8, "little") + said + rest)
        open_tensor_files(place)

    return header, read


def of_metadata(place: Path) -> tuple[Any, Read]:
    leaf = metadata.Leaf(shape=(2, 3), dtype="float32")
    written = metadata.Metadata(
        step=4,
        data_state={"step": 4},
        heldout_loss=1.5,
        identity={"model": {"width": 3}},
        settings={},
        tree={"parameters/a": leaf},
    ).encode()
    return json.loads(written), of_file(place / "metadata.json", metadata.read)


def of_manifest(place: Path) -> tuple[Any, Read]:
    checkpoint = place / "step_00000004"
    checkpoint.mkdir()
    (checkpoint / "metadata.json").write_text("{}")
    directory_layout.write_manifest(checkpoint, step=4)
    file = checkpoint / "manifest.json"
    return json.loads(file.read_text()), of_file(file, lambda _: directory_layout.verify(place, 4))


ARTEFACTS = (
    *(of_run_config, of_tokenizer, of_chat_template, of_separators, of_model_config, of_index),
    *(of_tensor_file, of_metadata, of_manifest),
)


def require_words(values: Any, read: Read, *, num: int | None) -> int:
    """Tries all replacements, or so many of them by chance; returns how many were tried."""
    cases = [
        (path, new) for path in nodes(values) for new in VALUES if path or new is not _LEFT_OUT
    ]
    if num is not None and num < len(cases):
        cases = random.Random(0).sample(cases, num)
    words = []
    for path, new in cases:
        try:
            read(replaced(values, path, new))
        except JaxinfraError as error:
            words.append(str(error))
        except Exception as error:
            error.add_note(f"{path} replaced by {new!r}")
            raise
    assert all(words)
    return len(cases)


@pytest.mark.parametrize("artefact", ARTEFACTS, ids=lambda artefact: artefact.__name__)
@pytest.mark.parametrize("num", [_FEW, pytest.param(None, marks=pytest.mark.slow)])
def test_readers_take_or_refuse(tmp_path, artefact, num):
    values, read = artefact(tmp_path)
    read(values)
    assert require_words(values, read, num=num) >= 80


@pytest.mark.parametrize("num", [_FEW, pytest.param(None, marks=pytest.mark.slow)])
def test_hugging_face_configs_are_taken_or_refused(num):
    """Keys of other families too."""
    configs = hf_configs()
    names = sorted(set().union(*configs.values()))
    for config in configs.values():
        read_hf(config)
        whole = {**dict.fromkeys(names), **config}
        assert require_words(whole, read_hf, num=num) >= _FEW
