"""Print text of a model as it is sampled, or answer a file of prompts.

jaxinfra generate runs/tiny-1 --prompt "def main("
jaxinfra generate HF_DIR --prompts questions.jsonl --chat --out answers.jsonl
"""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint.hub import model_path
from jaxinfra.cli.engine_options import add_model_arguments, load_models
from jaxinfra.cli.template_option import add_template_argument, template_settings
from jaxinfra.cli.terminal import printable
from jaxinfra.errors import CheckpointError, ConfigError, DataError
from jaxinfra.runtime.files import parse_json, read_bytes
from jaxinfra.serving.engine.requests import EndReason
from jaxinfra.serving.generate import engine_for, generate_text, request_of
from jaxinfra.serving.load import LoadedModel, load_template
from jaxinfra.serving.sampling import SamplingConfig


def read_prompts(file: Path) -> list[Any]:
    """Reads prompts from a file: plain lines, or JSON lines with ``prompt`` or ``messages``.

    Raises:
        DataError: a JSON line has neither field; the error names the line.
    """
    text = _decoded(read_bytes(file, error=DataError), what=str(file))
    lines = [(number, each) for number, each in enumerate(text.split("\n"), 1) if each.strip()]
    if file.suffix != ".jsonl":
        return [each for _, each in lines]
    found = []
    for number, line in lines:
        row = parse_json(line, where=f"{file}:{number}", error=DataError)
        prompt = row.get("prompt", row.get("messages"))
        if not isinstance(prompt, str | list) or not prompt:
            raise DataError(f'{file}:{number}: neither a "prompt" of text nor "messages"')
        found.append(prompt)
    return found


_PROMPT_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra generate``."""
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="run, or a Hugging Face model: its directory or name"
    )
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
    add_template_argument(parser)
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
    add_model_arguments(parser)
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint (default: the newest)")


def run(args: argparse.Namespace) -> int:
    """Streams generated text to standard output and its speed to standard error."""
    started = time.perf_counter()
    if args.out is not None and args.prompts is None:
        raise ConfigError("--out is where the answers to --prompts go; give both")
    prompts = None if args.prompts is None else read_prompts(args.prompts)
    args.run = model_path(args.run)
    (model,) = load_models(args, args.run, step=args.step)
    sampling = model.sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    if prompts is not None:
        return _file(args, model, prompts, sampling)
    prompt = _standard_input() if args.prompt == "-" else args.prompt
    num_tokens, first, finish = 0, started, None
    options = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "seed": args.seed}
    options["consumes"] = True
    if args.chat:
        template = load_template(args.run, template_settings(args))
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
    return _decoded(data, what="the prompt on standard input")


def _decoded(data: bytes, *, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{what} is not UTF-8 text ({error})") from error


def _file(
    args: argparse.Namespace, model: LoadedModel, prompts: list[Any], sampling: SamplingConfig
) -> int:
    """Writes one JSON line per prompt, in order, and prints the speed; raises CheckpointError after
    all are done if some ended with an error.
    """
    if not prompts:
        raise ConfigError("the file of prompts is empty; give a prompt on each line")
    began, template = time.perf_counter(), None
    if args.chat or any(isinstance(each, list) for each in prompts):
        template = load_template(args.run, template_settings(args))

    def encoded(prompt: Any) -> list[int]:
        if template is None:
            return model.prompt(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return template.encode(model.tokenizer, messages)

    options = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "seed": args.seed}
    requests = [
        # With their number, so that equal prompts get texts of their own.
        request_of(model, encoded(prompt), choice=number, **options)
        for number, prompt in enumerate(prompts)
    ]
    engine = engine_for(model, requests, consumes=True, share_prefixes=True)
    num_tokens, errors = 0, []
    with contextlib.ExitStack() as closing:
        out = sys.stdout if args.out is None else closing.enter_context(args.out.open("x"))
        for prompt, told in zip(prompts, engine.run(requests), strict=True):
            tokens = sum(len(each.tokens) for each in told)
            num_tokens += tokens
            line = {"prompt": prompt, "text": "".join(each.text for each in told), "tokens": tokens}
            line["finish"] = told[-1].end
            if told[-1].error is not None:
                line["error"] = told[-1].error
                errors.append(told[-1].error)
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
    if errors:
        raise CheckpointError(f"{len(errors)} of {len(prompts)} prompts failed: {errors[0]}")
    print(
        f"{len(prompts)} prompts, {num_tokens} tokens in {time.perf_counter() - began:.1f} s (with "
        "compiling)",
        file=sys.stderr,
    )
    return 0
