"""Spoils real artefacts at random and gives them to every command: what must not happen.

python tools/fuzz.py --count 2000 --seed 0

Every case is a copy of a small run, a model directory, a text or a command line with one thing
spoilt, and one command that reads it. A case fails on a traceback, more than 20 s or 2 GB, or an
exit code that no command has. It also fails on exit 0 where the format's own reader refuses the
file, and on another loss or text than a good checkpoint gives. The last failure is a file changed
outside the named output. Failures keep their directory; their line says how to repeat them.
"""

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import jax
import tokenizers
from fuzz_files import is_set_aside, sums
from fuzz_spoil import refused_by_reference, spoil_arguments, spoil_file

ROOT = Path(__file__).parent.parent
LIMIT_S, LIMIT_BYTES = 20.0, 2 << 30
_PATIENCE = 15  # times the limit, on a machine that has much else to do
_CODES = (0, 1, 2, 74, 75)
_CONTEXT = multiprocessing.get_context("forkserver")
_SETTINGS = (
    "training.steps=4",
    "training.batch_size=4",
    "training.sequence_length=32",
    "checkpoint.every=2",
    "optimizer.warmup_steps=1",
    "optimizer.muon=none",
    "data.tokenizer.kind=bytes",
    "data.heldout_fraction=0.3",
    "model.vocab_size=300",
    "model.model_dim=32",
    "model.stacks.0.repeats=1",
    "model.stacks.0.pattern.0.mixer.head_dim=8",
    "model.stacks.0.pattern.0.feed_forward.hidden_dim=64",
)


# Settings that a run takes over from the model it starts from.
_OF_MODEL = ("model.", "data.tokenizer", "training.sequence_length")


def _train(where: Path) -> list[str]:
    options = [f"--set={setting}" for setting in _SETTINGS]
    return ["train", "tiny", "--no-sample", "--run", str(where), *options]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Files to corrupt, and the commands that read them."""

    name: str
    files: str  # glob of what may be spoilt
    commands: Callable[[Path, Path], list[list[str]]]  # by the paths of copy and output


_GREEDY = ("--prompt", "a", "--max-new-tokens", "8", "--temperature", "0")


def _of_run(copy: Path, out: Path) -> list[list[str]]:
    run = str(copy / "run")
    return [
        ["generate", run, *_GREEDY],
        ["evaluate", run, "--json"],
        ["convert", run, str(out)],
        ["train", "--resume", run, "--no-sample"],
        ["doctor", "checkpoint", run],
        ["doctor", "recorder", run],
        ["trace", run],
    ]


def _of_model(copy: Path, out: Path) -> list[list[str]]:
    model = str(copy / "model")
    return [
        ["generate", model, "--prompt", "a", "--max-new-tokens", "2"],
        ["convert", model, str(out)],
        ["plan", model],
        ["generate", model, "--chat", "--prompt", "a", "--max-new-tokens", "2"],
    ]


def _of_start(copy: Path, out: Path) -> list[list[str]]:
    start = ["train", "--init", str(copy / "model"), "--no-sample", "--run", str(out)]
    settings = [f"--set={setting}" for setting in _SETTINGS if not setting.startswith(_OF_MODEL)]
    settings.append("--set=training.sequence_length=64")
    chats = ["--chat", "--data", str(copy / "text" / "chats.jsonl")]
    return [
        [*start, *settings, *chats],
        [*start, *settings, *chats, "--lora", "rank=2,alpha=4,targets=query"],
    ]


def _of_text(copy: Path, out: Path) -> list[list[str]]:
    return [[*_train(out), "--data", str(copy / "text")]]


def _of_arguments(copy: Path, out: Path) -> list[list[str]]:
    return [
        [*_train(out), "--data", str(copy / "none")],
        ["plan", "llama32_1b", "--devices", "8"],
        ["launch", "-n", "2", "--logs", str(out), "--", "x"],
    ]


# Their layouts differ: fused projections, experts, latents, quantization, several files.
_FAMILIES = ("gpt2", "phi3_longrope", "mixtral", "deepseek_v3", "gpt_oss", "qwen3")

TARGETS = (
    Target(name="run", files="run/**/*", commands=_of_run),
    Target(name="model", files="model/*", commands=_of_model),
    Target(name="start", files="*/*", commands=_of_start),
    Target(name="text", files="text/*", commands=_of_text),
    Target(name="arguments", files="none/*", commands=_of_arguments),
)


def make_seeds(place: Path) -> None:
    """Small good artefacts, from which every case is a copy."""
    text = place / "source"
    text.mkdir(parents=True)
    for number in range(12):
        words = random.Random(number).choices(["the", "loss", "of", "a", "step"], k=90)
        (text / f"{number}.txt").write_text(" ".join(words) + "\n")
    run = place / "run-seed" / "run"
    words = [*_train(run), "--profile", "2:3", "--data", str(text)]
    code, said, _ = call(words, place, limit_s=120)
    assert code == 0, said
    _note_answers(run, place)
    model = place / "model-seed" / "model"
    code, said, _ = call(["convert", str(run), str(model)], place)
    assert code == 0, said
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in _FAMILIES:
        family = place / f"model-seed-{name}" / "model"
        shutil.copytree(ROOT / "tests" / "golden" / "hf" / name, family)
        (family / "golden.npz").unlink()
        words = {word: number for number, word in enumerate(("<unk>", "</s>", "<s>", "a", "b"))}
        known = tokenizers.models.WordLevel(words, unk_token="<unk>")
        tokenizers.Tokenizer(known).save(str(family / "tokenizer.json"))
    start = place / "start-seed"
    shutil.copytree(model, start / "model")
    (start / "text").mkdir()
    (start / "text" / "chats.jsonl").write_text("\n".join(_chat(number) for number in range(12)))
    rows = [json.dumps({"text": " ".join(["row", str(number)] * 50)}) for number in range(20)]
    for name, data in (("rows.jsonl", "\n".join(rows)), ("words.txt", "some words " * 400)):
        seed = place / f"text-seed-{name}" / "text"
        seed.mkdir(parents=True)
        (seed / name).write_text(data)
    shutil.copytree(text, place / "arguments-seed" / "none")


def _note_answers(run: Path, place: Path) -> None:
    """Records the answer of each good checkpoint of a run."""
    answers: dict[str, dict[str, Any]] = {}
    for path in (run / "checkpoints").glob("step_*"):
        step = str(int(path.name[5:]))
        code, said, _ = call(["evaluate", str(run), "--json", "--step", step], place)
        assert code == 0, said
        loss = json.loads(said.splitlines()[-1])["heldout_loss"]
        code, said, _ = call(["generate", str(run), *_GREEDY, "--step", step], place)
        assert code == 0, said
        text = said[: said.index(f"8 tokens of step {step}")]
        answers[step] = {"loss": loss, "text": text}
    (place / "answers.json").write_text(json.dumps(answers))


def wrong_answer(command: list[str], said: str, place: Path) -> str | None:
    """Explains how a successful command's answer differs from its checkpoint's good one; None if
    equal."""
    if "settings changed" in said:
        return None  # so another answer may be right
    answers = json.loads((place / "answers.json").read_text())
    if command[0] == "evaluate":
        result = json.loads(said.splitlines()[-1])
        if result["heldout_loss"] != answers[str(result["step"])]["loss"]:
            return f"another loss: {result}, not {answers}"
    if command[0] == "generate" and not any(each["text"] in said for each in answers.values()):
        return f"another text: {said[-300:]!r}, not {answers}"
    return None


def _chat(number: int) -> str:
    asked = {"role": "user", "content": f"what is {number}?"}
    return json.dumps({"messages": [asked, {"role": "assistant", "content": f"it is {number}"}]})


def call(
    arguments: list[str], place: Path, *, limit_s: float = LIMIT_S
) -> tuple[int | None, str, int]:
    """Exit code (None: not within the time), what was said, and the most memory it took."""
    log = place / "said.txt"
    process = _CONTEXT.Process(target=_child, args=(arguments, log))
    process.start()
    peak, began, used = 0, time.monotonic(), 0.0
    moved = began
    while process.is_alive() and peak < LIMIT_BYTES:
        process.join(0.02)
        peak = max(peak, _resident(process))
        # CPU time of the process tells a hang: other work may share the cores, a wait uses none.
        now, so_far = time.monotonic(), _cpu_s(process)
        if so_far > used:
            used, moved = so_far, now
        if used > limit_s or now - moved > limit_s or now - began > _PATIENCE * limit_s:
            break
    late = process.is_alive()
    if late:
        process.kill()
    process.join()
    code = None if late and peak < LIMIT_BYTES else process.exitcode
    return code, log.read_text(errors="replace"), peak


def _resident(process: BaseProcess) -> int:
    with contextlib.suppress(OSError, IndexError):
        pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")
    return 0


def _cpu_s(process: BaseProcess) -> float:
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _child(arguments: list[str], log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(log.parent)
    os.environ["XDG_CACHE_HOME"] = str(log.parent.parent / "cache")
    # Programs run for a moment and compile for longer: as little of that as there can be.
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0"
        " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    )
    jax.config.update("jax_compilation_cache_dir", str(log.parent.parent / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    from jaxinfra.cli.main import main
    from jaxinfra.runtime.signals import guard_process

    guard_process()
    sys.exit(main(arguments))


# Files that no reader needs: logs, and results that can be computed again.
_LOGS = ("summary.json", "metrics.jsonl", "goodput.jsonl", "incidents.jsonl", "hf_config.json")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A command, what was spoilt before it, and what came of it."""

    target: Target
    command: list[str]
    spoilt: Path | None
    is_same: bool  # the file has the bytes that it had
    code: int | None
    said: str
    peak: int

    def wrong(self, place: Path) -> str | None:
        """Explains the rule that this outcome breaks; None where it breaks no rule."""
        if self.code is None:
            return f"not ended after {LIMIT_S:g} s"
        if self.peak > LIMIT_BYTES:
            return f"took {self.peak / 2**30:.1f} GiB"
        if "Traceback" in self.said or "PanicException" in self.said:
            return f"a traceback: {self.said[-600:]}"
        if self.code not in _CODES:
            return f"exit code {self.code}"
        return self._wrongly_taken(place) if self.code == 0 else None

    def _wrongly_taken(self, place: Path) -> str | None:
        spoilt, command = self.spoilt, self.command
        if self.target.name == "run" and (found := wrong_answer(command, self.said, place)):
            return found
        if spoilt is None or self.is_same:
            return None
        if command[1] == "checkpoint" and _is_saved(spoilt):
            return "doctor calls a changed checkpoint good"
        if spoilt.name in _LOGS or not _is_read(command, spoilt):
            return None
        refused = refused_by_reference(spoilt)
        return "accepted what its format's own reader refuses" if refused else None

    def wrongly_changed(self, before: dict[str, str], after: dict[str, str]) -> str | None:
        """Names a changed file that the command must not write; None where there is none."""
        if self.target.name == "arguments":
            return None  # the command line names the files it writes
        ours = ("out", "said.txt", *(("run",) if "--resume" in self.command else ()))
        for name in sorted(before.keys() | after.keys()):
            changed = before.get(name) != after.get(name)
            saved = "/step_" in name and "quarantine" not in name and name in before
            saved = saved and not is_set_aside(name, before, after)
            if changed and (not name.startswith(ours) or (saved and name in after)):
                return f"changed {name}"
        return None


def run_case(place: Path, number: int, seed: int) -> str | None:
    """Runs one case; returns what was wrong, or None."""
    rng = random.Random(f"{seed} {number}")
    target = TARGETS[number % len(TARGETS)]
    seeds = sorted(place.glob(f"{target.name}-seed*"))
    case = place / f"case-{number}"
    shutil.copytree(rng.choice(seeds), case, symlinks=True)
    files = sorted(path for path in case.glob(target.files) if path.is_file())
    spoilt, way, is_same = None, "", False
    if files:
        spoilt = rng.choice(files)
        data = spoilt.read_bytes()
        way = spoil_file(spoilt, rng)
        is_same = spoilt.is_file() and not spoilt.is_symlink() and spoilt.read_bytes() == data
    command = rng.choice(target.commands(case, case / "out"))
    if target.name == "arguments":
        command = spoil_arguments(command, rng)
    what = f"{way} {spoilt and spoilt.relative_to(case)}: jaxinfra {' '.join(command)[:300]}"
    before = sums(case)
    code, said, peak = call(command, case)
    given = {"target": target, "command": command, "spoilt": spoilt, "is_same": is_same}
    ended = Case(**given, code=code, said=said, peak=peak)
    wrong = ended.wrong(place) or ended.wrongly_changed(before, sums(case))
    if wrong is None:
        shutil.rmtree(case)
        return None
    return f"case {number} of seed {seed}: {what}: {wrong}"


def _is_saved(spoilt: Path) -> bool:
    """Whether a file is one that the sums of a checkpoint are of."""
    return any(part.startswith("step_") for part in spoilt.parts)


def _is_read(command: list[str], spoilt: Path) -> bool:
    """Whether a command reads a file: a plan needs no weights, doctor no tokenizer."""
    if command[0] in ("doctor", "trace", "plan"):
        return False
    if "checkpoints" in spoilt.parts:
        return False  # an older good one is used
    return spoilt.name in ("config.json", "tokenizer.json") or spoilt.suffix == ".safetensors"


def cases(place: Path, *, count: int, seed: int, first: int = 0) -> Iterator[str]:
    """Runs the cases; yields each failure."""
    _CONTEXT.set_forkserver_preload(
        [__name__, *(f"jaxinfra.cli.{name}" for name in ("train", "evaluate", "generate", "plan"))]
    )
    make_seeds(place)
    for number in range(first, first + count):
        found = run_case(place, number, seed)
        if found is not None:
            yield found


def main() -> int:
    """Runs the cases, prints each failure, and how many there were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--place", type=Path, default=Path("fuzz"))
    args = parser.parse_args()
    if args.place.exists():
        parser.error(f"{args.place} exists: remove it, or name another --place")
    failures = 0
    for found in cases(args.place.absolute(), count=args.count, seed=args.seed, first=args.first):
        failures += 1
        print(found, flush=True)
    print(f"{args.count - failures} of {args.count} cases passed (seed {args.seed})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
