"""Recomputation chosen by a budget beside the fixed policies: memory, time, and what was predicted.

python -m experiments.bench.recomputation --out experiments/results/recomputation-h200.json
python -m experiments.bench.recomputation --preset tiny --layers 2 --unroll 2 --batch 2 --length 128

Budgets lie halfway between what the steps of every two fixed policies need; of two that are closer
than --apart GiB the lower one counts. At each budget the search of ``remat=optimal`` says what
layers keep, and its step is timed beside those of the fixed policies: all programs advance the same
state in turns, in one process. A search begins from what the fixed policies need, and corrects
itself --corrections times; all searches' programs of a turn are compiled at once.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from experiments.bench.environment import clocks, environment
from experiments.bench.step_programs import (
    Program,
    SharedState,
    data,
    ours,
    without_rope_scaling,
)
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.precision import Fp8Matmuls, Fp8Scaling, PolicyName, PrecisionConfig
from jaxinfra.config.presets import MODELS
from jaxinfra.config.presets.runs import pretraining
from jaxinfra.config.run import KeptValues, Remat, RunConfig
from jaxinfra.models.definition import define_model
from jaxinfra.numerics.policy import policy_of
from jaxinfra.parallel.execution import execution_on
from jaxinfra.training.optimal import KeptSearch, layers_of
from jaxinfra.training.recompute import CHEAPEST_FIRST

GIB = 2**30
_ATTENTION = ("attention_out", "attention.out")
_HEADS = ("attention.query", "attention.key", "attention.value")
_AS_NAMES = {
    Remat.NAMED: ("attention_out",),
    Remat.MLP: (*_ATTENTION, *_HEADS),
    Remat.DOTS: (*_ATTENTION, *_HEADS, "mlp.gate", "mlp.up"),
}
"""What fixed policies keep of a dense block that the backward pass reads."""


def main() -> None:
    """Compiles the fixed policies, searches at each budget, times all; writes the JSON as it
    goes.
    """
    args = _arguments()
    began = time.monotonic()
    config = without_rope_scaling(MODELS[args.preset]())
    config = config.with_layers(args.layers or config.num_layers)
    bench = _Bench(config, args)
    result: dict[str, Any] = {"environment": environment(), "assumed_gib": args.assume}
    result["shapes"] = {name: getattr(args, name) for name in ("preset", "batch", "length")}
    result["shapes"] |= {"layers": config.num_layers, "unroll": args.unroll}
    fixed = {name: (Remat(name), ()) for name in args.fixed}
    fixed |= {f"fp8 {each}": (Remat.DOTS, ()) for each in args.fp8}
    assumed = {name: int(gib * GIB) for name, gib in args.assume.items()}
    programs: dict[str, Program] = {}
    if not assumed:
        programs = bench.compiled(fixed)
        assumed = {remat.value: programs[remat.value].need_bytes for remat in CHEAPEST_FIRST}
        fixed = {}
        _say(began, "fixed policies compiled")
    budgets = halfway(assumed, apart=int(args.apart * GIB))
    searches = {name: bench.search(size) for name, size in budgets.items()}
    for search in searches.values():
        bench.teach(search, assumed, margin=int(args.margin * GIB))
    choices: dict[str, Choice] = {}
    for _ in range(1 + args.corrections):
        wanted = {f"{name} {len(choices)}": search for name, search in searches.items()}
        proposed = {name: search.propose() for name, search in wanted.items()}
        found = {name: chosen for name, chosen in proposed.items() if chosen is not None}
        if not found or time.monotonic() - began > args.search_s:
            break
        asked = {name: (Remat.CHOSEN, wanted[name].kept(each)) for name, each in found.items()}
        programs |= bench.compiled(fixed | asked)
        fixed = {}
        _say(began, f"{len(found)} choices compiled")
        for name, chosen in found.items():
            need = programs[name].need_bytes
            predicted = wanted[name].predicted(chosen)
            wanted[name].observe(chosen, need)
            choices[name] = Choice(
                kept=wanted[name].kept(chosen),
                seconds=wanted[name].seconds(chosen),
                predicted_bytes=predicted,
                need_bytes=need,
            )
    # What was not compiled here is off by as much as the dots policy.
    needs = {name: programs[name].need_bytes for name in args.fixed}
    off = needs[Remat.DOTS.value] - assumed[Remat.DOTS.value]
    needs = {name: needs.get(name, size + off) for name, size in assumed.items()}
    budgets = {
        name: size
        for name, size in halfway(needs, apart=int(args.apart * GIB)).items()
        if any(each.need_bytes <= size for each in choices.values())
    }
    taken = {name: best_choice(choices, size) for name, size in budgets.items()}
    result["programs"] = {
        name: {
            "need_gib": program.need_bytes / GIB,
            "temp_gib": program.temp_bytes / GIB,
            "compile_s": program.compile_s,
        }
        for name, program in programs.items()
    }
    result["choices"] = {name: dataclasses.asdict(each) for name, each in choices.items()}
    _write(result, args.out)
    shared = SharedState(programs, data(config, batch=args.batch, length=args.length))
    _say(began, "state made")
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(args.rounds):
        if turn and time.monotonic() - began > args.seconds:
            break
        # Back and forth, so that a drift of the clock meets all alike.
        for name in list(programs)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(shared.time_steps(name, args.steps))
            result["rounds_ms"] = {k: [1e3 * s for s in each] for k, each in seconds.items()}
            _write(result, args.out)
        result["clocks_after"] = clocks()
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        result["fp8"] = {k: {"ms": 1e3 * v} for k, v in medians.items() if k.startswith("fp8")}
        result |= compare(medians, needs=needs, budgets=budgets, taken=taken, choices=choices)
        _write(result, args.out)
        print("\n".join(lines(result)), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama3_8b", choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--unroll", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2, help="a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--apart", type=float, default=0.3, help="GiB between budgets at least")
    parser.add_argument("--margin", type=float, default=0.0, help="GiB that choices leave at first")
    parser.add_argument(
        "--fp8", nargs="*", default=[], metavar="SCALING", help="steps in 8 bits (dots) besides"
    )
    parser.add_argument(
        "--fixed",
        nargs="+",
        default=[remat.value for remat in CHEAPEST_FIRST],
        choices=[remat.value for remat in CHEAPEST_FIRST],
        help="policies that are compiled and timed; dots among them",
    )
    parser.add_argument(
        "--assume",
        type=json.loads,
        default={},
        metavar="JSON",
        help="what steps of all fixed policies need, in GiB, as seen before: all programs are then "
        "compiled at once",
    )
    parser.add_argument("--corrections", type=int, default=1, help="of each search")
    parser.add_argument("--threads", type=int, default=14, help="that compile")
    parser.add_argument("--search-s", type=float, default=150.0, help="when none is begun any more")
    parser.add_argument("--seconds", type=float, default=600.0, help="of all but one round")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    return parser.parse_args()


class _Bench:
    """What all programs have in common."""

    def __init__(self, config: ModelConfig, args: argparse.Namespace):
        self.config, self.args = config, args
        run = _run(config, args)
        model = define_model(
            config, execution_on(policy=policy_of(run.precision), unroll=args.unroll)
        )
        self.stacks = layers_of(run, model, None)

    def search(self, budget: int) -> KeptSearch:
        return KeptSearch(self.stacks, budget_bytes=budget)

    def teach(self, search: KeptSearch, needs: Mapping[str, int], *, margin: int) -> None:
        """What the fixed policies need, as far as they are among the search's options.

        Args:
            margin: bytes that are expected beside that.
        """
        search.observe(search.least, needs[Remat.FULL.value])
        for remat, names in _AS_NAMES.items():
            found = [
                option
                for each in search.layers
                for option in each.options
                if set(option.names) == set(names)
            ]
            if len(found) == len(search.layers):
                search.learn(tuple(found), needs[remat.value] + margin)

    def compiled(
        self, wanted: Mapping[str, tuple[Remat, tuple[KeptValues, ...]]]
    ) -> dict[str, Program]:
        """Programs, compiled at once."""

        def one(name: str) -> Program:
            remat, kept = wanted[name]
            is_fp8 = name.startswith("fp8")
            program = ours(
                self.config,
                batch=self.args.batch,
                length=self.args.length,
                remat=remat.value,
                attention="auto",
                unroll=self.args.unroll,
                kept=kept,
                fp8=Fp8Matmuls(scaling=Fp8Scaling(name.split()[1])) if is_fp8 else None,
            )
            print(f"{name}: {program.need_bytes / GIB:.2f} GiB", flush=True)
            return program

        with ThreadPoolExecutor(self.args.threads) as pool:
            return dict(zip(wanted, pool.map(one, wanted), strict=True))


def _run(config: ModelConfig, args: argparse.Namespace) -> RunConfig:
    run = pretraining(config)
    training = dataclasses.replace(
        run.training,
        batch_size=args.batch,
        sequence_length=args.length,
        accumulation=1,
        unroll=args.unroll,
    )
    precision = PrecisionConfig(policy=PolicyName.BF16)
    return dataclasses.replace(run, training=training, precision=precision)


def halfway(needs: Mapping[str, int], *, apart: int) -> dict[str, int]:
    """Budgets in the middle of every two policies' needs, by both names, where either is ``apart``
    bytes away or more; of those that are closer to each other the lowest.
    """
    middles = {
        f"{a}-{b}": (needs[a] + needs[b]) // 2
        for a, b in itertools.combinations(needs, 2)
        if abs(needs[a] - needs[b]) >= 2 * apart
    }
    found: dict[str, int] = {}
    for name, size in sorted(middles.items(), key=lambda item: item[1]):
        if not found or size - max(found.values()) >= apart:
            found[name] = size
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a search proposed, and what its step needs."""

    kept: tuple[KeptValues, ...]
    seconds: float
    predicted_bytes: int
    need_bytes: int


def best_choice(choices: Mapping[str, Choice], budget: int) -> str:
    """Of the choices that fit, the one that computes least again."""
    fitting = {name: each.seconds for name, each in choices.items() if each.need_bytes <= budget}
    return min(fitting, key=fitting.__getitem__)


def compare(
    medians: Mapping[str, float],
    *,
    needs: Mapping[str, int],
    budgets: Mapping[str, int],
    taken: Mapping[str, str],
    choices: Mapping[str, Choice],
) -> dict[str, Any]:
    """At each budget the choice beside the fastest fixed policy that fits, and predictions beside
    what was measured.
    """
    rows: list[dict[str, Any]] = []
    timed = [name for name in needs if name in medians]
    fastest = min(medians[name] for name in timed)
    for name, size in budgets.items():
        fitting = {each: medians[each] for each in timed if needs[each] <= size}
        best = min(fitting, key=fitting.__getitem__)
        choice, mine = choices[taken[name]], medians[taken[name]]
        rows.append(
            {
                "budget": name,
                "budget_gib": size / GIB,
                "best_fixed": best,
                "best_fixed_ms": 1e3 * fitting[best],
                "optimal": taken[name],
                "optimal_ms": 1e3 * mine,
                "speed": fitting[best] / mine,
                "need_gib": choice.need_bytes / GIB,
                "predicted_need_gib": choice.predicted_bytes / GIB,
                "predicted_again_ms": 1e3 * choice.seconds,
                "over_fastest_fixed_ms": 1e3 * (mine - fastest),
            }
        )
    speeds = [float(row["speed"]) for row in rows]
    return {
        "fixed": {
            each: {
                "need_gib": needs[each] / GIB,
                "ms": 1e3 * medians[each] if each in medians else None,
            }
            for each in needs
        },
        "budgets": rows,
        "geometric_mean": math.exp(statistics.fmean(map(math.log, speeds))),
        "least": min(speeds),
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The table."""
    texts = [
        f"{k:<8}{v['need_gib']:8.2f} GiB {v['ms'] or math.nan:8.1f} ms"
        for k, v in result["fixed"].items()
    ]
    for row in result["budgets"]:
        texts.append(
            f"{row['budget']:<12} {row['budget_gib']:7.2f} GiB: {row['best_fixed']} "
            f"{row['best_fixed_ms']:.1f} ms, optimal {row['optimal_ms']:.1f} ms "
            f"({row['speed']:.3f}x) in {row['need_gib']:.2f} GiB (predicted "
            f"{row['predicted_need_gib']:.2f}), {row['over_fastest_fixed_ms']:.1f} ms over the "
            f"fastest fixed (predicted {row['predicted_again_ms']:.1f})"
        )
    texts.append(f"geometric mean {result['geometric_mean']:.4f}, least {result['least']:.4f}")
    return texts


def _write(result: Mapping[str, Any], out: pathlib.Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")


def _say(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:6.1f} s: {text}", flush=True)


if __name__ == "__main__":
    main()
