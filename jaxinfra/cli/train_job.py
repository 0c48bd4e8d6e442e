"""The part of ``jaxinfra train`` that imports JAX, run after the options are checked."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from jaxinfra.api.models import start_from
from jaxinfra.checkpoint.hub import model_name
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.cli.out_of_memory import explain_out_of_memory
from jaxinfra.cli.terminal import printable
from jaxinfra.config import codec
from jaxinfra.config.data import DataConfig
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.kinds import Head
from jaxinfra.config.preferences import PreferenceConfig
from jaxinfra.config.run import RunConfig
from jaxinfra.data.chat import ChatRow
from jaxinfra.data.corpora import first_prompt
from jaxinfra.errors import ConfigError, DeviceMemoryError
from jaxinfra.runtime.cluster import detect_cluster
from jaxinfra.runtime.files import new_run_directory, user_cache
from jaxinfra.runtime.rendezvous import end_process
from jaxinfra.runtime.signals import RESUMABLE_EXIT
from jaxinfra.serving.generate import generate_text
from jaxinfra.serving.load import load_run, load_template
from jaxinfra.serving.sampling import SamplingConfig
from jaxinfra.training.describe import aligned, placement_table
from jaxinfra.training.job import make_job
from jaxinfra.training.profile import parse_profile_range
from jaxinfra.training.session import train
from jaxinfra.training.start import require_same_start
from jaxinfra.training.summary import SourceRead, mixture_cells


def resumed_config(directory: Path) -> RunConfig:
    """Returns the config of a run that ``--resume`` continues."""
    return RunDirectory(directory).read_config()


def initial_config(
    directory: Path,
    lora: LoraConfig | None,
    chat: bool,
    preferences: PreferenceConfig | None,
    change: Callable[[RunConfig], RunConfig],
) -> RunConfig:
    """Returns the config of a run that ``--init`` starts from a model, changed by options."""
    start = start_from(directory, lora=lora, chat=chat, preferences=preferences)
    config = change(start)
    require_same_start(config, start)
    return config


def run(args: argparse.Namespace, config: RunConfig) -> int:
    """Trains; prints the results, a compression baseline and a sample of generated text."""
    resume = args.resume is not None or (
        args.continued and RunDirectory(args.run).config_file.is_file()
    )
    profile = None if args.profile is None else parse_profile_range(args.profile)
    if args.dry_run:
        job = make_job(config)
        print(f"{codec.to_json(job.config)}\n{placement_table(job)}")
        return 0
    cluster = detect_cluster(os.environ)
    if cluster is not None and not (args.resume or args.run):
        raise ConfigError(
            f"{cluster.num_processes} processes ({cluster.source}) must share one run directory: "
            "name it with --run"
        )
    preset = args.config.stem if args.config else args.preset or "tiny"
    name = model_name(args.init).rpartition("/")[2] if args.init else preset
    directory = args.resume or args.run or new_run_directory(name)
    try:
        outcome = train(
            config,
            directory,
            resume=resume,
            cache_dir=args.cache or user_cache(),
            profile=profile,
        )
    except DeviceMemoryError as error:
        if cluster is None or cluster.process_id == 0:
            print(explain_out_of_memory(config, directory, error), file=sys.stderr)
        raise
    if outcome.summary is None:
        # All is saved, and threads that read ahead may be waiting for a disk that hangs.
        return end_process(RESUMABLE_EXIT, together=outcome.together, wait=False)
    if not outcome.was_complete and (cluster is None or cluster.process_id == 0):
        _report(outcome.summary)
        if cluster is None and not args.no_sample and config.model.head is Head.LOGITS:
            _sample(directory, config.data)
        print(f"\nrun: {directory}   loss picture: {RunDirectory(directory).picture_file}")
    return end_process(0, together=outcome.together)


def _report(summary: dict) -> None:
    if "heldout_loss" in summary:
        _report_heldout(summary)
    if "mixture" in summary:
        cells = mixture_cells([SourceRead(**each) for each in summary["mixture"]])
        print(f"\n{aligned(cells, left=1)}\n")
    causes = summary["wall_s_by_cause"]
    whole = sum(causes.values())
    shares = sorted(((seconds, cause) for cause, seconds in causes.items()), reverse=True)
    parts = [f"{cause} {seconds / whole:.1%}" for seconds, cause in shares if seconds > 0]
    print(
        f"wall time {whole:.1f} s: {', '.join(parts)}; saves kept steps waiting for "
        f"{summary['stall_s']:.3f} s in all"
    )


def _report_heldout(summary: dict) -> None:
    if "heldout_preferences/accuracy" in summary:
        figures = ("margin", "good_reward", "bad_reward")
        names = {each: f"heldout_preferences/{each}" for each in figures}
        told = "".join(
            f", {each.replace('_', ' ')} {summary[name]:.4f}"
            for each, name in names.items()
            if name in summary
        )
        print(
            f"\nheld-out answers: loss {summary['heldout_loss']:.4f}, "
            f"{summary['heldout_preferences/accuracy']:.1%} right{told}"
        )
    if "heldout_bits_per_byte" not in summary:
        return
    bits = summary["heldout_bits_per_byte"]
    print(
        "\nheld-out text, bits per byte: this model "
        f"{'not finite' if bits is None else format(bits, '.3f')}, "
        f"gzip -9 of each file {summary['gzip_bits_per_byte']:.3f}, "
        f"xz -9 of all together {summary['xz_bits_per_byte']:.3f}"
    )


def _sample(directory: Path, data: DataConfig) -> None:
    """Text of the model: after a prompt of its data, if these have prompts, or a document."""
    sampling = SamplingConfig(temperature=0.8, top_p=0.95)
    model = load_run(directory)
    prompt = first_prompt(data)
    if isinstance(prompt, ChatRow):
        template = load_template(directory, prompt.settings)
        ids = template.encode(model.tokenizer, prompt.messages, tools=prompt.tools)
        print("\nsample of a chat:\n")
        for message in prompt.messages:
            print(f"{message['role']}: {printable(str(message.get('content') or ''))}")
        shown = "assistant: "
    else:
        shown, ids = prompt, prompt
        print(f"\nsample after {prompt!r}:\n" if prompt else "\nsample of a document:\n")
    pieces = generate_text(model, ids, max_new_tokens=120, sampling=sampling, consumes=True)
    print(shown + "".join(printable(each.text) for each in pieces))
