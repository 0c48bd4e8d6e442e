"""Talk with a model in the terminal. It stays loaded and keeps its KV cache.

jaxinfra chat HF_DIR
jaxinfra chat runs/tiny-1 --plain            a model without a chat template continues the text

/forget starts a new conversation; /quit or the end of input ends. What compilers say in a terminal
goes to chat.log in the user cache, not into the dialogue.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxinfra.checkpoint.hub import model_path
from jaxinfra.cli.template_option import add_template_argument, template_settings
from jaxinfra.cli.terminal import printable
from jaxinfra.config.precision import PolicyName
from jaxinfra.errors import DataError
from jaxinfra.runtime.files import user_cache
from jaxinfra.serving.conversation import Conversation
from jaxinfra.serving.engine.requests import EndReason
from jaxinfra.serving.load import load, load_template


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra chat``."""
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="run, or a Hugging Face model: its directory or name"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--plain", action="store_true", help="continue text without a template")
    add_template_argument(parser)
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="default: 512")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest token")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the top tokens of mass P"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="random seed (default: 0)")
    parser.add_argument(
        "--context", type=int, default=8192, metavar="N", help="most tokens (default: 8192)"
    )
    parser.add_argument(
        "--policy", choices=[name.value for name in PolicyName], help="compute dtype"
    )


def run(args: argparse.Namespace) -> int:
    """Chats in the terminal: reads messages and writes answers until the input ends."""
    args.run = model_path(args.run)
    template = None if args.plain else load_template(args.run, template_settings(args))
    policy = None if args.policy is None else PolicyName(args.policy)
    model = load(args.run, policy=policy)
    conversation = Conversation(
        model,
        template,
        sampling=model.sampling(temperature=args.temperature, top_p=args.top_p),
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        system=args.system,
        context=args.context,
    )
    is_terminal = sys.stdin.isatty()
    log = user_cache() / "chat.log" if sys.stderr.isatty() else None
    while (line := _read(is_terminal)) not in (None, "/quit"):
        if line == "/forget":
            conversation.forget()
        elif line:
            _answer(conversation, line, log)
    return 0


def _read(is_terminal: bool) -> str | None:
    if is_terminal:
        print("> ", end="", flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _answer(conversation: Conversation, line: str, log: Path | None) -> None:
    try:
        with errors_to(log):
            for text in conversation.ask(line):
                print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)
    except DataError as error:
        print(f"{error}; /forget begins anew", file=sys.stderr)
        return
    print()
    if conversation.end is EndReason.CONTEXT:
        print("the context is full; /forget begins anew", file=sys.stderr)


@contextlib.contextmanager
def errors_to(log: Path | None) -> Iterator[None]:
    """Appends what the block writes to file descriptor 2, as compilers do, to a file instead."""
    if log is None:
        yield
        return
    sys.stderr.flush()
    terminal = os.dup(2)
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
            yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
