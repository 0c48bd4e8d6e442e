"""Every public name has a docstring with its arguments, its errors and an example, which runs.

An example that names a directory under ``runs/`` reads or trains a model, so it runs with the slow
tests; all of these share one small run. Examples take the imports of ``GLOBALS`` for granted.
"""

import dataclasses
import doctest
import inspect
import pathlib
import re
import sys
import types

import docs_pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxinfra
import pallas_kernels

GLOBALS = {
    "dataclasses": dataclasses,
    "jax": jax,
    "jaxinfra": jaxinfra,
    "jnp": jnp,
    "nnx": nnx,
    "np": np,
    "pallas_kernels": pallas_kernels,
    "pathlib": pathlib,
}
PUBLIC = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (jaxinfra, pallas_kernels)
    for name in docs_pages.public_names(package)
}
FUNCTIONS = [name for name, thing in PUBLIC.items() if inspect.isfunction(thing)]
COMPILED = ("flash_attention", "decode_layers", "scaled_grouped", "quantize_swiglu", "append_heads")
"""Kernels whose programs take up to a second each to compile."""
WITHOUT_ERRORS = {"jaxinfra.presets", "jaxinfra.policy_loss"}  # a part that no name has finds none

SMALL = """
preset = "tiny"

[model]
vocab_size = 300
model_dim = 16
[model.stacks.0]
repeats = 1
[model.stacks.0.pattern.0.mixer]
num_q_heads = 4
num_kv_heads = 2
head_dim = 4
[model.stacks.0.pattern.0.feed_forward]
hidden_dim = 32

[data]
source = "texts"
heldout_fraction = 0.3
tokenizer.kind = "bytes"

[optimizer]
warmup_steps = 0

[training]
steps = 4
batch_size = 2
sequence_length = 32
"""
# One step of 7 us on a GPU: a matmul for 4, a norm for 2, and a gap between them.
PROFILE = """
planes { name: "/device:GPU:0"
  lines { name: "Stream #1"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000000 }
    events { metadata_id: 2 offset_ps: 5000000000 duration_ps: 2000000000 } }
  event_metadata { key: 1 value { id: 1 name: "nvjet_sm90_128x160" } }
  event_metadata { key: 2 value { id: 2 name: "loop_multiply_fusion" } } }
"""


def example_of(name: str) -> doctest.DocTest:
    """What the docstring of a public name shows, without those of its methods."""
    text = inspect.getdoc(PUBLIC[name]) or ""
    return doctest.DocTestParser().get_doctest(text, dict(GLOBALS), name, None, 0)


def is_slow(name: str) -> bool:
    lines = "".join(each.source for each in example_of(name).examples)
    return "runs/" in lines or name.startswith(tuple(f"pallas_kernels.{x}" for x in COMPILED))


def run_example(name: str) -> None:
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    # Parts are known by their module, which is this one here.
    example = example_of(name)
    example.globs["__name__"] = "public_example"
    runner.run(example, out=said.append)
    assert not runner.failures, "".join(said)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    """A directory with what examples read: texts, a config and a profile."""
    directory = tmp_path_factory.mktemp("examples")
    (directory / "mine.toml").write_text(SMALL)
    (directory / "prompts.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    for folder in ("texts", "profiled"):
        (directory / folder).mkdir()
    for number in range(8):
        text = f"{number} the cat sat on the mat. " * (20 + number)
        (directory / "texts" / f"{number}.txt").write_text(text)
    profile = jax.profiler.ProfileData.text_proto_to_serialized_xspace(PROFILE)
    (directory / "profiled" / "host.xplane.pb").write_bytes(profile)
    return directory


@pytest.fixture
def here(place, monkeypatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    for optional in ("wandb", "mlflow"):  # neither is installed with the tests
        monkeypatch.setitem(sys.modules, optional, types.ModuleType(optional))


@pytest.fixture(scope="module")
def trained(place) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        config = jaxinfra.read_run_config("mine.toml")
        jaxinfra.train(config, "runs/mine", cache_dir=place / "cache")
        mixture = tuple(
            jaxinfra.MixtureSource(name=name, source="texts", weight=weight)
            for name, weight in (("cats", 1), ("dogs", 3))
        )
        data = jaxinfra.DataConfig(
            mixture=mixture, tokenizer=config.data.tokenizer, heldout_fraction=0.3
        )
        mixed = dataclasses.replace(config, data=data)
        jaxinfra.train(mixed, "runs/mixed", cache_dir=place / "cache")


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example(name):
    assert example_of(name).examples
    assert not any(each.options.get(doctest.SKIP) for each in example_of(name).examples)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_says_what_it_takes_and_raises(name):
    text = inspect.getdoc(PUBLIC[name])
    silent = [each for each in inspect.signature(PUBLIC[name]).parameters if not said(each, text)]
    assert not silent
    assert "Raises:" in text or name in WITHOUT_ERRORS


def said(parameter: str, text: str) -> bool:
    """Whether a docstring has the parameter in its list of arguments, or in its sentences."""
    listed = re.search(rf"^ +(\w+, )*{parameter}(, \w+)*:", text, re.MULTILINE)
    return bool(listed) or f"``{parameter}``" in text


@pytest.mark.parametrize("name", [name for name in PUBLIC if not is_slow(name)])
def test_an_example_runs(name, here):
    run_example(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLIC if is_slow(name)])
def test_a_slow_example_runs(name, trained, here):
    run_example(name)
