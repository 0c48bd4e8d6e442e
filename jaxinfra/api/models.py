"""Trained models: evaluated, continued, written."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxinfra.checkpoint.initial import read_initial
from jaxinfra.checkpoint.model_directory import is_model_directory, write_hf
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.preferences import PreferenceConfig
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf import by_path, to_hf_config
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.runtime.files import user_cache
from jaxinfra.serving.convert import write_tokenizer
from jaxinfra.serving.engine.requests import EndReason
from jaxinfra.serving.generate import generate as generated
from jaxinfra.serving.generate import request_of
from jaxinfra.serving.load import LoadedModel, load
from jaxinfra.training.evaluation import RunEvaluation, evaluate_pretrained, evaluate_run
from jaxinfra.training.start import finetuning_config


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedText:
    """A model's text after a prompt: an element of what ``generate`` returns.

    Examples:
        >>> found = jaxinfra.generate("runs/mine", ["the cat"], max_new_tokens=4)[0]
        >>> found.prompt, len(found.tokens) <= 4
        ('the cat', True)
    """

    prompt: str  # what it was given
    text: str  # without the prompt
    tokens: tuple[int, ...]  # the new ones, the end token included
    finish: EndReason  # why it ended: an end token, or as many tokens as were asked for


def generate(
    model: str | Path | LoadedModel,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 256,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> tuple[GeneratedText, ...]:
    """Continues each prompt by an engine, many at a time.

    Args:
        model: a run, a model directory, or what ``load`` returned: loaded once, it answers often.
        prompts: texts; what comes back is in their order.
        max_new_tokens: of each answer, which ends before at an end token.
        temperature: 0 takes the most likely token; None: the model's, else 0.8.
        top_k: draw from this many of the most likely tokens; None: the model's, else all.
        top_p: draw from the fewest tokens whose probabilities add up to this; None: the
            model's, else all.
        seed: the same seed draws the same texts.

    Raises:
        ConfigError: a setting out of range, or a prompt longer than the model's positions.
        DataError, CheckpointError: ``model`` is no model, or a damaged one.

    Examples:
        >>> model = jaxinfra.load("runs/mine")
        >>> answers = jaxinfra.generate(model, ["the cat", "on"], max_new_tokens=4, temperature=0)
        >>> [each.prompt for each in answers]
        ['the cat', 'on']
    """
    is_loaded = isinstance(model, LoadedModel)
    loaded = model if is_loaded else load(model)
    sampling = loaded.sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    requests = [
        request_of(
            loaded,
            loaded.prompt(prompt),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            choice=number,
        )
        for number, prompt in enumerate(prompts)
    ]
    texts = [""] * len(requests)
    rows: list[tuple[int, ...]] = [()] * len(requests)
    ends: dict[int, EndReason] = {}
    for place, progress in generated(loaded, requests, consumes=not is_loaded):
        texts[place] += progress.text
        rows[place] += progress.tokens
        if progress.end is not None:
            ends[place] = progress.end
    return tuple(
        GeneratedText(prompt=prompt, text=text, tokens=row, finish=ends[place])
        for place, (prompt, text, row) in enumerate(zip(prompts, texts, rows, strict=True))
    )


def start_from(
    model: str | Path,
    *,
    lora: LoraConfig | None = None,
    chat: bool = False,
    preferences: PreferenceConfig | None = None,
) -> RunConfig:
    """The config of a run that trains a model further, with the settings usual for that: give it
    data, and change what is to be changed with ``override``.

    Args:
        model: a Hugging Face directory, one that ``convert`` has written, or a run.
        lora: train adapters only.
        chat: the data are conversations, for the model's chat template.
        preferences: the data are pairs of answers.

    Raises:
        ConfigError: there is no model, or none that this version knows.

    Examples:
        >>> config = jaxinfra.start_from("runs/mine", lora=jaxinfra.LoraConfig(rank=4))
        >>> config.lora.rank
        4
    """
    return finetuning_config(
        read_initial(Path(model)), lora=lora, chat=chat, preferences=preferences
    )


def evaluate(
    model: str | Path,
    *,
    data: str | None = None,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    cache_dir: Path | None = None,
) -> RunEvaluation:
    """Loss, perplexity and bits per byte over every token of a text, once.

    Args:
        model: a run or a model directory.
        data: the text: a directory, a glob or a file; by default the documents that a run held out.
        step: a certain checkpoint of a run; the newest good one by default.
        mesh: devices that the model is spread over, the first one by default.
        cache_dir: where tokenized text and compiled programs are kept; the user's cache by default.

    Returns:
        ``evaluation`` with ``loss`` in nats per token, ``perplexity`` and ``bits_per_byte``, and
        ``baseline``: the bits per byte of gzip and xz on the same text.

    Raises:
        ConfigError: a ``step`` for a model directory, which has none; a mesh that cannot be.
        DataError, CheckpointError: there is no text, or no model, or a damaged one.

    Examples:
        >>> found = jaxinfra.evaluate("runs/mine", data="texts")
        >>> found.step, found.evaluation.bits_per_byte > 0
        (4, True)
    """
    path, mesh = Path(model), mesh or MeshConfig()
    cache_dir = cache_dir or user_cache()
    if not is_model_directory(path):
        return evaluate_run(path, mesh=mesh, cache_dir=cache_dir, source=data, step=step)
    if step is not None:
        raise ConfigError(f"step={step}: {path} is a single model, without steps")
    return evaluate_pretrained(path, mesh=mesh, cache_dir=cache_dir, source=data)


def save(
    model: LoadedModel,
    directory: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a model as a Hugging Face directory, with its tokenizer.

    Args:
        model: what ``load`` returned.
        directory: a new one.
        dtype: of all weights; as they are held by default.
        max_shard_bytes: of the weights in one file.

    Raises:
        ConfigError: no Hugging Face architecture can express the model, or it has adapters.

    Examples:
        >>> jaxinfra.save(jaxinfra.load("runs/mine"), "exported", dtype="bfloat16")
        >>> sorted(file.name for file in pathlib.Path("exported").iterdir())
        ['config.json', 'model.safetensors', 'tokenizer.json', ...]
    """
    if model.definition.lora is not None:
        raise ConfigError("a model with adapters: jaxinfra.convert merges a run's into its base")
    config = model.definition.config
    hf = to_hf_config(config) | {
        "bos_token_id": model.tokenizer.bos_id,
        "eos_token_id": model.tokenizer.eos_id,
    }
    with tempfile.TemporaryDirectory() as made:
        write_tokenizer(model.tokenizer, Path(made))
        write_hf(
            LiveParameters(arrays=by_path(model.parameters)),
            define_model(config, execution_on()),
            Path(directory),
            hf=hf,
            tokenizer_directory=Path(made),
            dtype=None if dtype is None else np.dtype(dtype),
            max_shard_bytes=max_shard_bytes,
        )
