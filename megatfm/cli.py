"""The command line: commands, nothing else. What a command needs is imported when it runs."""

import argparse
import importlib
import os
import re
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from megatfm.errors import MegatfmError, UsageError
from megatfm.terminal import spell_unencodable
from megatfm.version import __version__

COMMANDS = {
    "prep": ("megatfm.commands.data", "corpora → tokenizer → shards"),
    "train": (
        "megatfm.commands.training",
        "train or resume; one process, or a rank under torchrun, srun or mpirun",
    ),
    "finetune": (
        "megatfm.commands.finetuning",
        "a pretrained model on labelled files: train or resume, then evaluate",
    ),
    "predict": ("megatfm.commands.finetuning", "labels of a file's rows, by a fine-tuned run"),
    "launch": ("megatfm.commands.training", "start training on this machine, under MPI or as a SLURM job"),
    "status": ("megatfm.commands.runs", "how runs are: queue, step, loss, speed, time left, restarts"),
    "logs": ("megatfm.commands.runs", "the logs of a run that matter; -f follows them"),
    "cancel": ("megatfm.commands.runs", "end the job of a run, which saves if it is given the time"),
    "generate": ("megatfm.commands.models", "sample text from a run"),
    "convert": ("megatfm.commands.models", "to and from the Hugging Face format"),
    "evaluate": (
        "megatfm.commands.evaluation",
        "loss and bits per byte of a run, beside gzip and xz; or a model on tasks, without training",
    ),
    "report": ("megatfm.commands.runs", "one self-contained HTML page about a run"),
    "compare": (
        "megatfm.commands.runs",
        "runs side by side: what differs, what they reached, their curves",
    ),
    "verify": ("megatfm.commands.verify", "compare a layout's gradients with one process's"),
    "describe": ("megatfm.commands.models", "parts, parameter counts and FLOPs of a config"),
    "estimate": (
        "megatfm.commands.estimate",
        "whether a run fits GPUs, how fast it will be, and what to change: needs no GPU",
    ),
    "explain-oom": (
        "megatfm.commands.estimate",
        "why a run had too little memory: prediction by phase and owner, what it recorded, what to change",
    ),
    "data": ("megatfm.commands.data", "look into a corpus, or verify it"),
    "config": ("megatfm.commands.config", "print a config resolved, or the JSON schema"),
    "doctor": ("megatfm.commands.doctor", "what this machine can run"),
    "completion": ("megatfm.commands.config", "a script with which bash, zsh or fish complete commands"),
    "quickstart": (
        "megatfm.commands.quickstart",
        "prepare a small corpus, train on it, stop, resume, sample, evaluate and report: each command once",
    ),
}
"""Name → (module, help).

In a module, `add_NAME_arguments(parser)` declares what the command takes; `NAME_command(args)` runs it and returns the
exit code, or raises a MegatfmError, whose line is printed and whose code is the exit code.
"""

OF_LAUNCH = ("--nproc", "--nodes", "--slurm", "--mpi", "--gpus-per-node")
"""Flags of `launch` that are looked for at `train`."""

BLOCKED_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""Signals that ask training to stop wait until its handlers are installed; before, they would kill it."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with a code of `megatfm.errors`, or 130 when interrupted."""
    spell_unencodable()
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["train"], ["finetune"]):
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    parser = build_parser(words[0] if words else "")
    args = parser.parse_args(words)
    try:
        code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except MegatfmError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _stdout_is_closed() -> bool:
    """Whether the other end of the output is closed: the reader of the pipe, as in `megatfm … | head`, has read
    enough."""
    output = select.poll()
    output.register(sys.stdout.fileno())
    return any(event & select.POLLERR for _, event in output.poll(0))


class Parser(argparse.ArgumentParser):
    """argparse, with `key=value` overrides wherever they stand, also after flags."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The namespace with all overrides; exits with code 2 for a word that is neither a flag nor an override."""
        parsed, unparsed = self.parse_known_args(args, namespace)
        overrides = getattr(parsed, "overrides", None)
        unknown = [word for word in unparsed if overrides is None or not _is_override(word)]
        if unknown:
            key, equals, value = unknown[0].lstrip("-").partition("=")
            after = unparsed[unparsed.index(unknown[0]) + 1 :]
            value = value if equals else next(iter(after), "…")
            hint = f": settings have no dashes: {key}={value}" if overrides is not None and "." in key else ""
            if unknown[0].partition("=")[0] in OF_LAUNCH and hasattr(parsed, "source"):
                hint = (
                    f": `train` is one process; several are started by `megatfm launch CONFIG {unknown[0]} …`"
                )
            self.error(f"unknown argument{'s' * (len(unknown) > 1)}: {' '.join(unknown)}{hint}")
        if overrides is not None:
            from megatfm.registry import refuse_repeats

            parsed.overrides = [*overrides, *unparsed]
            try:
                refuse_repeats(parsed.overrides)
            except UsageError as error:
                self.error(str(error))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with code 2; for a word that is no choice, say which one is like it."""
        from megatfm.registry import did_you_mean

        if wrong := re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)$", message):
            hint = did_you_mean(wrong[2], re.findall(r"[\w-]+", wrong[3]))
            message = f"{wrong[1]} = {wrong[2]!r}: there is none{hint}; there are: {wrong[3]}"
        super().error(message)


def _is_override(word: str) -> bool:
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def build_parser(only_command: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands. only: the one whose arguments are looked up; others need not even be imported."""
    parser = Parser(prog="megatfm", description="Pretrain transformers under any parallel layout.")
    parser.add_argument("--version", action="version", version=f"megatfm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (path, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if only_command in (None, name):
            module = importlib.import_module(path)
            function = name.replace("-", "_")
            getattr(module, f"add_{function}_arguments")(command)
            command.set_defaults(run=getattr(module, f"{function}_command"))
    return parser
