"""The command's frame: one message per error, the right exit code, nothing of a traceback unless asked."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from gshare.agent.errors import GshareError, RetryLater, Stopped, UsageError
from gshare.cli import main as frame


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Puts a function in the place of `gshare doctor`, found by import path as the real ones are."""
    module = types.ModuleType("gshare_fake_command")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def install(function: Callable[..., object]) -> None:
        module.__dict__["function"] = function
        monkeypatch.setitem(frame.COMMANDS, "doctor", ("gshare_fake_command:function", "fake"))

    return install


def test_commands_are_frozen() -> None:
    """Scripts of users call these names; adding one is fine, changing one is not."""
    assert {name: path for name, (path, _) in frame.COMMANDS.items()} == {
        "finetune": "gshare.cli.finetune:finetune",
        "sweep": "gshare.cli.sweep:app",
        "jobs": "gshare.cli.jobs:app",
        "report": "gshare.cli.report:report",
        "data": "gshare.cli.data:app",
        "generate": "gshare.cli.generate:generate",
        "export": "gshare.cli.export:export",
        "audit": "gshare.cli.audit:audit",
        "estimate": "gshare.cli.estimate:estimate",
        "gpu": "gshare.cli.gpu:app",
        "agent": "gshare.cli.agent:app",
        "coordinator": "gshare.cli.coordinator:app",
        "submit": "gshare.cli.submit:submit",
        "cluster": "gshare.cli.cluster:app",
        "tui": "gshare.cli.tui:tui",
        "doctor": "gshare.cli.doctor:doctor",
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GshareError("disk full while writing out/a"), 1),
        (UsageError("adapters.toml: unknown key 'rnak'; did you mean 'rank'?"), 2),
        (RetryLater("all memory is reserved"), 75),
        (Stopped("stopped; checkpoints written"), 130),
        (Stopped("terminated; checkpoints written", 143), 143),
    ],
)
def test_our_errors(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str], error: GshareError, code: int
) -> None:
    def fail() -> None:
        raise error

    command(fail)
    assert frame.main(["doctor"]) == code
    captured = capsys.readouterr()
    assert captured.err == f"gshare: {error}\n"
    assert captured.out == ""


def test_message_is_not_markup(command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise UsageError("out/[red]x[/red]: no such file")

    command(fail)
    frame.main(["doctor"])
    assert "[red]x[/red]" in capsys.readouterr().err


def test_interrupt(command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    command(fail)
    assert frame.main(["doctor"]) == 130
    assert capsys.readouterr().err == "gshare: interrupted\n"


def test_unexpected_error_hides_its_traceback(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("division by zero")

    command(fail)
    monkeypatch.delenv("GSHARE_TRACEBACK", raising=False)
    assert frame.main(["doctor"]) == 1
    quiet = capsys.readouterr().err
    assert quiet.count("\n") == 1
    assert "ZeroDivisionError: division by zero" in quiet
    assert "GSHARE_TRACEBACK=1" in quiet

    monkeypatch.setenv("GSHARE_TRACEBACK", "1")
    assert frame.main(["doctor"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_os_error_names_the_file(command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        os.stat("/nowhere/at/all")

    command(fail)
    assert frame.main(["doctor"]) == 1
    assert capsys.readouterr().err == "gshare: /nowhere/at/all: No such file or directory\n"


@pytest.mark.parametrize("module", ["torch", "huggingface_hub.utils"])
def test_a_missing_extra_says_how_to_install_it(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str], module: str
) -> None:
    def fail() -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    command(fail)
    assert frame.main(["doctor"]) == 1
    message = f"gshare: {module} is not installed; this command needs pip install 'gshare[train]'\n"
    assert capsys.readouterr().err == message


def test_a_missing_module_of_ours_is_unexpected(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Negative control: installing the extra would not help."""

    def fail() -> None:
        raise ModuleNotFoundError("No module named 'gshare.nothing'", name="gshare.nothing")

    command(fail)
    assert frame.main(["doctor"]) == 1
    assert "unexpected error" in capsys.readouterr().err


def test_a_broken_socket_is_not_quiet(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a closed stdout is; a trainer that hangs up is an error that has to be seen."""

    def fail() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    command(fail)
    assert frame.main(["doctor"]) == 1
    assert "BrokenPipeError" in capsys.readouterr().err


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1), (75, 75), (True, 0), ("text", 0)])
def test_what_a_command_returns(command: Callable[..., None], returned: object, code: int) -> None:
    command(lambda: returned)
    assert frame.main(["doctor"]) == code


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["fintune"], "unknown command 'fintune'; did you mean 'finetune'?"),
        (["qqqqqq"], "the commands are finetune, jobs"),
        (["version", "now"], "'now'"),
        (["version", "--loud"], "--loud"),
    ],
)
def test_usage_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert frame.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("gshare: ")
    assert captured.err.count("\n") == 1
    assert part in captured.err
    assert "--help)" in captured.err
    assert captured.out == ""


def test_unknown_command_imports_no_subcommand(monkeypatch: pytest.MonkeyPatch) -> None:
    """cyclopts' own message would, to list them; a subcommand that cannot be imported would show it."""
    monkeypatch.setitem(frame.COMMANDS, "doctor", ("gshare_no_such_module:f", "fake"))
    assert frame.main(["doctr"]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["version"]) == 0
    out = capsys.readouterr().out
    assert frame.main(["--version"]) == 0
    assert capsys.readouterr().out == out
    assert out.strip().count(".") == 2


def test_closed_stdout_is_quiet() -> None:
    """`gshare … | head -0`: no traceback and no "Exception ignored" when the interpreter ends."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "gshare.cli.main", "version"],
        cwd="/",
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("arguments", "code"), [("version", 0), ("nothing", 2), ("--help", 0)])
def test_closed_standard_streams_keep_the_exit_code(closed: str, arguments: str, code: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m gshare.cli.main {arguments} {closed}', sys.executable],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert "Error" not in done.stderr
    if "2>" not in closed:
        assert ("unknown command" in done.stderr) == (code == 2)


def test_an_error_that_is_not_stdouts_is_not_taken_for_one() -> None:
    """A full disk under something else, while stdout takes everything."""
    program = (
        "import sys\nfrom gshare.cli import main as frame\n"
        "def command():\n    print('data', flush=True)\n    raise OSError(28, 'No space left on device')\n"
        "sys.modules['fake'] = sys.modules['__main__']\nframe.COMMANDS['doctor'] = ('fake:command', 'fake')\n"
        "sys.exit(frame.main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd="/", capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, "data\n")
    assert done.stderr.startswith("gshare: unexpected error: OSError: [Errno 28] No space left on device (")


def test_no_file_takes_the_number_of_a_closed_stream() -> None:
    """A lock opened as descriptor 0 would be replaced by a child's stdin."""
    program = (
        "import os\nfrom gshare.cli import main as frame\n"
        "frame._open_standard_streams()\nprint(os.open('/', os.O_RDONLY), flush=True)"
    )
    for closed in ("<&-", "<&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program],
            cwd="/",
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
        )
        assert int(done.stdout) > 2


def test_an_interrupt_during_the_imports_is_one_line() -> None:
    """The first tenths of a second are imports of other packages; all of them are inside `main`."""
    program = (
        "import signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'cyclopts':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from gshare.cli.main import main\n"
        "sys.exit(main(['version']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd="/", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 130
    assert done.stderr == "gshare: interrupted\n"


def test_little_is_imported_before_main() -> None:
    """Negative control of the test above: whatever is imported at the top is outside its `try`."""
    program = (
        "import sys; before = set(sys.modules); import gshare.cli.main; print(*set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd="/", capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"cyclopts", "rich", "attrs", "asyncio", "difflib", "traceback", "torch"}


def test_relative_simulated_devices_start_at_this_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer, which inherits the variable, runs in another directory."""
    (tmp_path / "devices.toml").write_text('[[device]]\nuuid = "GPU-here"\ntotal_mb = 8192\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GSHARE_DEVICES", "devices.toml")
    assert frame.main(["gpu", "status"]) == 0
    assert "GPU-here" in capsys.readouterr().out
    assert os.environ["GSHARE_DEVICES"] == str(tmp_path / "devices.toml")


def test_bind_alone_is_every_interface_under_every_cyclopts() -> None:
    from gshare.agent.node.protocol import DEFAULT_PORT
    from gshare.cli.main import _with_bare_bind

    all_of_them = f"--bind=:{DEFAULT_PORT}"
    assert _with_bare_bind(["agent", "--bind"]) == ["agent", all_of_them]
    assert _with_bare_bind(["agent", "--bind", "--install"]) == ["agent", all_of_them, "--install"]
    assert _with_bare_bind(["agent", "--bind", "h:1"]) == ["agent", "--bind", "h:1"]
    assert _with_bare_bind(["gpu", "--bind"]) == ["gpu", "--bind"]
