"""Signals to processes that have nothing to save, something to save, or handlers of their own."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from jaxinfra.runtime.signals import noted_signals

_GUARD = "from jaxinfra.runtime.signals import *; import ctypes, gc, os, sys, time, threading\n"
_READY = "print('ready', flush=True)\n"
INT, TERM = signal.SIGINT, signal.SIGTERM
# What the main thread is in: nothing here lets an exception of a handler through.
_BUSY = {
    "a callback of the garbage collector": (
        "gc.callbacks.append(lambda *_: time.sleep(0.05))\n" + _READY + "while True: gc.collect()"
    ),
    "a finalizer": (
        "class Slow:\n    def __del__(self): time.sleep(0.05)\n" + _READY + "while True: Slow()"
    ),
    "C code that retries": (
        "import select\nlibc = ctypes.CDLL(None)\n"
        "lock = ctypes.create_string_buffer(64); libc.pthread_mutex_lock(lock)\n"
        + _READY
        + "libc.pthread_mutex_lock(lock)"
    ),
    "a handler of failures": (
        _READY + "while True:\n    try: time.sleep(9)\n    except BaseException: pass"
    ),
    "a lock": "lock = threading.Lock(); lock.acquire()\n" + _READY + "lock.acquire()",
}


def begin(program: str, **options) -> subprocess.Popen[str]:
    """A guarded process, once it is where the program says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", _GUARD + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    return process


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("busy", _BUSY)
def test_a_process_with_nothing_to_save_ends_wherever_it_is(busy, number):
    with begin("guard_process()\n" + _BUSY[busy]) as process:
        process.send_signal(number)
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + number, "")
    assert said == f"stopped by {number.name}\n"


def test_code_and_words_are_the_command_s():
    program = "r = guard_process(); r.code = 75; r.words = lambda: '; all is well'\n"
    with begin(program + _BUSY["a lock"]) as process:
        process.send_signal(TERM)
        said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (75, "stopped by SIGTERM; all is well\n")


def test_what_is_held_is_saved():
    program = (
        "r = guard_process(); r.defer()\n"
        + _READY
        + "while not r: time.sleep(0.01)\nprint('saved', r.asked.name)\nsys.exit(75)"
    )
    with begin(program) as process:
        process.send_signal(TERM)
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, said, errors) == (75, "saved SIGTERM\n", "")


def test_a_second_interrupt_waits_for_no_save():
    with begin("r = guard_process(); r.defer()\n" + _BUSY["a lock"]) as process:
        process.send_signal(INT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(INT)
        assert process.wait(10) == 130


def test_what_was_unfinished_is_removed(tmp_path):
    partial, done = tmp_path / "out.partial", tmp_path / "out"
    program = (
        "from pathlib import Path\nguard_process()\n"
        f"for name in ({str(partial)!r}, {str(done)!r}):\n"
        "    Path(name).mkdir(); (Path(name) / 'file').touch()\n"
        f"with unfinished(Path({str(done)!r})): pass\n"
        f"with unfinished(Path({str(partial)!r})):\n"
    )
    with begin(program + "    print('ready', flush=True); time.sleep(60)") as process:
        process.send_signal(INT)
        assert process.wait(10) == 130
    assert not partial.exists()
    assert (done / "file").exists()


def test_a_reader_that_stands_still_delays_no_end():
    fill = "guard_process()\n" + _READY + "while True: print('x' * 10_000)"
    with begin(fill) as process:
        assert process.stdout is not None
        deadline = time.monotonic() + 10
        while select.select([process.stdout], [], [], 0.1)[0] and time.monotonic() < deadline:
            break
        time.sleep(0.5)  # the pipe is full
        process.send_signal(TERM)
        assert process.wait(10) == 128 + TERM


def test_handlers_of_a_supervisor_are_left_alone():
    program = (
        "import signal\nguard_process()\n"
        "signal.signal(15, lambda *_: (print('mine', flush=True), os._exit(3)))\n"
        "with delegated_signals():\n    print('ready', flush=True)\n    time.sleep(60)"
    )
    with begin(program) as process:
        process.send_signal(TERM)
        said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (3, "mine\n")


# The thread that obeys may read a signal long after the main thread has seen it.
_LATE_READER = (
    "read = os.read\n"
    "def late(*arguments):\n    got = read(*arguments)\n    time.sleep(0.1)\n    return got\n"
    "os.read = late\n"
)


@pytest.mark.parametrize("reader", ["", _LATE_READER], ids=["at once", "late"])
@pytest.mark.parametrize("number", [INT, TERM])
def test_a_command_with_jobs_ends_them_first(number, reader):
    program = reader + (
        "guard_process()\ntry:\n    with raised_signals():\n"
        "        print('ready', flush=True)\n        time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(0.2); print('ended them'); sys.exit(130)"
    )
    with begin(program) as process:
        process.send_signal(number)
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, said, errors) == (130, "ended them\n", "")


def test_a_caller_s_own_program_notes_and_gets_its_handlers_back():
    before = signal.getsignal(TERM), signal.getsignal(INT)
    with noted_signals() as stop:
        assert not stop
        os.kill(os.getpid(), TERM)
        assert stop.asked is TERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), INT)
    assert (signal.getsignal(TERM), signal.getsignal(INT)) == before


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_command_that_has_ended_has_ended(number):
    """Python gives signals back as it leaves, and what is native ends after that: here the system
    reads a byte before the process is gone.
    """
    program = (
        "guard_process().defer()\nlibc = ctypes.CDLL(None)\n"
        "libc.__cxa_atexit(libc.getchar, None, None)\n"
        + _READY
        + "ignore_signals_at_exit()\nsys.exit(3)\n"
    )
    with begin(program, stdin=subprocess.PIPE) as process:
        time.sleep(0.5)
        process.send_signal(number)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 3


def test_work_that_nobody_needs_is_not_waited_for():
    program = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "ThreadPoolExecutor(1, thread_name_prefix=UNAWAITED).submit(time.sleep, 600)\n"
        + _READY
        + "end_without_waiting(3)\n"
    )
    with begin(program) as process:
        assert process.wait(60) == 3
