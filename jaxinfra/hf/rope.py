"""Rotary embedding in Hugging Face configs, both ways.

Files have ``rope_theta`` and ``rope_scaling``, or of transformers 5 ``rope_parameters``.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfra.config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    RopeConfig,
    RopePairs,
    RopeScaling,
    YarnScaling,
)
from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import REQUIRED, Keys

_LONGROPE_NAMES = ("longrope", "su")
_PROPORTIONAL = "proportional"


def read_rope(
    keys: Keys,
    *,
    max_positions: int,
    original_max_positions: int | None = None,
    default_theta: float = 10_000.0,
    default_fraction: float = 1.0,
    pairs: RopePairs = RopePairs.HALVES,
    known: Sequence[str] = (),
    has_alpha: bool = False,
) -> RopeConfig:
    """Reads the rotary embedding of a config.

    Args:
        original_max_positions: used where the config has none; by default ``max_positions``.
        default_theta, default_fraction: those where the config has none.
        pairs: elements that the architecture rotates together.
        known: further keys beside the scaling's, which the caller reads.
        has_alpha: whether "dynamic" with an alpha stretches the base by it, at any length.
    """
    theta = keys.number("rope_theta", default_theta)
    fraction = keys.number("partial_rotary_factor", default_fraction)
    original = keys.integer("original_max_position_embeddings", original_max_positions)

    def parsed(name: str) -> RopeConfig | None:
        values = keys.mapping(name)
        if not values:
            return None
        rope = Keys(values, what=name)
        rope.ignore(*known)
        kind = values.get("rope_type", values.get("type"))
        if has_alpha and kind == "dynamic" and rope.number("alpha", None):
            rope.expect("factor", (1.0, None), "alpha says by how much the base is stretched")
            rope.ignore("type", "rope_type", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            alpha = NtkScaling(factor=rope.number("alpha"))
            own_theta = rope.number("rope_theta", theta)
            rope.finish(neutral=())
            return RopeConfig(theta=own_theta, fraction=fraction, scaling=alpha)
        return _read_values(rope, theta, fraction, max_positions, original)

    older, newer = parsed("rope_scaling"), parsed("rope_parameters")
    if older is not None and newer is not None and older != newer:
        raise ConfigError(
            f"rope_scaling={keys.raw('rope_scaling')!r} and rope_parameters="
            f"{keys.raw('rope_parameters')!r} differ; keep the one that is right"
        )
    found = newer or older or RopeConfig(theta=theta, fraction=fraction)
    return dataclasses.replace(found, pairs=pairs)


def read_ropes_by_type(
    keys: Keys, types: Sequence[str], *, max_positions: int
) -> dict[str, RopeConfig] | None:
    """Reads ``rope_parameters``, an entry per type of layer; None where a config has none."""
    values = keys.mapping("rope_parameters")
    if not values:
        return None
    if not any(isinstance(each, dict) for each in values.values()):
        raise ConfigError(
            f"rope_parameters={dict(values)!r}: an entry for each of {', '.join(types)} is needed, "
            "since layers of one type are rotated otherwise than those of another"
        )
    nested, found = Keys(values, what="rope_parameters"), {}
    for name in types:
        entry = nested.mapping(name)
        if entry is None:
            raise ConfigError(f"rope_parameters has no entry {name!r}; add it")
        rope = Keys(entry, what=f"rope_parameters {name}")
        found[name] = _read_values(rope, REQUIRED, 1.0, max_positions, None)
        if found[name].fraction != 1.0:
            raise ConfigError(
                f"rope_parameters {name}: partial_rotary_factor={found[name].fraction}: this "
                "architecture rotates whole heads"
            )
        if isinstance(scaling := found[name].scaling, YarnScaling) and not scaling.truncate:
            raise ConfigError(
                f"rope_parameters {name}: truncate=false: the reference has no notice of it in an "
                "entry of one type of layer, and others may; remove it, or write true"
            )
    nested.finish(neutral=())
    return found


def _read_values(
    rope: Keys, theta: Any, fraction: float, max_positions: int, original: int | None
) -> RopeConfig:
    named = rope.integer("original_max_position_embeddings", max_positions)
    context = named if original is None else original
    if context < 1:
        raise ConfigError(
            f"original_max_position_embeddings={context} must be at least 1: the positions "
            "that the model was trained with before they were scaled"
        )
    part = rope.number("partial_rotary_factor", fraction)
    is_whole = rope.text("rope_type", None) == _PROPORTIONAL
    result = RopeConfig(
        theta=rope.number("rope_theta", theta),
        fraction=1.0 if is_whole else part,
        turning=part if is_whole else 1.0,
        scaling=_read_scaling(rope, max_positions=max_positions, original=context),
    )
    rope.finish(neutral=())
    return result


def _read_scaling(rope: Keys, *, max_positions: int, original: int) -> RopeScaling | None:
    older = rope.text("type", None)
    name = rope.text("rope_type", older) or "default"
    if name == "default":
        return None
    if name == _PROPORTIONAL:
        factor = rope.number("factor", 1.0)
        return None if factor == 1.0 else LinearScaling(factor=factor)
    if name == "linear":
        return LinearScaling(factor=rope.number("factor"))
    if name == "llama3":
        return Llama3Scaling(
            factor=rope.number("factor"),
            low_frequency_factor=rope.number("low_freq_factor"),
            high_frequency_factor=rope.number("high_freq_factor"),
            original_max_positions=original,
        )
    if name == "yarn":
        return _read_yarn(rope, max_positions=max_positions, original=original)
    if name in _LONGROPE_NAMES:
        return _read_longrope(rope, max_positions=max_positions, original=original)
    if name == "dynamic":
        if original != max_positions:
            raise ConfigError(
                f"rope type 'dynamic' with original_max_position_embeddings={original}: the "
                f"reference begins beyond max_position_embeddings={max_positions}; remove it"
            )
        return DynamicScaling(factor=rope.number("factor"), original_max_positions=original)
    raise ConfigError(
        f"rope type {name!r} is not supported; "
        f"known: default, linear, dynamic, llama3, yarn, {_PROPORTIONAL}, "
        f"{', '.join(_LONGROPE_NAMES)}"
    )


def _read_yarn(rope: Keys, *, max_positions: int, original: int) -> YarnScaling:
    rope.ignore("finetuned")  # whether the model was trained with it
    factor = rope.number("factor", max_positions / original)
    attention_factor = rope.number("attention_factor", None)
    if (multiplier := rope.number("attn_factor", None)) is not None:
        raise ConfigError(
            f"attn_factor={multiplier}: transformers takes no notice of it, others multiply YaRN's "
            f"own {yarn_temperature(factor, 1.0):.6g} by it; remove it, or write attention_factor, "
            "which is the product, in its place"
        )
    mscale, all_dim = rope.number("mscale", None), rope.number("mscale_all_dim", None)
    if attention_factor is None and mscale and all_dim:
        attention_factor = yarn_temperature(factor, mscale) / yarn_temperature(factor, all_dim)
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", None) or 32.0,
        beta_slow=rope.number("beta_slow", None) or 1.0,
        attention_factor=attention_factor,
        truncate=rope.flag("truncate", True),
    )


def yarn_temperature(factor: float, mscale: float) -> float:
    """Returns ``0.1 mscale ln(factor) + 1`` (Peng et al. 2023, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _read_longrope(rope: Keys, *, max_positions: int, original: int) -> LongRopeScaling:
    factor = rope.number("factor", max_positions / original)
    default = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return LongRopeScaling(
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
        original_max_positions=original,
        attention_factor=rope.number("attention_factor", default),
    )


def write_ropes_by_type(ropes: Mapping[str, RopeConfig]) -> dict[str, Any]:
    """Writes ``rope_parameters`` with an entry per type of layer."""

    def entry(rope: RopeConfig) -> dict[str, Any]:
        scaling = _write_scaling(rope) or {"rope_type": "default"}
        return scaling | {"rope_theta": rope.theta}

    return {"rope_parameters": {name: entry(rope) for name, rope in ropes.items()}}


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Writes the keys of a rotary embedding in the older form, which newer readers know too."""
    keys: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": _write_scaling(rope)}
    if rope.fraction != 1.0:
        keys["partial_rotary_factor"] = rope.fraction
    return keys


def in_rope_parameters(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns written keys with the rotary embedding's in ``rope_parameters``, the newer form.

    Some families read parts of it there only.
    """
    names = ("rope_theta", "partial_rotary_factor")
    rope = (keys.get("rope_scaling") or {"rope_type": "default"}) | {
        name: keys[name] for name in names if name in keys
    }
    plain = {name: value for name, value in keys.items() if name not in (*names, "rope_scaling")}
    return plain | {"rope_parameters": rope}


def _write_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    scaling = rope.scaling
    if rope.turning != 1.0:
        if not isinstance(scaling, LinearScaling | None):
            raise ConfigError(f"turning={rope.turning} with {type(scaling).__name__}: linear only")
        factor = {} if scaling is None else {"factor": scaling.factor}
        return {"rope_type": _PROPORTIONAL, "partial_rotary_factor": rope.turning, **factor}
    match scaling:
        case None:
            return None
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case DynamicScaling(factor=factor):
            return {"rope_type": "dynamic", "factor": factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        case YarnScaling():
            temperature = scaling.attention_factor
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_positions,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
            } | ({} if temperature is None else {"attention_factor": temperature})
        case LongRopeScaling():
            return {
                "rope_type": "longrope",
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
                "original_max_position_embeddings": scaling.original_max_positions,
                "attention_factor": scaling.attention_factor,
            }
        case _:
            raise ConfigError(
                f"{type(scaling).__name__} has no counterpart in Hugging Face configs: "
                "NTK-aware scaling there depends on the sequence's length (DynamicScaling)"
            )
