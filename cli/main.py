"""The `gshare` command: finds the subcommand, runs it, and turns every error into one message.

    gshare finetune   train adapters          gshare export    write or merge an adapter
    gshare sweep      try configurations
    gshare jobs       list, attach, stop …    gshare audit     packed and solo, byte for byte
    gshare data       look at the data        gshare doctor    what this machine has and lacks
    gshare generate   ask an adapter          gshare gpu       reservations of GPU memory
    gshare agent      the daemon of a node    gshare submit    train adapters on a cluster
    gshare coordinator  places their jobs     gshare cluster   how its nodes are
    gshare tui        the dashboard           gshare report    what became of runs
    gshare estimate   memory and speed of adapters
    gshare version

Subcommands are named by import path and loaded when they are called, so `gshare --help` costs neither
torch nor transformers. Exit codes are those of `gshare.agent.errors`: 0 ok, 1 failure, 2 usage,
75 try again later, 130 and 143 interrupted. stdout is data, stderr is talk.

Next to nothing is imported at the top: an interrupt during an import is a message too, inside `main`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING

from gshare.agent.errors import EXIT_FAILURE, EXIT_OK, EXIT_SIGINT, EXIT_USAGE, GshareError
from gshare.cli.streams import ClosedStream, Stdout, drop_unwritten, stdout_fault

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

#: Subcommand → (where it is, the line that `gshare --help` shows). Frozen by a test.
COMMANDS: dict[str, tuple[str, str]] = {
    "finetune": ("gshare.cli.finetune:finetune", "Train adapters on one base, all at the same time."),
    "jobs": ("gshare.cli.jobs:app", "List, follow, stop, pause and resume running jobs."),
    "sweep": ("gshare.cli.sweep:app", "Try many configurations, and train the best of them to the end."),
    "report": ("gshare.cli.report:report", "What became of runs: who was best, what was stopped, and why."),
    "data": ("gshare.cli.data:app", "Look at training data as the model will see it."),
    "generate": ("gshare.cli.generate:generate", "Answer a prompt with the base or with an adapter."),
    "export": ("gshare.cli.export:export", "Write an adapter, or a checkpoint with the adapter merged in."),
    "audit": ("gshare.cli.audit:audit", "Train packed and alone, and compare byte for byte."),
    "estimate": ("gshare.cli.estimate:estimate", "How much memory adapters take; measure it."),
    "gpu": ("gshare.cli.gpu:app", "Who has reserved which GPU's memory; run a program under a reservation."),
    "agent": ("gshare.cli.agent:app", "Run this node's agent, which runs what a coordinator sends."),
    "coordinator": ("gshare.cli.coordinator:app", "Run the coordinator of a cluster."),
    "submit": ("gshare.cli.submit:submit", "Train adapters on the nodes of a cluster."),
    "cluster": ("gshare.cli.cluster:app", "How the nodes of a cluster are, and what to mend on each."),
    "tui": ("gshare.cli.tui:tui", "The dashboard: nodes, reservations, adapters and their losses, live."),
    "doctor": ("gshare.cli.doctor:doctor", "What this machine has and lacks, and how to mend it."),
}


#: What the extra `train` brings; the base install has a command line without it.
TRAIN_EXTRA = (
    *("torch", "transformers", "tokenizers", "safetensors", "bitsandbytes", "huggingface_hub"),
    *("gguf", "jinja2", "pyarrow"),
)
INSTALL = "pip install 'gshare[train]'"
STDOUT = 1  # its file descriptor
AGENT_PORT = 7433  # `gshare.agent.node.protocol.DEFAULT_PORT`, which is not imported at the top
ABOUT = "Train many LoRA adapters on one frozen base at once, each with the bits it would have had alone."


def version() -> None:
    """Print the version."""
    print(_version())


def _version() -> str:
    from importlib.metadata import version as installed_version

    return installed_version("gshare")


def make_app() -> App:
    """The command tree. Nothing of a subcommand is imported here."""
    from cyclopts import App

    app = App(
        name="gshare",
        help=ABOUT,
        version=_version,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name, (path, line) in COMMANDS.items():
        app.command(path, name=name, help=line)
    app.command(version)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; never raises for an error of user or program."""
    try:
        _open_standard_streams()
        _make_devices_absolute()
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        code = _fail("interrupted", EXIT_SIGINT)
    drop_unwritten()
    return code


def _make_devices_absolute() -> None:
    """A relative GSHARE_DEVICES starts at this directory: a trainer runs in another."""
    if devices := os.environ.get("GSHARE_DEVICES"):
        os.environ["GSHARE_DEVICES"] = os.path.abspath(devices)


def _open_standard_streams() -> None:
    """/dev/null in the place of each standard stream that the caller closed.

    Python has None there, which has no methods; and the next file opened (a lock, a socket) would get the
    number of the closed one and be taken for it. An open stdout is watched for its faults.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            assert opened == number, (opened, number)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stdin = number == 0
            stream = os.fdopen(0, encoding="utf-8", closefd=False) if stdin else ClosedStream(number)
            setattr(sys, name, stream)
    if type(sys.stdout) is TextIOWrapper:
        sys.stdout = Stdout(sys.stdout)


def _run(tokens: list[str]) -> int:
    from cyclopts import CycloptsError

    try:
        result = make_app()(_with_bare_bind(tokens), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        return _fail(f"{_usage_message(error)} (see {_help_command(error)})", EXIT_USAGE)
    except GshareError as error:
        return _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in TRAIN_EXTRA:
            return _fail(f"{error.name} is not installed; this command needs {INSTALL}", EXIT_FAILURE)
        return _unexpected(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return EXIT_FAILURE  # `gshare … | head`: nobody is there to be told
        if (fault := stdout_fault()) is not None:
            return _fail(f"stdout cannot be written: {fault.strerror}", EXIT_FAILURE)
        return _unexpected(error)
    except Exception as error:
        return _unexpected(error)
    return result if isinstance(result, int) and not isinstance(result, bool) else EXIT_OK


def _with_bare_bind(tokens: list[str]) -> list[str]:
    """`gshare agent --bind` without a value: all interfaces. cyclopts 4 (Python 3.10) has no such flag."""
    if tokens[:1] != ["agent"]:
        return tokens
    following = [*tokens[1:], "--"]
    return [
        f"--bind=:{AGENT_PORT}" if token == "--bind" and after.startswith("-") else token
        for token, after in zip(tokens, following, strict=True)
    ]


def _fail(message: str, code: int) -> int:
    """One message on stderr. A closed stderr is no reason to lose the exit code."""
    try:
        sys.stderr.write(f"gshare: {message.strip()}\n")
        sys.stderr.flush()
    except OSError:
        pass
    return code


def _usage_message(error: CycloptsError) -> str:
    """cyclopts' own text on one line.

    An unknown command is worded here: cyclopts would import every subcommand to list them.
    """
    from cyclopts import UnknownCommandError

    if isinstance(error, UnknownCommandError) and not error.command_chain and error.unused_tokens:
        import difflib

        word = error.unused_tokens[0]
        known = [*COMMANDS, "version"]
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(known)}"
        return f"unknown command {word!r}; {hint}"
    return " ".join(str(error).split())


def _help_command(error: CycloptsError) -> str:
    return " ".join(["gshare", *(error.command_chain or ()), "--help"])


def _unexpected(error: Exception) -> int:
    """An error that nobody foresaw: what it was, and how to see where."""
    if os.environ.get("GSHARE_TRACEBACK") == "1":
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return _fail(f"{error.filename}: {error.strerror}", EXIT_FAILURE)
    what = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    return _fail(f"unexpected error: {what} (GSHARE_TRACEBACK=1 shows where; please report it)", EXIT_FAILURE)


def _reader_is_gone() -> bool:
    """Whether the broken pipe is our stdout (`gshare … | head`) and not, say, a trainer's socket."""
    import select

    poll = select.poll()
    poll.register(STDOUT, 0)  # POLLERR, POLLHUP and POLLNVAL are always reported
    return bool(poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
