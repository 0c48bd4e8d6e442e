"""The settings in PEFT's adapter_config.json: what its tensors mean, and what is refused.

Tensors say which modules have an adapter: ``target_modules``, ``exclude_modules``,
``layers_to_transform`` and ``layers_pattern`` chose them when the adapter was made. Patterns of
ranks and alphas match a module's name as in PEFT 0.21: its end, or with an anchor the whole.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from jaxinfra.config.finetune import AdapterKind, AdapterScaling, LoraConfig
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.hf.keys import Keys
from jaxinfra.runtime.files import read_json

CONFIG = "adapter_config.json"

_NO_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout"),
        *("fan_in_fan_out", "target_modules", "exclude_modules", "layers_to_transform"),
        *("layers_pattern", "megatron_config", "megatron_core", "peft_version", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "velora_config"),
        *("ensure_weight_tying", "task_type"),
    )
)
"""Keys on which nothing depends that is read here: how it was trained, and what the tensors say."""

_IN_PEFT = "merge it in PEFT (merge_and_unload) and load the merged model"
_OTHER_FORM = "this form of adapters is not read"
_REFUSED: Mapping[str, str] = {
    "modules_to_save": f"these modules were trained whole, not by low-rank factors; {_IN_PEFT}",
    "trainable_token_indices": f"rows of the embedding were trained whole; {_IN_PEFT}",
    "target_parameters": "adapters of stacked parameters, as experts' are, are not read; "
    + _IN_PEFT,
    "lora_bias": "biases of adapters are not read; merge it in PEFT, which adds them to the "
    "projections' own biases where the model has these",
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), _OTHER_FORM),
    **dict.fromkeys(("arrow_config", "kasa_config", "use_qalora"), _OTHER_FORM),
    **dict.fromkeys(("use_bdlora", "monteclora_config"), _OTHER_FORM),
}
"""Keys that change what is computed, unless they are null, false or empty, and why not read."""

_MOST_REPEATS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PeftSettings:
    """The fields of ``adapter_config.json`` that decide how its tensors are applied."""

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]  # of modules, by expressions that their names' ends match
    alphas: Mapping[str, float]
    kind: AdapterKind
    scaling: AdapterScaling

    def scale(self, module: str = "") -> float:
        """Returns the factor s of a module's update s B A."""
        alpha = _matching(self.alphas, module, self.alpha)
        rank = _matching(self.ranks, module, self.rank)
        return LoraConfig(rank=rank, alpha=alpha, scaling=self.scaling).scale

    def require_rank(self, module: str, rank: int) -> None:
        """Refuses the rank of a module's tensors if the settings have another for this module.

        Raises:
            CheckpointError: the ranks differ, so that the factor s is of another adapter.
        """
        wanted = _matching(self.ranks, module, self.rank)
        if rank != wanted:
            raise CheckpointError(
                f"{self.path}: {module} has rank {rank} in its tensors and {wanted} by r and "
                "rank_pattern; the settings are of another adapter"
            )


def _matching[T](patterns: Mapping[str, T], module: str, default: T) -> T:
    """The value of the first pattern that the module's name matches, by PEFT's rule."""
    found = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


def is_peft_directory(path: Path) -> bool:
    """Whether ``path`` holds adapters that PEFT wrote."""
    return (path / CONFIG).is_file()


def read_settings(path: Path) -> PeftSettings:
    """Reads ``adapter_config.json``; refuses a setting that changes more than W + s B A."""
    keys = Keys(read_json(path / CONFIG), what=str(path / CONFIG))
    keys.expect("peft_type", ("LORA",), "adapters of this kind are read")
    keys.expect("bias", ("none",), "the model's own biases were trained; " + _IN_PEFT)
    began = (True, False, "gaussian", "orthogonal", "eva")
    keys.expect("init_lora_weights", began, "it changes the model's own weights; convert it first")
    for name, reason in _REFUSED.items():
        keys.expect(name, (None, False, [], {}), reason)
    rank, alpha = keys.integer("r"), keys.number("lora_alpha")
    settings = PeftSettings(
        path=path / CONFIG,
        rank=rank,
        alpha=alpha,
        ranks=_patterns(keys, "rank_pattern", path, (int,)),
        alphas=_patterns(keys, "alpha_pattern", path, (int, float)),
        kind=AdapterKind.DORA if keys.flag("use_dora", False) else AdapterKind.LORA,
        scaling=(
            AdapterScaling.RSLORA if keys.flag("use_rslora", False) else AdapterScaling.STANDARD
        ),
    )
    keys.finish(_NO_EFFECT)
    return settings


def _patterns[T](keys: Keys, name: str, path: Path, kinds: tuple[type[T], ...]) -> dict[str, T]:
    """Values of modules by expression; refuses expressions that may take long to match."""
    found = dict(keys.mapping(name) or {})
    for expression, value in found.items():
        if not _is_quick(expression) or type(value) not in kinds:
            raise ConfigError(
                f"{path / CONFIG}: {name} {expression!r}: {value!r}: expressions that repeat no "
                f"group and have at most {_MOST_REPEATS} repetitions are read, with a number each; "
                "write this one out"
            )
    return found


def _is_quick(expression: str) -> bool:
    """Whether matching ends soon whatever the name: files come from strangers."""
    try:
        re.compile(expression)
    except re.error:
        return False
    repeats = len(re.findall(r"[*+{]", expression))
    return repeats <= _MOST_REPEATS and not re.search(r"\)[*+{]", expression)
