"""A tiny model with a tokenizer and a chat template, in the layout of Hugging Face."""

import json
from pathlib import Path

import jax
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfra.checkpoint.model_directory import write_hf
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.config.model import (
    ModelConfig,
)
from jaxinfra.data.tokenizer import Tokenizer, bytes_tokenizer
from jaxinfra.hf import by_path
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from tests.small_models import dense

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MODEL = dense(vocab_size=264, attention={"qkv_bias": True}, init_std=0.1)


def write_tokenizer(path: Path) -> Tokenizer:
    """Bytes, two merges, and the special tokens of ChatML."""
    plain = json.loads(bytes_tokenizer()._json)["model"]["vocab"]
    vocab = {token: i for token, i in plain.items() if len(token) == 1}
    merges = [("e", "l"), ("Ċ", "Ċ")]
    vocab |= {"".join(pair): 256 + i for i, pair in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    return Tokenizer.load(path)


def write_model(path: Path, *, config: ModelConfig = MODEL) -> Path:
    """Random weights in fp32, as ``qwen2``."""
    files = path.with_name("files")
    files.mkdir()
    write_tokenizer(files / "tokenizer.json")
    (files / "chat_template.jinja").write_text(CHATML)
    (files / "generation_config.json").write_text(json.dumps({"eos_token_id": [260]}))
    definition = define_model(config, execution_on())
    source = LiveParameters(arrays=by_path(definition.initialize(jax.random.key(0))))
    options = dict(hf=None, tokenizer_directory=files, dtype=None, max_shard_bytes=10**9)
    write_hf(source, definition, path, **options)
    return path
