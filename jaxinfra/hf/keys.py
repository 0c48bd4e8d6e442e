"""Strict reading of a Hugging Face config: every key is used, checked, or known to be unused."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxinfra.config.limits import require_within
from jaxinfra.errors import ConfigError

REQUIRED = object()
"""Default of a key that a config must have."""

# Keys that no logit depends on: bookkeeping, defaults of generation, dropout (training only; ours
# is a choice of the run), and switches of how the reference implementation computes the same.
_NEUTRAL_NAMES = """
    _name_or_path architectures model_type transformers_version torch_dtype dtype auto_map
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class
    use_cache cache_implementation attention_dropout attn_pdrop embd_pdrop resid_pdrop
    reorder_and_upcast_attn pretraining_tp _attn_implementation attn_implementation
    _attn_implementation_autoset return_dict output_attentions output_hidden_states output_scores
    return_dict_in_generate id2label label2id num_labels problem_type finetuning_task
    task_specific_params chunk_size_feed_forward torchscript use_bfloat16 tf_legacy_loss prefix
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    classifier_dropout gradient_checkpointing unsloth_version unsloth_fixed
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens
    _num_labels n_special predict_special_tokens output_past max_sequence_length
    is_llama_config transformers.js_config
    hidden_dropout_prob attention_probs_dropout_prob
    hidden_dropout residual_dropout embedding_dropout resid_dropout embed_dropout emb_pdrop
    _sliding_window_pattern init_device
"""
NEUTRAL = frozenset(_NEUTRAL_NAMES.split())

# Keys of any architecture that change what is computed unless they have these values.
_PLAIN: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("is_encoder_decoder", (False,), "only decoders are supported"),
    ("is_decoder", (True, False), "only decoders are supported"),
    ("add_cross_attention", (False,), "cross-attention is not supported"),
    ("cross_attention_hidden_size", (None,), "cross-attention is not supported"),
    ("tie_encoder_decoder", (False,), "only decoders are supported"),
    ("pruned_heads", ({}, None), "heads cannot be pruned"),
    # Of some architectures only, and named by others to say no.
    ("attention_bias", (False, None), "this architecture has no such bias"),
    ("mlp_bias", (False, None), "this architecture has no such bias"),
    ("sliding_window", (None,), "this architecture has no windows"),
    ("use_sliding_window", (False, None), "this architecture has no windows"),
    ("rope_scaling", (None,), "this architecture has no rotary embedding"),
    ("rope_interleaved", (False, None), "halves of a head are rotated here, not neighbours"),
    ("use_mrope", (False, None), "a token has one position here, not one of each image axis"),
    ("qkv_bias", (False, None), "this architecture has no such bias"),
    ("lm_head_bias", (False, None), "logits have no bias here"),
    ("use_qk_norm", (False, None), "this architecture has no norms of queries and keys"),
    ("shared_expert_intermediate_size", (0, None), "this architecture has no shared experts"),
)


_ADD = "; add it, with the value that the model was trained with"
_LARGEST = 1 << 53
SILU = ("silu", "swish")
"""Names of one activation."""

# What sizes are divided by, and how many layers there are.
_POSITIVE_NAMES = """
    hidden_size n_embd d_model num_attention_heads n_head n_heads num_heads
    num_hidden_layers n_layer n_layers num_layers partial_rotary_factor
    decoder_sparse_step full_attention_interval moe_layer_interval no_rope_layer_interval
    sliding_window_pattern block_multiple_of expand logits_scaling query_pre_attn_scalar
"""
_POSITIVE = frozenset(_POSITIVE_NAMES.split())
_BOUNDED = {"num_hidden_layers": "num_layers", "n_layer": "num_layers"}


class Keys:
    """The entries of one config, with a note of which have been read.

    Args:
        values: as parsed from JSON.
        what: names the config in messages.
    """

    def __init__(
        self, values: Mapping[str, Any], *, what: str, names: Mapping[str, str] | None = None
    ):
        self._values = values
        self._what = what
        self._names = names or {}
        self._read: set[str] = set()

    def named_as(self, **names: str) -> "Keys":
        """Returns these keys for a reader that calls them otherwise: ``hidden_size="n_embd"``."""
        found = Keys(self._values, what=self._what, names=names)
        found._read = self._read
        return found

    def alike(self, *names: str) -> "Keys":
        """Returns these keys with one number where a list has the same for every layer."""
        values = dict(self._values)
        for name in names:
            each = values.get(name)
            if isinstance(each, list | tuple) and each:
                if any(value != each[0] for value in each):
                    raise ConfigError(f"{self._what}: {name}={each}: layers are alike here")
                values[name] = each[0]
        found = Keys(values, what=self._what, names=self._names)
        found._read = self._read
        return found

    def has(self, name: str) -> bool:
        """Whether the config has this key, whatever its value."""
        return name in self._values

    def integer(self, name: str, default: Any = REQUIRED) -> Any:
        """Reads a whole number, bounded if it sizes a list of layers; the default may be None."""
        value = self._typed(name, default, (int,))
        if value is not None and abs(value) > _LARGEST:
            raise ConfigError(f"{self._what}: {name} is beyond {_LARGEST:,}: no such size exists")
        if name in _BOUNDED and value is not None:
            require_within(**{_BOUNDED[name]: value})
        return value

    def named(self, *names: str) -> int:
        """Reads a whole number under any of its names; all that are present must agree."""
        found = {name: value for name in names if (value := self.integer(name, None)) is not None}
        if not found:
            listed = " or ".join(repr(self._names.get(name, name)) for name in names)
            raise ConfigError(f"{self._what}: required key {listed} is missing or null{_ADD}")
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name}={value}" for name, value in found.items())
            raise ConfigError(f"{self._what}: {listed} are one number and must be equal")
        return next(iter(found.values()))

    def require(self, *names: str) -> None:
        """Refuses a config without these keys; null counts as present.

        Releases of the reference implementation differ in their defaults, so none is assumed.
        """
        for name in (self._names.get(each, each) for each in names):
            if name not in self._values:
                raise ConfigError(f"{self._what}: required key {name!r} is missing{_ADD}")

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """Reads a number as float; the default may be None."""
        value = self._typed(name, default, (int, float))
        return None if value is None else self._float(name, value)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        """Reads true or false; null counts as missing unless the default is true."""
        if default is True and self._values.get(self._names.get(name, name), True) is None:
            raise ConfigError(
                f"{self._what}: {name} is null, which some programs take for false and others for "
                "not given, which is true; write true or false"
            )
        return self._typed(name, default, (bool,))

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns the string under a key of the config, or ``default`` where the key is missing."""
        return self._typed(name, default, (str,))

    def raw(self, name: str) -> Any:
        """Returns the value of a key as it is, without noting it as read; None if missing."""
        return self._values.get(name)

    def sequence(self, name: str, default: Any = REQUIRED) -> Any:
        """Reads a list as a tuple; the default may be None."""
        value = self._typed(name, default, (list, tuple))
        return None if value is None else tuple(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Reads a list of numbers."""
        values = self.sequence(name)
        if any(type(value) not in (int, float) for value in values):
            raise ConfigError(f"{self._what}: {name} must be a list of numbers")
        return tuple(self._float(name, value) for value in values)

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """Reads a nested object; None where there is none."""
        return self._typed(name, None, (dict,))

    def either(self, name: str, *kinds: type) -> Any:
        """Reads a value of one of several types; None where there is none."""
        return self._typed(name, None, kinds)

    def ignore(self, *names: str) -> None:
        """Marks these keys as read, whatever their values."""
        self._read.update(names)

    def expect(self, name: str, allowed: Sequence[Any], reason: str) -> None:
        """Raises ConfigError for a key whose value is not allowed; the key may be missing."""
        self._read.add(name)
        value = self._values.get(name, allowed[0])
        if not any(value is each or value == each for each in allowed):
            raise ConfigError(f"{self._what}: {name}={value!r}: {reason}")

    def choice(self, name: str, choices: Mapping[str, Any], default: Any = REQUIRED) -> Any:
        """Maps a name to its value in a table of choices."""
        value = self.text(name, default)
        if value not in choices:
            raise ConfigError(
                f"{self._what}: {name}={value!r} is not supported; known: {', '.join(choices)}"
            )
        return choices[value]

    def finish(self, neutral: Collection[str] = NEUTRAL) -> None:
        """Raises ConfigError for keys that were not read, unless known to have no effect."""
        for name, allowed, reason in _PLAIN:
            if name not in self._read:
                self.expect(name, allowed, reason)
        unknown = sorted(set(self._values) - self._read - set(neutral))
        if unknown:
            listed = ", ".join(f"{name}={self._values[name]!r}" for name in unknown)
            raise ConfigError(
                f"{self._what}: unknown keys, which may change what the model computes: {listed}; "
                "remove them if they are without effect"
            )

    def _float(self, name: str, value: float) -> float:
        try:
            return float(value)
        except OverflowError as error:
            raise ConfigError(f"{self._what}: {name} is beyond any number of a model") from error

    def _typed(self, name: str, default: Any, kinds: tuple[type, ...]) -> Any:
        name = self._names.get(name, name)
        self._read.add(name)
        value = self._values.get(name)
        if value is None:  # the reference implementation takes null for "not given" too
            if default is REQUIRED:
                raise ConfigError(f"{self._what}: required key {name!r} is missing{_ADD}")
            return default
        # JSON's true is an int in Python, and no number.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{self._what}: {name}={value!r} is no {expected}")
        if name in _POSITIVE and isinstance(value, int | float) and not 0 < value < math.inf:
            raise ConfigError(
                f"{self._what}: {name}={value!r} must be positive and finite; restore it"
            )
        return value
