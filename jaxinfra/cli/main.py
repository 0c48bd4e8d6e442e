"""The command line: parse, call one function, print. Errors are one line and a non-zero exit.

Exit codes: 0 done; 1 an error, said in one line; 2 wrong usage; 74 another process of the job is
gone or stuck, a restart may help; 75 asked to stop, saved, resumable; 128 + n (of ``launch``) a
process was ended by signal n.
"""

import argparse
import errno
import importlib
import logging
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn, override

from jaxinfra import __version__
from jaxinfra.errors import JaxinfraError, nearest
from jaxinfra.runtime.files import is_text
from jaxinfra.runtime.signals import RESUMABLE_EXIT, process_request

COMMANDS = {
    "train": "train a model, or continue a run",
    "rl": "train a model by reinforcement learning from a reward function",
    "presets": "list the named models and runs: sizes, and their use",
    "generate": "generate text with a run or a Hugging Face model",
    "chat": "talk with a model in the terminal",
    "serve": "serve a model through OpenAI's API",
    "compile": "compile a server's programs ahead of its start",
    "evaluate": "measure loss, perplexity and bits per byte on held-out text",
    "convert": "convert between Hugging Face and jaxinfra, both ways",
    "quantize": "quantize weights to 4 or 8 bits, for other programs too",
    "plan": "predict what fits, which mesh is best, and how fast it is",
    "launch": "start several processes of one job, and restart them when one fails",
    "faults": "inject faults into small runs, and check what was lost",
    "doctor": "find problems of this machine or a run, and their remedies",
    "watch": "show a run while it trains",
    "report": "write a run's report to one HTML file",
    "compare": "compare runs and their settings",
    "replay": "repeat a step: does it reproduce, and what made it not finite",
    "memory": "show a step's memory, and changes that would fit",
    "bench": "run a benchmark of jaxinfra beside the alternatives",
    "trace": "explain a profiler trace: what delays a step",
}
"""Name to help; the module of the same name in this package is imported when it is called."""

_RESTARTED = ("train", "rl", "launch")
"""Commands that a scheduler starts again where they end with RESUMABLE_EXIT."""

_REMEDIES = {
    errno.ENOSPC: "free space there, or name another directory",
    errno.EFBIG: "raise the limit on file sizes, or name another directory",
    errno.EDQUOT: "free space there, or name another directory",
    errno.EROFS: "name a directory that can be written",
    errno.EACCES: "name a directory that can be written",
}


class Parser(argparse.ArgumentParser):
    """An argparse parser whose one-line errors name the nearest option."""

    @override
    def error(self, message: str) -> NoReturn:
        unknown = "unrecognized arguments: "
        if message.startswith(unknown):
            # Empty, where the argument is: a variable of a script that is not set.
            name = message.removeprefix(unknown).partition(" ")[0].partition("=")[0].strip()
            options = [text for action in self._actions for text in action.option_strings]
            near = nearest(name, options) if name else "; leave the empty argument out"
            message = f"unknown option {name!r}{near}"
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_help()
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"jaxinfra {__version__}")
        return 0
    for number, word in enumerate(arguments, start=1):
        if not is_text(word):
            print(f"jaxinfra: argument {number} is not UTF-8 text: {word!a}", file=sys.stderr)
            return 2
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"jaxinfra: unknown command {name!r}{nearest(name, COMMANDS)}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    request = process_request()
    if request is not None and name in _RESTARTED:
        request.code = RESUMABLE_EXIT
    try:
        command = importlib.import_module(f"jaxinfra.cli.{name}")
        parser = Parser(
            prog=f"jaxinfra {name}",
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(parser)
        given = argparse.Namespace(command_line=rest)
        return command.run(parser.parse_args(rest, namespace=given))
    except JaxinfraError as error:
        # What it quotes of other libraries' errors may have line breaks.
        print(f"jaxinfra {name}: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return _leave(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away; there is no reader to tell
    except OSError as error:
        if error.errno is None:
            raise
        remedy = _REMEDIES.get(error.errno, "check that path and its disk")
        where = error.filename or "the disk of the run or of its data"
        print(f"jaxinfra {name}: {error.strerror}: {where}; {remedy}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"jaxinfra {name}: interrupted", file=sys.stderr)
        return _leave(130)
    except Exception:
        traceback.print_exc()
    return _leave(1)


def _leave(code: int) -> int:
    """Ends a process of a job without waiting for others; returns if the process is alone."""
    connection = sys.modules.get("jaxinfra.runtime.rendezvous")
    return code if connection is None else connection.end_process(code, together=False)


def _print_help() -> None:
    print("usage: jaxinfra COMMAND ...   (jaxinfra COMMAND --help says more; --version)\n")
    for name, text in COMMANDS.items():
        print(f"  {name:10s} {text}")
