"""The settings in PEFT's adapter_config.json: what its tensors mean, and what is refused.

Modules are chosen as in PEFT 0.21, by ``target_modules``, ``exclude_modules``,
``layers_to_transform`` and ``layers_pattern``; PEFT leaves out tensors of other modules, which are
refused here. Patterns of ranks and alphas match a module's name: its end, or with an anchor the
whole.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfra.config.finetune import AdapterKind, AdapterScaling, LoraConfig
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.hf.keys import Keys
from jaxinfra.runtime.files import read_json

CONFIG = "adapter_config.json"

_NO_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout"),
        *("fan_in_fan_out", "megatron_config", "megatron_core", "peft_version", "loftq_config"),
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

_MOST_REPEATS = 6
_EVERY_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModuleChoice:
    """The modules that an adapter's settings choose, by PEFT's rule.

    Args:
        named, excluded: ends of modules' names; or one expression for whole names.
        layers: numbers of layers; empty: all. They count only beside ends of names.
        layer_names: expressions of the names before layers' numbers; empty: any.
    """

    named: str | Sequence[str]
    excluded: str | Sequence[str] = ()
    layers: Sequence[int] = ()
    layer_names: Sequence[str] = ()

    def has(self, module: str) -> bool:
        """Returns whether a module has an adapter."""
        if self.excluded and _is_among(self.excluded, module):
            return False
        if self.named == _EVERY_LINEAR:
            return True
        is_named = _is_among(self.named, module)
        if not is_named or isinstance(self.named, str) or module in self.named or not self.layers:
            return is_named
        expressions = [_numbered(name) for name in self.layer_names]
        any_name = r".*?\.[^.]*\.(?P<layer>\d+)\."
        matches = (re.match(each, module) for each in expressions or [any_name])
        found = next((each for each in matches if each is not None), None)
        return found is not None and int(found["layer"]) in self.layers


def _numbered(name: str) -> str:
    return rf"(?:^|.*?\.){name}\.(?P<layer>\d+)\."


def _is_among(names: str | Sequence[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PeftSettings:
    """The fields of ``adapter_config.json`` that decide how its tensors are applied."""

    path: Path
    rank: int
    alpha: float
    modules: ModuleChoice
    ranks: Mapping[str, int]  # of modules, by expressions that their names' ends match
    alphas: Mapping[str, float]
    kind: AdapterKind
    scaling: AdapterScaling

    def scale(self, module: str = "") -> float:
        """Returns the factor s of a module's update s B A."""
        alpha = _matching(self.alphas, module, self.alpha)
        rank = _matching(self.ranks, module, self.rank)
        return LoraConfig(rank=rank, alpha=alpha, scaling=self.scaling).scale

    def require(self, module: str, rank: int) -> None:
        """Refuses tensors of a module that the settings do not choose, or of another rank.

        Raises:
            CheckpointError: the tensors are of an adapter with other settings.
        """
        if not self.modules.has(module):
            raise CheckpointError(
                f"{self.path}: {module} has tensors, and target_modules with exclude_modules, "
                "layers_to_transform and layers_pattern do not choose it, so that PEFT would leave "
                "them out; name the module there, or remove its tensors"
            )
        wanted = _matching(self.ranks, module, self.rank)
        if rank != wanted:
            raise CheckpointError(
                f"{self.path}: {module} has rank {rank} in its tensors and {wanted} by r and "
                "rank_pattern; the settings are of another adapter"
            )


def _matching[T](patterns: Mapping[str, T], module: str, default: T) -> T:
    """The value of the first pattern that the module's name matches, by PEFT's rule."""
    found = (value for key, value in patterns.items() if re.match(_end(key), module))
    return next(found, default)


def _end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


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
        modules=_choice(keys, path),
        ranks=_patterns(keys, "rank_pattern", path, (int,)),
        alphas=_patterns(keys, "alpha_pattern", path, (int, float)),
        kind=AdapterKind.DORA if keys.flag("use_dora", False) else AdapterKind.LORA,
        scaling=(
            AdapterScaling.RSLORA if keys.flag("use_rslora", False) else AdapterScaling.STANDARD
        ),
    )
    keys.finish(_NO_EFFECT)
    return settings


def _choice(keys: Keys, path: Path) -> ModuleChoice:
    """Reads which modules have adapters."""
    named = _names(keys, "target_modules", path)
    if not named:
        raise ConfigError(
            f"{path / CONFIG}: target_modules names none, and what PEFT then adapts differs by its "
            "version; name the modules whose tensors there are"
        )
    layers = keys.either("layers_to_transform", int, list)
    layers = [layers] if isinstance(layers, int) else layers or []
    if not all(type(each) is int for each in layers):
        raise ConfigError(f"{path / CONFIG}: layers_to_transform={layers!r}: numbers are read")
    before = _names(keys, "layers_pattern", path)
    before = [before] if isinstance(before, str) else before
    for each in before:
        _require_quick(each, "layers_pattern", path, within=_numbered(each))
    excluded = _names(keys, "exclude_modules", path)
    return ModuleChoice(named=named, excluded=excluded, layers=layers, layer_names=before)


def _names(keys: Keys, name: str, path: Path) -> str | Sequence[str]:
    """An expression, or a list of names."""
    found: Any = keys.either(name, str, list) or []
    if isinstance(found, str):
        _require_quick(found, name, path)
    elif not all(isinstance(each, str) for each in found):
        raise ConfigError(f"{path / CONFIG}: {name}={found!r}: an expression or names are read")
    return found


def _patterns[T](keys: Keys, name: str, path: Path, kinds: tuple[type[T], ...]) -> dict[str, T]:
    """Values of modules by expression; refuses expressions that may take long to match."""
    found = dict(keys.mapping(name) or {})
    for expression, value in found.items():
        _require_quick(expression, name, path, within=_end(expression))
        if type(value) not in kinds:
            raise ConfigError(
                f"{path / CONFIG}: {name} {expression!r}: {value!r} must be a number"
                f"{'' if float in kinds else ' without fraction'}"
            )
    return found


def _require_quick(expression: str, name: str, path: Path, *, within: str = "") -> None:
    """Refuses an expression that may take long, or is none, alone or ``within`` another."""
    if not _is_quick(expression, within):
        raise ConfigError(
            f"{path / CONFIG}: {name} {expression!r}: expressions that repeat no group and have at "
            f"most {_MOST_REPEATS} repetitions are read; write this one out"
        )


def _is_quick(expression: str, within: str) -> bool:
    """Whether matching ends soon whatever the name: files come from strangers."""
    try:
        re.compile(expression)
        re.compile(within)
    except re.error:
        return False
    repeats = len(re.findall(r"[*+{]", expression))
    return repeats <= _MOST_REPEATS and not re.search(r"\)[*+{]", expression)
