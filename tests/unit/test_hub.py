"""Models by their names on the Hub: from its cache without a network, and refusals that say why."""

import pathlib

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from jaxinfra.checkpoint.hub import model_name, model_path
from jaxinfra.checkpoint.model_directory import read_model_directory
from jaxinfra.errors import ConfigError

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"
COMMIT = "0123456789" * 4


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache that has one model, at two revisions' names, where nothing can be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    kept = tmp_path / "models--org--small"
    snapshot, blobs = kept / "snapshots" / COMMIT, kept / "blobs"
    for folder in (snapshot, blobs, kept / "refs"):
        folder.mkdir(parents=True)
    for revision in ("main", "v1"):
        (kept / "refs" / revision).write_text(COMMIT)
    for file in (GOLDEN / "llama").iterdir():
        (blobs / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(pathlib.Path("../../blobs") / file.name)
    monkeypatch.chdir(tmp_path)
    return snapshot


@pytest.mark.parametrize("name", ["org/small", "org/small@v1", f"org/small@{COMMIT}"])
def test_a_name_is_read_from_the_cache(cache, name):
    found = model_path(pathlib.Path(name))
    assert found == cache
    assert model_name(found) == "org/small"
    assert read_model_directory(found).config.vocab_size > 0


def test_directories_here_come_first(cache, tmp_path):
    for name in ("here", "org/small"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("here", "here/nothing", "org/small", "org/other", "gpt2", "/a/b"):
        assert model_path(pathlib.Path(name)) == pathlib.Path(name)
    assert model_name(tmp_path / "here") == "here"


def test_no_network_is_said_in_a_line(cache):
    with pytest.raises(ConfigError, match=r"^org/other is no directory here; .*cannot be reached"):
        model_path(pathlib.Path("org/other"))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (errors.GatedRepoError, "org/small asks for access: .*HF_TOKEN"),
        (errors.RevisionNotFoundError, "has no revision 'v9'"),
        (errors.RepositoryNotFoundError, "the Hub has no model of this name"),
        (errors.HfHubHTTPError, "could not be downloaded from the Hub: busy"),
    ],
)
def test_refusals_of_the_hub_say_what_to_do(cache, monkeypatch, kind, words):
    def refuse(*_, **__):
        raise kind("busy", response=httpx2.Response(400, request=httpx2.Request("GET", "http://h")))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match=words):
        model_path(pathlib.Path("org/small@v9"))


def test_weights_of_other_layouts_are_not_downloaded(monkeypatch, cache):
    asked = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **given: asked.update(given, name=name) or str(cache),
    )
    model_path(pathlib.Path("org/large"))
    files = ["config.json", "model-1.safetensors", "consolidated.safetensors", "onnx/a.safetensors"]
    files += ["pytorch_model.bin", "tokenizer.json", "original/params.json", "README.md"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files,
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert [*kept] == ["config.json", "model-1.safetensors", "tokenizer.json"]
    assert asked["name"] == "org/large"
