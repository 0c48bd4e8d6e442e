"""Functions that evaluate, continue, fine-tune and export trained models."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxinfra.checkpoint.initial import read_initial
from jaxinfra.checkpoint.model_directory import is_model_directory, write_hf, write_ours
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.preferences import PreferenceConfig
from jaxinfra.config.presets import runs
from jaxinfra.config.rl import RlConfig
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.model.definition import by_path, define_model, is_weight
from jaxinfra.parallel.execution import execution_on
from jaxinfra.runtime.files import user_cache
from jaxinfra.serving.convert import hf_config_of, write_tokenizer
from jaxinfra.serving.engine.requests import EndReason
from jaxinfra.serving.generate import generate as generated
from jaxinfra.serving.generate import request_of
from jaxinfra.serving.load import LoadedModel, load
from jaxinfra.training.evaluation import RunEvaluation, evaluate_pretrained, evaluate_run


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedText:
    """One prompt's continuation by a model; ``generate`` returns one per prompt.

    Examples:
        >>> found = jaxinfra.generate("runs/mine", ["the cat"], max_new_tokens=4)[0]
        >>> found.prompt, len(found.tokens) <= 4
        ('the cat', True)
    """

    prompt: str  # the prompt that was continued
    text: str  # without the prompt
    tokens: tuple[int, ...]  # the new ones, the end token included
    finish: EndReason  # why generation ended: an end token, or ``max_new_tokens``


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
    """Continues prompts with a model, many at a time; returns the texts in the prompts' order.

    Args:
        model: a run, a model directory, or a model that ``load`` returned. The last is not loaded
            again, but a GPU then holds its projections twice: as loaded, and packed for serving.
        prompts: texts to continue.
        max_new_tokens: most tokens of each answer; an end token ends it sooner.
        temperature: 0 takes the most likely token; None: the model's own setting, else 0.8.
        top_k: sample from this many of the most likely tokens; None: the model's own setting, else
            all tokens.
        top_p: sample from the fewest tokens whose probabilities add up to this; None: the model's
            own setting, else all tokens.
        seed: equal seeds give equal texts.

    Raises:
        ConfigError: a setting is out of range, or a prompt is longer than the model's positions.
        DataError, CheckpointError: ``model`` is not a model, or a damaged one.

    Examples:
        >>> model = jaxinfra.load("runs/mine")
        >>> answers = jaxinfra.generate(model, ["the cat", "on"], max_new_tokens=4, temperature=0)
        >>> [each.prompt for each in answers]
        ['the cat', 'on']
    """
    is_loaded = _is_loaded(model, prompts)
    loaded = model if isinstance(model, LoadedModel) else load(model)
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


def _is_loaded(model: str | Path | LoadedModel, prompts: object) -> bool:
    """Tells a loaded model from a path; raises ConfigError for others, and for one prompt alone."""
    if isinstance(prompts, str) or not isinstance(model, LoadedModel | str | Path):
        given = "one text" if isinstance(prompts, str) else f"a {type(model).__name__}"
        raise ConfigError(
            f"generate of {given}: give a run, a model directory or what jaxinfra.load returned "
            "(load_model's decoder has no tokenizer), and a list of prompts"
        )
    return isinstance(model, LoadedModel)


def start_from(
    model: str | Path,
    *,
    lora: LoraConfig | None = None,
    chat: bool = False,
    preferences: PreferenceConfig | None = None,
    rl: RlConfig | None = None,
) -> RunConfig:
    """Returns the config of a run that trains a model further, with usual settings. Add data to it,
    and change any setting with ``override``.

    Args:
        model: a Hugging Face directory, a directory that ``convert`` has written, or a run.
        lora: adapters to train while the model stays frozen; None: train all parameters.
        chat: the data are conversations, rendered with the model's chat template.
        preferences: the data are pairs of a preferred and a rejected answer.
        rl: the run learns from a reward function: ``jaxinfra.rl`` trains it.

    Raises:
        ConfigError: there is no model, or its architecture is not supported.

    Examples:
        >>> config = jaxinfra.start_from("runs/mine", lora=jaxinfra.LoraConfig(rank=4))
        >>> config.lora.rank
        4
    """
    start = read_initial(Path(model))
    return runs.finetuning(
        start.config,
        init=start.init,
        policy=start.policy,
        lora=lora,
        chat=chat,
        preferences=preferences,
        rl=rl,
    )


def evaluate(
    model: str | Path,
    *,
    data: str | None = None,
    text_field: str | None = None,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    cache_dir: Path | None = None,
) -> RunEvaluation:
    """Computes a model's loss, perplexity and bits per byte over every token of a text.

    Args:
        model: a run or a model directory.
        data: the text: a directory, a glob or a file; by default the run's held-out documents.
        text_field: field of the rows of ``data`` that holds the text; by default the run's, or
            ``text``.
        step: step of the run's checkpoint to evaluate; by default the newest intact one.
        mesh: devices that the model is sharded over; by default the first device.
        cache_dir: where tokenized text and compiled programs are cached; by default the user's
            cache.

    Returns:
        ``evaluation`` with ``loss`` in nats per token, ``perplexity`` and ``bits_per_byte``, and
        ``baseline``: the bits per byte of gzip and xz on the same text.

    Raises:
        ConfigError: ``step`` is given for a model directory, which has none, ``text_field`` without
            ``data``, or the mesh is impossible.
        DataError, CheckpointError: text or model is missing, or the model is damaged.

    Examples:
        >>> found = jaxinfra.evaluate("runs/mine", data="texts")
        >>> found.step, found.evaluation.bits_per_byte > 0
        (4, True)
    """
    path, mesh = Path(model), mesh or MeshConfig()
    cache_dir = cache_dir or user_cache()
    if text_field is not None and data is None:
        raise ConfigError(f"text_field={text_field!r} is of data: name the text, or leave it out")
    if not is_model_directory(path):
        return evaluate_run(
            path, mesh=mesh, cache_dir=cache_dir, source=data, text_field=text_field, step=step
        )
    if step is not None:
        raise ConfigError(f"step={step}: {path} is a single model, without steps")
    return evaluate_pretrained(
        path, mesh=mesh, cache_dir=cache_dir, source=data, text_field=text_field
    )


def save(
    model: LoadedModel,
    directory: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    layout: str = "hf",
) -> None:
    """Writes a model and its tokenizer as a directory, by default in Hugging Face's layout.

    Args:
        model: the model, as ``load`` returned it.
        directory: a directory that does not exist yet.
        layout: "hf", or "ours", which holds models with parts of your own: safetensors by the paths
            of parameters, and a config.json that names the parts. ``load`` reads both.
        dtype: dtype of all written weights; by default each keeps its own, float32 where it is
            quantized.
        max_shard_bytes: most bytes of weights per file.

    Raises:
        ConfigError: no Hugging Face architecture can express the model, the model has adapters, or
            there is no such layout.

    Examples:
        >>> jaxinfra.save(jaxinfra.load("runs/mine"), "exported", dtype="bfloat16")
        >>> sorted(file.name for file in pathlib.Path("exported").iterdir())
        ['config.json', 'model.safetensors', 'tokenizer.json', ...]
    """
    if not isinstance(model, LoadedModel):
        raise ConfigError(f"save of a {type(model).__name__}: give what jaxinfra.load returned")
    if model.definition.lora is not None:
        raise ConfigError("a model with adapters: jaxinfra.convert merges a run's into its base")
    if layout not in ("hf", "ours"):
        raise ConfigError(f"layout={layout!r}{nearest(layout, ('hf', 'ours'))}")
    with tempfile.TemporaryDirectory() as made:
        write_tokenizer(model.tokenizer, Path(made))
        write = write_hf if layout == "hf" else write_ours
        write(
            LiveParameters(arrays=by_path(model.parameters, is_leaf=is_weight)),
            define_model(model.definition.config, execution_on()),
            Path(directory),
            hf=hf_config_of(model) if layout == "hf" else None,
            tokenizer_directory=Path(made),
            dtype=None if dtype is None else np.dtype(dtype),
            max_shard_bytes=max_shard_bytes,
        )
