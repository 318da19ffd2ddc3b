"""The command line. The module of a command is imported only when the command runs."""

import argparse
import errno
import importlib
import re
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from megatfm.errors import EXIT_FAILED, EXIT_USAGE, MegatfmError, UsageError, describe_impossible_path
from megatfm.terminal import (
    discard_output,
    list_hangup_signals,
    open_closed_streams,
    print_to_stderr,
    spell_unencodable,
)
from megatfm.version import __version__

COMMANDS = {
    "prep": ("megatfm.commands.data", "prepare a corpus: text → tokens → shards"),
    "train": ("megatfm.commands.training", "train or resume; one process, or a rank under torchrun, srun or mpirun"),
    "finetune": (
        "megatfm.commands.finetuning",
        "fine-tune a pretrained model on labelled files, or resume; then evaluate",
    ),
    "predict": ("megatfm.commands.finetuning", "predict labels for a file's rows by a fine-tuned run"),
    "launch": ("megatfm.commands.training", "start training on this machine, under MPI or as a SLURM job"),
    "status": ("megatfm.commands.runs", "show runs: queue, step, loss, speed, time left, restarts"),
    "logs": (
        "megatfm.commands.runs",
        "show a run's logs: the job's or rank 0's, and those of ranks with errors; -f follows them",
    ),
    "cancel": ("megatfm.commands.runs", "end a run's jobs and processes; the run saves first if time is left"),
    "generate": ("megatfm.commands.generation", "sample text from a run"),
    "convert": (
        "megatfm.commands.conversion",
        "convert to and from the Hugging Face format, or to a mixture of experts",
    ),
    "evaluate": (
        "megatfm.commands.evaluation",
        "evaluate a run's loss and bits per byte, beside gzip and xz; or a model on tasks, without training",
    ),
    "report": ("megatfm.commands.runs", "write one self-contained HTML page about a run"),
    "compare": ("megatfm.commands.runs", "compare runs: their settings, results and curves"),
    "verify": ("megatfm.commands.verify", "compare a layout's gradients with one process's"),
    "describe": ("megatfm.commands.estimate", "show modules, parameter counts and FLOPs of a config's model"),
    "estimate": (
        "megatfm.commands.estimate",
        "estimate whether a run fits GPUs, how fast it will be, and what to change; needs no GPU",
    ),
    "explain-oom": (
        "megatfm.commands.estimate",
        "explain why a run ran out of memory: prediction by phase and owner, what it recorded, what to change",
    ),
    "data": ("megatfm.commands.data", "inspect, check, export or index a corpus"),
    "config": ("megatfm.commands.config", "print a resolved config, the presets or the JSON schema"),
    "doctor": ("megatfm.commands.doctor", "check what this machine can run"),
    "completion": ("megatfm.commands.completion", "print a completion script for bash, zsh or fish"),
    "quickstart": (
        "megatfm.commands.quickstart",
        "prepare a small corpus, train on it, stop, resume, sample, evaluate and report: each command once",
    ),
}
"""Name → (module, help).

In the module, `add_NAME_arguments(parser)` declares the command's arguments. `NAME_command(args)` runs the command and
returns the exit code, or raises a MegatfmError, which is printed and whose `exit_code` is returned.
"""

LAUNCH_FLAGS = ("--nproc", "--nodes", "--slurm", "--mpi", "--gpus-per-node")
"""Flags of `launch` that users may give to `train` by mistake."""

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write for which there is no room."""
BLOCKED_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""Stop signals, with that of a closed terminal. Training blocks them until its handlers are installed, since they would
kill it before."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with a code of `megatfm.errors`, or 130 when interrupted."""
    open_closed_streams()
    spell_unencodable()
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] in (["train"], ["finetune"]) and "--prepare" not in arguments:
        signal.pthread_sigmask(signal.SIG_BLOCK, (*BLOCKED_SIGNALS, *list_hangup_signals()))
    parser = build_parser(arguments[0] if arguments else "")
    if not arguments:
        parser.print_help(sys.stderr)
        sys.exit(EXIT_USAGE)
    args = parser.parse_args(arguments)
    try:
        code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        discard_output(sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except MegatfmError as error:
        if args.debug:
            raise
        print_to_stderr(f"error: {error}")
        code = error.exit_code
    except Exception as error:
        message, code = describe_impossible_path(error), EXIT_USAGE
        if isinstance(error, OSError) and error.errno in FULL_DISK and error.filename is None:  # of a stream
            _discard_unwritable_output()
            message = f"the output can't be written: {error.strerror}: make room, or write it elsewhere"
            code = EXIT_FAILED
        if args.debug or message is None:
            from megatfm.registry import add_plugin_note

            add_plugin_note(error)
            raise
        print_to_stderr(f"error: {message}")
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _is_stdout_closed() -> bool:
    """Return whether the reader of stdout has closed the pipe, as in `megatfm … | head`."""
    output = select.poll()
    output.register(sys.stdout.fileno())
    return any(event & select.POLLERR for _, event in output.poll(0))


def _discard_unwritable_output() -> None:
    """Discard what stdout still holds if it can't be written, as on a full disk."""
    try:
        sys.stdout.flush()
    except OSError:
        discard_output(sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that accepts `key=value` overrides anywhere, also after flags."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments and overrides; exit with code 2 for an argument that is neither a flag nor an override."""
        parsed, unparsed = self.parse_known_args(args, namespace)
        overrides = getattr(parsed, "overrides", None)
        unknown = [argument for argument in unparsed if overrides is None or not _is_override(argument)]
        if unknown:
            hint = _suggest_settings(parsed.command, unparsed) if overrides is not None else ""
            if unknown[0].partition("=")[0] in LAUNCH_FLAGS and hasattr(parsed, "source"):
                hint = f": `train` is one process; `megatfm launch CONFIG {unknown[0]} …` starts several"
            hint = hint or f": `megatfm {parsed.command} --help` lists those that there are"
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
        """Exit with code 2; for an invalid choice, suggest a similar one."""
        from megatfm.registry import did_you_mean

        if match := re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)$", message):
            name, value, choices = match.groups()
            known = [*re.findall(r"[\w-]+", choices), *("--help", "--version") * (name == "COMMAND")]
            hint = did_you_mean(value, known)
            message = f"{name} = {value!r}: there is none{hint}; there are: {choices}"
        super().error(message.replace(", key=value", ""))  # argparse counts what may be left out among what is missing


def _suggest_settings(command: str, arguments: Sequence[str]) -> str:
    """Return the settings that unknown flags may mean, such as another framework's --micro-batch-size."""
    from megatfm.config import Config
    from megatfm.config.prep import PrepConfig
    from megatfm.config.validation_errors import find_keys

    settings = []
    for argument, following in zip(arguments, [*arguments[1:], "-"], strict=True):
        key, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-"):
            continue
        if not equals:
            value = "…" if following.startswith("-") else following
        keys = [key] if "." in key else find_keys(key.replace("-", "_"), PrepConfig if command == "prep" else Config)
        settings += [" or ".join(f"{candidate}={value}" for candidate in keys)] if keys else []
    return f": settings have no dashes: {' '.join(settings)}" if settings else ""


def _is_override(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def build_parser(only_command: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of all commands. only_command: import only this command's module and add only its arguments."""
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
            command.set_defaults(command=name, run=getattr(module, f"{function}_command"))
    return parser
