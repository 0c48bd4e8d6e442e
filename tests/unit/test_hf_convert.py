"""Conversion both ways, bitwise; damage named; each device reads its shard only."""

import dataclasses
import json
import pathlib
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jaxinfra
from jaxinfra.checkpoint.finite import nonfinite_allowed
from jaxinfra.checkpoint.model_directory import cast, read_model_directory, write_hf, write_ours
from jaxinfra.checkpoint.onto_mesh import place_parameters
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.cli.main import main
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.presets import models
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.hf import by_path, from_hf_config
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def tensors(directory):
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_tensors(got, want):
    assert sorted(got) == sorted(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].shape == value.shape, name
        assert got[name].tobytes() == value.tobytes(), name


def convert(source, destination, *options):
    assert main(["convert", str(source), str(destination), *options]) == 0
    return destination


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(GOLDEN / "llama", tmp_path / "copy")


def edit(directory, change):
    """Rewrites the weights; ``change`` edits the dict of tensors in place."""
    values = load_file(directory / "model.safetensors")
    change(values)
    save_file(values, directory / "model.safetensors")


@pytest.mark.quick_cases(
    "deepseek_v3",
    "gemma2",
    "gpt2",
    "gpt_oss",
)
@pytest.mark.parametrize("name", CASES)
def test_there_and_back_is_bitwise(name, tmp_path):
    ours = convert(GOLDEN / name, tmp_path / "ours", "--max-shard-gb", "2e-5")
    back = convert(ours, tmp_path / "back")
    assert_same_tensors(tensors(back), tensors(GOLDEN / name))
    assert (back / "config.json").read_text().split() == (
        GOLDEN / name / "config.json"
    ).read_text().split()
    # Ours are other tensors, in several files, and the same numbers.
    assert len(list(ours.glob("*.safetensors"))) > 1
    elements = [sum(x.size for x in tensors(path).values()) for path in (ours, back)]
    assert elements[0] == elements[1]


@pytest.mark.slow_cases("gemma2", "llama_linear")
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "llama_linear", "phi3", "qwen2"])
def test_pieces_of_tensors_make_the_same_files(name, tmp_path):
    """Rows of a few elements at a time, whatever a tensor's layout is."""
    given = read_model_directory(GOLDEN / name)
    definition = define_model(given.config, execution_on())
    options = dict(
        hf=given.hf,
        tokenizer_directory=GOLDEN / name,
        dtype=None,
        max_shard_bytes=10**9,
    )
    for piece_bytes in (300, 10**9):
        path = tmp_path / str(piece_bytes)
        write_ours(
            given.open(definition), definition, path / "ours", piece_bytes=piece_bytes, **options
        )
        ours = read_model_directory(path / "ours").open(definition)
        write_hf(ours, definition, path / "back", piece_bytes=piece_bytes, **options)
        assert_same_tensors(tensors(path / "back"), tensors(GOLDEN / name))
    assert_same_tensors(*(tensors(tmp_path / size / "ours") for size in ("300", "1000000000")))


def test_shards_and_index_are_what_other_readers_expect(tmp_path):
    ours = convert(GOLDEN / "llama", tmp_path / "ours")
    back = convert(ours, tmp_path / "back", "--max-shard-gb", "4e-5")
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = sorted(back.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    total = 0
    for file in files:
        with safe_open(file, framework="np") as opened:
            assert opened.metadata() == {"format": "pt"}
            names = list(opened.keys())
            assert {index["weight_map"].pop(name) for name in names} == {file.name}
            sizes = [opened.get_tensor(name).nbytes for name in names]
        assert sum(sizes) <= 4e4 or len(sizes) == 1
        total += sum(sizes)
    assert not index["weight_map"]
    assert index["metadata"]["total_size"] == total


def test_dtype_is_chosen(tmp_path):
    ours = convert(GOLDEN / "llama", tmp_path / "ours", "--dtype", "bfloat16")
    back = convert(ours, tmp_path / "back")
    rounded = {
        name: np.asarray(jnp.asarray(value).astype(jnp.bfloat16))
        for name, value in tensors(GOLDEN / "llama").items()
    }
    assert_same_tensors(tensors(back), rounded)
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
    model = jaxinfra.load_model(back, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("bfloat16")}


def test_dtypes_that_cannot_hold_the_weights_are_refused(copy, tmp_path, capsys):
    edit(copy, lambda values: values["lm_head.weight"].__setitem__((3, 4), 1e5))
    assert main(["convert", str(copy), str(tmp_path / "out"), "--dtype", "float16"]) == 1
    assert "unembedding/table: 1 elements are too large for float16" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]
    assert main(["convert", str(copy), str(tmp_path / "out"), "--dtype", "int8"]) == 1
    assert "unknown dtype 'int8'" in capsys.readouterr().err


def test_layers_of_different_dtypes_need_one_named(copy, tmp_path, capsys):
    name = "model.layers.1.mlp.up_proj.weight"
    edit(copy, lambda values: values.__setitem__(name, values[name].astype(np.float16)))
    assert main(["convert", str(copy), str(tmp_path / "out")]) == 1
    assert "mlp/up/weight are stored as float16 and float32" in capsys.readouterr().err
    back = convert(convert(copy, tmp_path / "out", "--dtype", "float32"), tmp_path / "back")
    want = {key: value.astype(np.float32) for key, value in tensors(copy).items()}
    assert_same_tensors(tensors(back), want)


def test_infinities_that_were_there_stay_where_that_is_asked_for():
    x = np.array([np.inf, 1.0], np.float32)
    with pytest.raises(CheckpointError, match="tensor x holds numbers that are not finite"):
        cast(x, np.dtype("float16"), "x")
    with nonfinite_allowed():
        np.testing.assert_array_equal(cast(x, np.dtype("float16"), "x"), x.astype(np.float16))


def test_nothing_is_overwritten(copy, capsys):
    assert main(["convert", str(GOLDEN / "llama"), str(copy)]) == 1
    assert "exists and is not an empty directory" in capsys.readouterr().err


def test_tokenizer_files_come_along(copy, tmp_path):
    words = {word: number for number, word in enumerate(["to", "be", "or", "not"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="not"))
    tokenizer.save(str(copy / "tokenizer.json"))
    (copy / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (copy / "notes.txt").write_text("not part of the model")
    back = convert(convert(copy, tmp_path / "ours"), tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (copy / name).read_bytes()
    assert not (back / "notes.txt").exists()


def test_bare_and_tied_tensors_of_older_files(tmp_path):
    """The first GPT-2 files have no root to their names, and masks among the weights."""
    directory = shutil.copytree(GOLDEN / "gpt2", tmp_path / "copy")
    want = tensors(directory)
    old = {name.removeprefix("transformer."): value for name, value in want.items()}
    old["h.0.attn.bias"] = np.tril(np.ones((1, 1, 48, 48), np.float32))
    old["lm_head.weight"] = old["wte.weight"].copy()
    save_file(old, directory / "model.safetensors")
    back = convert(convert(directory, tmp_path / "ours"), tmp_path / "back")
    assert_same_tensors(tensors(back), want)
    old["lm_head.weight"][5, 6] += 1.0
    save_file(old, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from wte.weight"):
        jaxinfra.load_model(directory)


def truncated(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garbage(directory):
    (directory / "model.safetensors").write_bytes(b"\x00" * 64)


def removed(name):
    return lambda directory: edit(directory, lambda values: values.pop(name))


def added(directory):
    edit(directory, lambda values: values.__setitem__("model.extra.weight", np.ones(3, np.float32)))


def reshaped(directory):
    edit(
        directory,
        lambda values: values.__setitem__("model.norm.weight", np.ones(35, np.float32)),
    )


def quantized(directory):
    edit(
        directory,
        lambda values: values.__setitem__("model.norm.weight", np.ones(36, np.int8)),
    )


def pickled(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def one_more_layer(directory):
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 3}))


def not_json(directory):
    (directory / "config.json").write_text("{")


DAMAGE = {
    "truncated": (truncated, CheckpointError, "model.safetensors is truncated or damaged"),
    "garbage": (garbage, CheckpointError, "model.safetensors is truncated or damaged"),
    "missing": (
        removed("model.layers.1.mlp.up_proj.weight"),
        CheckpointError,
        r"1 tensor \(model.layers.1.mlp.up_proj.weight\) missing",
    ),
    "extra": (added, CheckpointError, r"1 tensor \(model.extra.weight\) not part of the model"),
    "reshaped": (reshaped, CheckpointError, r"model.norm.weight has shape \[35\].*\[36\]"),
    "quantized": (quantized, ConfigError, "model.norm.weight has elements of type int8"),
    "pickled": (pickled, ConfigError, "has neither model.safetensors nor"),
    "one_more_layer": (one_more_layer, CheckpointError, r"9 tensors \(model.layers.2.*, ...\)"),
    "not_json": (not_json, ConfigError, "not JSON"),
}


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGE.values(), ids=list(DAMAGE))
def test_damage_is_named_in_one_line(copy, damage, error, message):
    damage(copy)
    with pytest.raises(error, match=message) as caught:
        jaxinfra.load_model(copy)
    assert "\n" not in str(caught.value)


def lost_shard(directory):
    (directory / "model-00002-of-00003.safetensors").unlink()


def swapped_shards(directory):
    first, second = (directory / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    first.rename(directory / "x")
    second.rename(first)
    (directory / "x").rename(second)


def broken_index(directory):
    (directory / "model.safetensors.index.json").write_text('{"weights": {}}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lost_shard, "model-00002-of-00003.safetensors is missing"),
        (swapped_shards, "tensors are not where it says"),
        (broken_index, "weight_map: null is no object"),
    ],
)
def test_damaged_shards_are_named(tmp_path, damage, message):
    directory = shutil.copytree(GOLDEN / "qwen3", tmp_path / "copy")
    damage(directory)
    with pytest.raises(CheckpointError, match=message):
        jaxinfra.load_model(directory)


def test_damage_to_ours_is_named(tmp_path):
    ours = convert(GOLDEN / "llama", tmp_path / "ours")
    edit(ours, lambda values: values.pop("blocks/0/mlp/up/weight"))
    with pytest.raises(CheckpointError, match=r"1 tensor \(blocks/0/mlp/up/weight\) missing"):
        jaxinfra.load_model(ours)


@dataclasses.dataclass
class Counting:
    """A source that notes what is read of it."""

    source: object
    reads: list

    def dtype(self, path):
        return self.source.dtype(path)

    def read(self, path, index):
        result = self.source.read(path, index)
        self.reads.append((path, result.nbytes))
        return result


@pytest.mark.parametrize("piece_bytes", [1, 10**9])
def test_each_device_reads_its_shard_only(tmp_path, piece_bytes):
    config = dataclasses.replace(models.tiny().with_layers(3), vocab_size=64, tie_embeddings=False)
    definition = define_model(config, execution_on())
    parameters = definition.initialize(jax.random.key(3))
    write_hf(
        LiveParameters(arrays=by_path(parameters)),
        definition,
        tmp_path / "model",
        hf=None,
        tokenizer_directory=tmp_path,
        dtype=None,
        max_shard_bytes=10**6,
    )
    directory = read_model_directory(tmp_path / "model")
    assert directory.config == config
    placement = Placement(mesh=make_mesh(MeshConfig(replica=2, fsdp=2, tensor=2)))
    counting = Counting(source=directory.open(definition), reads=[])
    shardings = placement.parameters(definition)
    placed = place_parameters(counting, definition, shardings, piece_bytes=piece_bytes)
    chex.assert_trees_all_equal(placed, parameters, strict=True)
    assert jax.tree.map(lambda x: x.sharding, placed) == shardings
    for path, leaf in by_path(placed).items():
        sizes = [size for name, size in counting.reads if name == path]
        # Every element once, and no more at a time than a device's shard, or a layer of it.
        assert sum(sizes) == leaf.nbytes
        largest = leaf.addressable_shards[0].data.nbytes
        if piece_bytes == 1 and path.startswith("blocks/"):
            largest //= config.num_layers
        assert max(sizes) <= largest


def test_config_of_a_converted_model_is_kept(tmp_path):
    ours = convert(GOLDEN / "phi3", tmp_path / "ours")
    values = json.loads((GOLDEN / "phi3" / "config.json").read_text())
    directory = read_model_directory(ours)
    assert (directory.config, directory.hf) == (from_hf_config(values), values)
    # A model that was changed since is described anew.
    ours_values = json.loads((ours / "config.json").read_text())
    ours_values["model"]["stacks"][0]["pattern"][0]["mixer"]["window"] = 5
    (ours / "config.json").write_text(json.dumps(ours_values))
    back = convert(ours, tmp_path / "back")
    written = json.loads((back / "config.json").read_text())
    assert from_hf_config(written).blocks[0].mixer.window == 5
