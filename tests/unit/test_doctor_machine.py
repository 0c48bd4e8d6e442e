"""Each sick device is named, with a remedy; more of both, and healthy ones: ``test_causes.py``."""

import json
import os
import subprocess

import pynvml
import pytest
from causes.machines import GOOD_HOST, busy_answers, gpu_answers

from jaxinfra.cli.main import main
from jaxinfra.diagnostics.machine.finding import Grade, worst
from jaxinfra.diagnostics.machine.gpu import (
    driver_findings,
    gpu_findings,
    xid_findings,
)
from jaxinfra.diagnostics.machine.host import HostState, host_findings, read_host
from jaxinfra.diagnostics.machine.nvml import (
    LiveAnswers,
    NoAnswerError,
    RecordedAnswers,
    asked_or_none,
)
from jaxinfra.diagnostics.machine.settings import (
    setting_findings,
    software_findings,
    unknown_flag_findings,
)
from jaxinfra.errors import ConfigError

GIB = 2**30


FIELDS = "nvmlDeviceGetFieldValues" + json.dumps(
    [1, [[field, link] for field in (161, 162, 163) for link in range(18)]]
)
# What is wrong with GPU 1: its answers, which line says so, the grade, a word of the line.
SICK = {
    "held-by-power": (
        {"nvmlDeviceGetCurrentClocksEventReasons[1]": 4, "nvmlDeviceGetClockInfo[1, 1]": 1400},
        *("clocks", "warn", "power cap"),
    ),
    "hot": ({"nvmlDeviceGetTemperature[1, 0]": 88}, "temperature", "warn", "88 C"),
    "ecc-off": ({"nvmlDeviceGetEccMode[1]": [0, 1]}, "ECC", "warn", "off"),
    "row-failed": ({"nvmlDeviceGetRemappedRows[1]": [0, 9, 0, 1]}, "rows", "fail", "FAILED"),
    "slow-slot": ({"nvmlDeviceGetCurrPcieLinkGeneration[1]": 3}, "PCIe", "warn", "3 of 5"),
    "link-errors": ({FIELDS: [0] * 17 + [9] + [0] * 36}, "NVLink", "warn", "9 replays"),
    "memory-held": (
        {"nvmlDeviceGetMemoryInfo[1]": {"total": 140 * GIB, "used": 61 * GIB, "free": 79 * GIB}},
        *("memory", "warn", "61.0 of 140.0 GiB"),
    ),
    "divided": ({"nvmlDeviceGetMigMode[1]": [1, 1]}, "model", "warn", "MIG"),
}


def test_a_busy_gpu_may_be_held_by_its_own_power_limit():
    """At 697 of 700 W lower clocks are no fault; at 76 W, or at half of the highest, they are."""
    held = {"nvmlDeviceGetCurrentClocksEventReasons[1]": 4, "nvmlDeviceGetClockInfo[1, 1]": 1530}
    drawn = {"nvmlDeviceGetPowerUsage[1]": 697_000}
    assert worst(gpu_findings(RecordedAnswers(busy_answers() | held | drawn))) is Grade.OK
    for values in (held, held | drawn | {"nvmlDeviceGetClockInfo[1, 1]": 900}):
        alarms = [e for e in gpu_findings(RecordedAnswers(busy_answers() | values)) if e.remedy]
        assert [each.subject for each in alarms] == ["gpu 1: clocks"]


def test_a_gpu_alone_may_have_its_links_down():
    answers = gpu_answers(1) | {f"nvmlDeviceGetNvLinkState[0, {link}]": 0 for link in range(18)}
    assert worst(gpu_findings(RecordedAnswers(answers))) is Grade.OK


@pytest.mark.parametrize("what", SICK)
def test_a_sick_gpu_is_named(what):
    answers, subject, grade, word = SICK[what]
    found = gpu_findings(RecordedAnswers(busy_answers() | answers))
    alarms = [each for each in found if each.grade is not Grade.OK]
    assert len(alarms) == 1, alarms
    (alarm,) = alarms
    assert subject in alarm.subject
    assert "gpu 1" in alarm.subject
    assert alarm.grade == grade
    assert word in alarm.value
    assert alarm.rule
    assert alarm.remedy


def test_what_a_driver_does_not_tell_is_no_alarm():
    answers = {"library": "", "nvmlDeviceGetCount[]": 1, "nvmlDeviceGetName[0]": "NVIDIA H200"}
    found = gpu_findings(RecordedAnswers(answers))
    assert worst(found) is Grade.OK
    assert sum(each.grade is Grade.UNKNOWN for each in found) == 9


def test_an_old_driver_fails():
    answers = RecordedAnswers(gpu_answers() | {"nvmlSystemGetDriverVersion[]": "550.54.15"})
    assert worst(driver_findings(answers)) is Grade.FAIL


def test_answers_are_recorded_as_they_are_read(tmp_path, monkeypatch):
    """Structures and field values become what a recording holds, and say the same again."""

    def fields(handle, ids):
        assert handle == "handle 0"
        values = (pynvml.c_nvmlFieldValue_t * 2)()
        values[0].valueType, values[0].value.ullVal = 3, 7
        values[1].nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        return values

    def refused(handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    memory = pynvml.c_nvmlMemory_t(total=140 * GIB, used=GIB, free=139 * GIB)
    fakes = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda gpu: f"handle {gpu}",
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
        "nvmlDeviceGetFieldValues": fields,
        "nvmlDeviceGetEccMode": refused,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)
    live = LiveAnswers()
    assert live.ask("nvmlDeviceGetMemoryInfo", 0)["used"] == GIB
    assert live.ask("nvmlDeviceGetFieldValues", 0, [(161, 0), (161, 1)]) == [7, None]
    with pytest.raises(NoAnswerError, match="Not Supported"):
        live.ask("nvmlDeviceGetEccMode", 0)
    live.record(tmp_path / "answers.json")
    again = RecordedAnswers.read(tmp_path / "answers.json")
    assert again.ask("nvmlDeviceGetMemoryInfo", 0)["total"] == 140 * GIB
    assert again.ask("nvmlDeviceGetFieldValues", 0, [(161, 0), (161, 1)]) == [7, None]
    assert asked_or_none(again, "nvmlDeviceGetEccMode", 0) is None
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="no recording"):
        RecordedAnswers.read(tmp_path / "other.json")


XID = "4,1,2,-;NVRM: Xid (PCI:0000:19:00): {}, pid=12, name=python"


@pytest.mark.parametrize(
    ("number", "grade", "word"),
    [(79, "fail", "bus"), (31, "warn", "unmapped"), (63, "fail", "row")],
)
def test_xid_errors_are_read_from_the_kernel_log(number, grade, word):
    lines = ["6,1,1,-;usb 1-1: new device", XID.format(number), XID.format(number)]
    (found,) = xid_findings(lines)
    assert (found.grade, word in found.value) == (grade, True)
    assert "2 on GPU 0000:19:00" in found.value
    assert worst(xid_findings(lines[:1])) is Grade.OK


POOR = {
    "memory": ({"memory_bytes": 20 * GIB}, "memory", "warn"),
    "cpu-held": ({"cpu_limit": 16.0, "cpu_throttled": 0.6}, "CPUs", "warn"),
    "clock": ({"clock_synchronized": False}, "clock", "warn"),
}


@pytest.mark.parametrize("what", POOR)
def test_a_poor_host_is_named(what):
    values, subject, grade = POOR[what]
    state = HostState(**{name: getattr(GOOD_HOST, name) for name in GOOD_HOST.__slots__} | values)
    alarms = [each for each in host_findings(state, gpu_bytes=140 * GIB, gpus=1) if each.remedy]
    assert [(each.subject, each.grade) for each in alarms] == [(f"host: {subject}", grade)]


def test_this_host_is_read(tmp_path):
    state = read_host(tmp_path / "runs" / "not-there-yet")
    assert state.total_bytes is not None
    assert state.total_bytes > state.memory_bytes > 0
    assert state.write_rate is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAX_ENABLE_X64", "1"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform"),
        ("NCCL_P2P_DISABLE", "1"),
        ("XLA_FLAGS", "--xla_gpu_autotune_level=0"),
        ("XLA_FLAGS", "--xla_gpu_enable_command_buffer="),
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math"),
        ("CUDA_VISIBLE_DEVICES", "0"),
    ],
)
def test_a_setting_that_costs_is_named(name, value):
    harmless = {"HOME": "here", "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"}
    assert worst(setting_findings(harmless, num_gpus=2)) is Grade.OK
    (found,) = setting_findings(harmless | {name: value}, num_gpus=2)
    assert found.subject.startswith(name)
    assert found.remedy


def test_unknown_flags_are_those_that_end_a_process(monkeypatch):
    called = {}

    def run(words, *, env, **kwargs):
        called.update(env)
        said = "F parse_flags_from_env.cc:235] Unknown flag in XLA_FLAGS: --xla_no_such=1 "
        return subprocess.CompletedProcess(words, -6, "", said)

    monkeypatch.setattr(subprocess, "run", run)
    (found,) = unknown_flag_findings({"XLA_FLAGS": "--xla_no_such=1"})
    assert (found.grade, found.value) == (Grade.FAIL, "unknown: --xla_no_such=1")
    assert called["JAX_PLATFORMS"] == "cpu"
    assert worst(unknown_flag_findings({})) is Grade.OK


@pytest.mark.slow
def test_this_xla_says_which_flags_it_does_not_know():
    environment = dict(os.environ)
    known = environment | {"XLA_FLAGS": "--xla_gpu_autotune_level=4"}
    assert worst(unknown_flag_findings(known)) is Grade.OK
    (found,) = unknown_flag_findings(environment | {"XLA_FLAGS": "--xla_no_such=1"})
    assert (found.grade, found.value) == (Grade.FAIL, "unknown: --xla_no_such=1")


SOFTWARE = {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-pjrt": "0.11.2"}


@pytest.mark.parametrize(
    ("versions", "subject"),
    [
        ({"jax": "0.10.0", "jaxlib": "0.10.0", "jax-cuda13-pjrt": "0.10.0"}, "JAX"),
        ({"jax-cuda12-pjrt": "0.11.2"}, "one CUDA"),
    ],
    ids=["jax-too-old", "two-cudas"],
)
def test_versions_that_do_not_go_together_are_named(versions, subject):
    assert worst(software_findings(SOFTWARE, num_gpus=1)) is Grade.OK
    alarms = [each for each in software_findings(SOFTWARE | versions, num_gpus=1) if each.remedy]
    assert [each.subject for each in alarms] == [f"software: {subject}"]


def test_the_command_judges_a_recording(tmp_path, capsys):
    (tmp_path / "well.json").write_text(json.dumps(gpu_answers()))
    assert main(["doctor", "--answers", str(tmp_path / "well.json")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Nothing found that needs a remedy.")
    assert "21 ok" in said
    sick = busy_answers() | {
        "nvmlDeviceGetEnforcedPowerLimit[1]": 500000,
        "nvmlDeviceGetTotalEccErrors[1, 1, 0]": 3,
    }
    (tmp_path / "sick.json").write_text(json.dumps(sick))
    assert main(["doctor", "--answers", str(tmp_path / "sick.json")]) == 1
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith("FAIL: gpu 1: ECC: on, 3 uncorrectable")  # the gravest first
    assert "Then gpu 1: power: limit 500 of 700 W" in said
    assert main(["doctor", "--json", "--answers", str(tmp_path / "sick.json")]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["grade"] == "fail"
    assert {"subject", "grade", "value", "rule", "remedy"} == said["findings"][0].keys()
    assert main(["doctor", "checkpoint"]) == 1
    assert "needs a run directory" in capsys.readouterr().err
