"""Bad input: one line that names the value and the remedy, a non-zero exit, nothing overwritten."""

import json
import shutil
from pathlib import Path

import pytest
from e2e.runs import Bench, metrics

# What is wrong: the arguments of ``train`` after good ones, and words of the line it must give.
# Every rule of a config is in unit/test_config.py, of data in unit/test_data_sources.py.
SETTINGS = {
    "preset": (["tinny"], ["unknown preset 'tinny'", "did you mean 'tiny'"]),
    "option": (["--setp", "3"], ["unknown option '--setp'", "did you mean '--set'"]),
    "seed": (["--seed", str(10**30)], ["seed", str(10**30)]),
    "devices": (["--mesh", "fsdp=4"], ["fsdp=4 needs 4 devices, 1 are here"]),
    "pipe": (["--mesh", "pipe=2"], ["pipe=2 needs 2 devices, 1 are here"]),
    "tokenizer": (["--set=model.vocab_size=200"], ["vocab_size=200", "smaller tokenizer"]),
    "tokenizer file": (
        ["--set=data.tokenizer.kind=file", "--set=data.tokenizer.path=/no/tokenizer.json"],
        ["/no/tokenizer.json"],
    ),
    "profile": (["--profile", "7"], ["--profile '7'", "START:STOP"]),
    "profile order": (["--profile", "5:3"], ["--profile '5:3'", "START < STOP"]),
    "profile beyond": (["--profile", "30:31"], ["30:31", "0:20", "within"]),
    "no resume": (["--resume", "/no/run"], ["--resume", "no --run"]),
    "cache": (["--cache", "/proc/cache"], ["/proc/cache"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(bench, case):
    wrong, words = SETTINGS[case]
    arguments = bench.new("run")
    if case == "preset":
        arguments.remove("tiny")
    assert_refused(bench, [*arguments, *wrong], words)
    assert not (bench / "run").exists()


def missing(place: Path) -> Path:
    return place / "nowhere"


def empty(place: Path) -> Path:
    (place / "empty").mkdir()
    return place / "empty"


def unreadable(place: Path) -> Path:
    """A link to what nobody can read from its start, whoever they are."""
    empty(place)
    for number in range(10):
        (place / "empty" / f"{number}.txt").symlink_to("/proc/self/mem")
    return place / "empty"


DATA = {
    missing: ["nowhere", "no such file or directory", "name a file"],
    empty: ["empty", "holds no files", "name one"],
    unreadable: [".txt", "cannot be read", "Input/output error"],
}


@pytest.mark.parametrize("make", DATA, ids=lambda make: make.__name__)
def test_data(bench, make):
    source = make(bench.place)
    assert_refused(bench, [*bench.new("run"), "--data", source], DATA[make])
    # Corrected, the same command works: the directory is free again.
    assert not (bench / "run").exists()


def a_run(place: Path) -> Path:
    (place / "run").mkdir()
    (place / "run" / "config.json").write_text("precious")
    return place / "run"


def a_file(place: Path) -> Path:
    (place / "run").write_text("precious")
    return place / "run"


def beneath_a_file(place: Path) -> Path:
    (place / "run").write_text("precious")
    return place / "run" / "below"


def unwritable(place: Path) -> Path:
    return Path("/proc/run")


DIRECTORIES = {
    a_run: ["not an empty directory", "--resume"],
    a_file: ["not an empty directory", "name another"],
    beneath_a_file: ["Not a directory", "run/below"],
    unwritable: ["/proc/run", "No such file or directory", "check that path"],
}


@pytest.mark.parametrize("make", DIRECTORIES, ids=lambda make: make.__name__)
def test_run_directory(bench, make):
    directory = make(bench.place)
    before = files(bench.place)
    assert_refused(bench, [*bench.new("other"), "--run", directory], DIRECTORIES[make])
    assert files(bench.place) == before


def not_there(run: Path) -> None:
    shutil.rmtree(run)


def foreign_setting(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    config["training"]["stepz"] = 3
    (run / "config.json").write_text(json.dumps(config))


def another_model(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    config["model"]["stacks"][0]["pattern"][0]["feed_forward"]["hidden_dim"] = 48
    (run / "config.json").write_text(json.dumps(config))


def no_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


RUNS = {
    ("train", not_there): ["no run directory", "jaxinfra train"],
    ("train", foreign_setting): ["stepz"],
    ("train", another_model): ["hidden_dim", "64", "48", "saved values"],
    ("evaluate", no_checkpoint): ["no checkpoint"],
}


@pytest.mark.parametrize(
    ("command", "spoil"), RUNS, ids=[f"{command}-{spoil.__name__}" for command, spoil in RUNS]
)
def test_runs(bench, whole, command, spoil):
    run = shutil.copytree(whole, bench / "run")
    (run / "summary.json").unlink()  # so that there is something left to do
    spoil(run)
    before = files(run)
    options = ["--resume", run] if command == "train" else [run]
    arguments = [command, *options, "--cache", bench.cache]
    assert_refused(bench, arguments, RUNS[command, spoil])
    assert files(run) == before


OTHERS = {
    "command": (["trian"], ["unknown command 'trian'", "did you mean 'train'"]),
    "benchmark": (["bench", "stepp"], ["unknown benchmark 'stepp'", "did you mean 'step'"]),
    "evaluate nothing": (["evaluate"], ["required", "run"]),
    "evaluate option": (["evaluate", "x", "--jsn"], ["'--jsn'", "did you mean '--json'"]),
    "generate from nothing": (["generate", "/no/run", "--prompt", "x"], ["/no/run"]),
    "config directory": (
        ["train", "--config", "/tmp"],
        ["/tmp is a directory", "/tmp/config.json"],
    ),
    "half a character": (["train", "--set=x=\udcff"], ["argument 2 is not UTF-8"]),
    "plan batch": (["plan", "gpt2", "--batch", "1000000000"], ["batch_size=1,000,000,000"]),
    "plan context": (["plan", "gpt2", "--context", "1000000000"], ["sequence_length"]),
    "plan search": (["plan", "gpt2", "--fix", "tensor=0"], ["tensor=0 must be at least 1"]),
    "plan schedule": (
        ["plan", "--schedule", "1f1b", "-p", "64", "-m", "1024"],
        ["schedule_boxes=131,072", "above the limit of 4,096"],
    ),
    "plan infinity": (["plan", "gpt2", "--tokens", "1e308"], ["1e308 must be a number from"]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_commands(bench, case):
    arguments, words = OTHERS[case]
    assert_refused(bench, arguments, words)


def test_evaluate_a_step_that_is_not_there(bench, whole):
    arguments = ["evaluate", whole, "--cache", bench.cache, "--step", 7]
    assert_refused(bench, arguments, ["no checkpoint of step 7", "16, 20"])


# Compiled for one test each.
SMALL = {"training__accumulation": 1, "model__stacks__0__repeats": 1, "model__dropout_rate": 0.0}


@pytest.mark.slow  # compiles a step; `test_memory_report.py` has what is said
def test_a_model_that_no_device_holds_ends_with_what_would(bench):
    """Started again it would fail again: exit 1, and no 74 where there are others. What the memory
    went to is said before the error's one line.
    """
    too_wide = "--set=model.stacks.0.pattern.0.feed_forward.hidden_dim=1000000000000"
    words = ["Out of memory", "jaxinfra plan", "--remat"]
    # Refused sooner as a slip, unless it is meant.
    meant = {"JAXINFRA_LIMITS": "off"}
    ended = bench.run([*bench.new("run", **SMALL), too_wide], environment=meant)
    assert ended.code == 1, ended
    said, *more, line = ended.lines()
    assert said.startswith("out of memory: "), said
    assert "report:" in more[-1]
    assert line.startswith("jaxinfra train"), line
    assert [word for word in words if word not in line] == [], line


def test_a_run_that_diverges_says_so_and_keeps_its_last_good_state(bench):
    options = {"optimizer__learning_rate": 1e30, "training__max_bad_steps": 3}
    ended = bench.run(bench.new("run", **SMALL, **options))
    assert ended.code == 1
    (line,) = ended.lines()
    assert "3 steps in a row had a loss or a gradient that is not finite" in line
    assert "lower optimizer.learning_rate" in line
    last = metrics(bench / "run")[-1]
    assert None in (last["loss"], last["gradient_norm"]), "JSON has no NaN"
    assert last["skipped"] == 3
    assert (bench / "run" / "loss.png").exists()
    assert not (bench / "run" / "summary.json").exists()


def assert_refused(bench: Bench, arguments: list[object], words: list[str], **options) -> None:
    ended = bench.run(arguments, **options)
    assert ended.code in (1, 2), ended
    assert len(ended.lines()) == 1, ended.stderr
    (line,) = ended.lines()
    assert line.startswith("jaxinfra"), line
    assert [word for word in words if word not in line] == [], line


def files(directory: Path) -> dict[str, bytes]:
    """Every file's bytes, but for the lock's, which name the process that held it last."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".lock" and path.suffix not in (".out", ".err")
    }
