"""``jaxinfra generate RUN --prompt TEXT``: text from a trained model, as it is sampled."""

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint.finite import ALLOW_HELP, nonfinite_allowed
from jaxinfra.cli.generate_file import generate_file, read_prompts
from jaxinfra.cli.terminal import printable
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.mesh import parse_mesh
from jaxinfra.config.precision import PolicyName
from jaxinfra.data.chat_template import load_chat_template
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.serving.engine.requests import EndReason
from jaxinfra.serving.generate import generate_text
from jaxinfra.serving.load import LoadedModel, load
from jaxinfra.serving.sampling import SamplingConfig

_PROMPT_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("run", metavar="RUN", type=Path, help="run, or a Hugging Face model")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt", metavar="TEXT", help="text to continue; -: from standard input"
    )
    prompts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="file with one prompt per line, or of JSON lines (.jsonl)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="with --prompts: file for the answers, as JSON lines",
    )
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a message, in the model's chat template"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: 256")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0: always the most likely token (default: generation_config.json's, else 0.8)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the top K tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the top tokens of mass P"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="random seed (default: 0)")
    parser.add_argument(
        "--policy",
        choices=[name.value for name in PolicyName],
        help="compute dtype; default: that of the training run",
    )
    parser.add_argument(
        "--mesh",
        default="",
        metavar="AXES",
        help="mesh of devices that share the model, such as tensor=2",
    )
    parser.add_argument(
        "--cache",
        choices=[form.value for form in CacheFormat],
        default=CacheFormat.PLAIN.value,
        help="format of the KV cache; plain: the compute dtype (default: plain)",
    )
    parser.add_argument("--allow-nonfinite", action="store_true", help=ALLOW_HELP)
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint (default: the newest)")


def run(args: argparse.Namespace) -> int:
    """Streams the continuation to standard output, its speed to standard error."""
    started = time.perf_counter()
    policy = None if args.policy is None else PolicyName(args.policy)
    if args.out is not None and args.prompts is None:
        raise ConfigError("--out is where the answers to --prompts go; give both")
    prompts = None if args.prompts is None else read_prompts(args.prompts)
    with nonfinite_allowed(allowed=args.allow_nonfinite):
        model = load(args.run, policy=policy, step=args.step, mesh=parse_mesh(args.mesh))
        model = model.with_cache(CacheFormat(args.cache))
    sampling = model.sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    if prompts is not None:
        return _file(args, model, prompts, sampling)
    prompt = _standard_input() if args.prompt == "-" else args.prompt
    num_tokens, first, finish = 0, started, None
    options = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "seed": args.seed}
    options["consumes"] = True
    if args.chat:
        template = load_chat_template(args.run)
        prompt = template.encode(model.tokenizer, [{"role": "user", "content": prompt}])
    try:
        for progress in generate_text(model, prompt, **options):
            num_tokens += len(progress.tokens)
            finish = progress.end
            if num_tokens == 1:
                first = time.perf_counter()
            # Elsewhere than on a terminal, the text is written exactly as sampled.
            text = printable(progress.text) if sys.stdout.isatty() else progress.text
            print(text, end="", flush=True)
    finally:
        print()  # what else is said begins a line of its own
    rest_s = time.perf_counter() - first
    speed = f", then {(num_tokens - 1) / rest_s:.1f} tokens/s" if num_tokens > 1 else ""
    step = "" if model.step is None else f" of step {model.step}"
    print(
        f"{num_tokens} tokens{step}: the first after {first - started:.1f} s "
        f"(loading and compiling){speed}",
        file=sys.stderr,
    )
    if finish is EndReason.CONTEXT:
        print(
            f"stopped there: the model has {model.definition.config.max_positions} positions, "
            f"fewer than the prompt and --max-new-tokens {args.max_new_tokens} need",
            file=sys.stderr,
        )
    return 0


def _standard_input() -> str:
    data = sys.stdin.buffer.read(_PROMPT_BYTES + 1)
    if len(data) > _PROMPT_BYTES:
        raise DataError(f"the prompt on standard input has more than {_PROMPT_BYTES:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"the prompt on standard input is not UTF-8 text ({error})") from error


def _file(
    args: argparse.Namespace, model: LoadedModel, prompts: list[Any], sampling: SamplingConfig
) -> int:
    """Answers every prompt of a file, and says how fast."""
    began = time.perf_counter()
    options = {"max_new_tokens": args.max_new_tokens, "seed": args.seed, "chat": args.chat}
    with contextlib.ExitStack() as closing:
        out = sys.stdout if args.out is None else closing.enter_context(args.out.open("x"))
        count = generate_file(model, args.run, prompts, out, sampling=sampling, **options)
    seconds = time.perf_counter() - began
    print(
        f"{len(prompts)} prompts, {count} tokens in {seconds:.1f} s (with compiling)",
        file=sys.stderr,
    )
    return 0
