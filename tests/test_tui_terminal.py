"""`gshare tui` in a real terminal with real keys, under tmux."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

tmux = shutil.which("tmux")
pytestmark = pytest.mark.skipif(tmux is None, reason="tmux is not installed")

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 90.0
METRICS = '{"type": "step", "step": 1, "total_steps": 2, "loss": 2.5}\n'


class Terminal:
    """A tmux server of its own. `run` types a command line into a pane of that size."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("TMUX", "NO_COLOR")},
            "PYTHONPATH": str(ROOT / ".dev"),
            "HOME": str(directory),
            "XDG_STATE_HOME": str(directory / "state"),
            "GSHARE_LEDGER_DIR": str(directory / "ledger"),
            "TERM": "xterm-256color",
        }

    def tmux(self, *arguments: str) -> str:
        assert tmux is not None
        # The socket's path must be short.
        command = [tmux, "-f", "/dev/null", "-S", f"{self.directory}/t", *arguments]
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout

    def start(self, size: tuple[int, int], *arguments: str) -> None:
        self.tmux("new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), self._line(arguments))

    def start_again(self, *arguments: str) -> None:
        """In the same pane, in the place of what runs there."""
        self.tmux("respawn-pane", "-k", f"clear; {self._line(arguments)}")

    def _line(self, arguments: tuple[str, ...]) -> str:
        command = [sys.executable, "-m", "gshare.cli.main", "tui", *arguments]
        return f"{' '.join(repr(part) for part in command)}; echo EXIT $?; sleep 600"

    @property
    def text(self) -> str:
        return self.tmux("capture-pane", "-p")

    def until(self, fits: Callable[[str], bool], what: str, key: str = "") -> str:
        """With `key`: pressed again at each look."""
        end = time.monotonic() + PATIENCE_S
        while not fits(text := self.text):
            assert time.monotonic() < end, f"waited in vain for {what}\n{text}"
            if key:
                self.keys(key)
            time.sleep(0.1)
        return text

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)


@pytest.fixture
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    directory = tmp_path_factory.mktemp("t")
    one = Terminal(directory)
    yield one
    if (directory / "t").exists():
        one.tmux("kill-server")


def test_a_new_user_finds_the_way_with_real_keys(terminal: Terminal) -> None:
    out = terminal.directory / "out" / "support"
    out.mkdir(parents=True)
    (out / "metrics.jsonl").write_text(METRICS)
    terminal.start((100, 30), "--run", str(out.parent))
    terminal.until(lambda text: "support" in text and "q Quit" in text, "the overview")
    terminal.keys("?")
    told = terminal.until(lambda text: "─ Help ─" in text and "Compare marked" in text, "the help")
    assert "Open" in told
    terminal.keys("Escape")
    terminal.until(lambda text: "Leaderboard" in text and "─ Help ─" not in text, "the help to go")
    terminal.keys("Enter")
    terminal.until(lambda text: "overview › support" in text, "the adapter's page")
    terminal.tmux("resize-window", "-x", "80", "-y", "24")
    terminal.until(lambda text: max(map(len, text.splitlines())) <= 80 and "4 adapter" in text, "80×24")
    terminal.keys("2", "/")
    terminal.until(lambda text: "filter:" in text, "the filter line")
    terminal.keys("-l", "nothing")
    terminal.until(lambda text: "no adapter fits the filter" in text, "the filter to work")
    terminal.keys("Escape")
    terminal.until(lambda text: "no adapter fits" not in text, "the filter to go")
    terminal.keys("q")
    terminal.until(lambda text: "EXIT 0" in text, "the end")


def test_a_recording_is_made_played_sought_and_told_when_it_is_cut_or_damaged(terminal: Terminal) -> None:
    out = terminal.directory / "out" / "support"
    out.mkdir(parents=True)
    metrics = out / "metrics.jsonl"
    metrics.write_text(METRICS)
    made, cut = terminal.directory / "run.gshare", terminal.directory / "cut.gshare"
    terminal.start((100, 30), "--run", str(out.parent), "--record", str(made))
    terminal.until(lambda text: "support" in text and "2.500" in text, "the overview")
    metrics.write_text(METRICS + METRICS.replace('"step": 1', '"step": 2').replace("2.5", "1.75"))
    terminal.until(lambda text: "1.750" in text, "the second step")
    terminal.keys("q")
    terminal.until(lambda text: "EXIT 0" in text, "the end of the recording")

    terminal.start_again("--replay", str(made), "--speed", "1000")
    terminal.until(lambda text: "ended" in text and "×1000" in text and "1.750" in text, "the replay's end")
    terminal.keys("p")
    # A key is 30 s of a recording that is longer where the machine is slow.
    terminal.until(lambda text: "‖ 0:00 /" in text and "1.750" not in text, "its beginning", key="[")
    terminal.until(lambda text: "1.750" in text, "its end again", key="]")
    terminal.keys("q")
    terminal.until(lambda text: "EXIT 0" in text, "the end")

    cut.write_bytes(made.read_bytes()[:-3])
    terminal.start_again("--replay", str(cut))
    # Wrapped where the path is long, in the middle of a word too.
    terminal.until(
        lambda text: "cut.gshareendsinthemiddleofachunk" in "".join(text.split()), "the word about the cut"
    )
    data = bytearray(made.read_bytes())
    data[-3] ^= 1
    cut.write_bytes(data)
    terminal.start_again("--replay", str(cut))
    text = terminal.until(lambda text: "EXIT 2" in text, "the refusal")
    assert text.startswith("gshare: --replay ")
    assert "wrongchecksumEXIT2" in "".join(text.split())


#: At its end textual's queue is full and its writing thread dead, as happens by chance when a terminal goes.
STUCK = """
import sys
from textual.drivers._writer_thread import WriterThread

def stop(self):
    while True:
        self._queue.put("x")

WriterThread.stop = stop
from gshare.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("program", [("-m", "gshare.cli.main"), ("-c", STUCK)], ids=["by itself", "stuck"])
def test_it_ends_with_a_terminal_that_sends_no_signal(tmp_path: Path, program: tuple[str, str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *program, "tui", "--run", str(tmp_path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT / ".dev"), "TERM": "xterm-256color"},
        start_new_session=True,  # so it is nobody's controlling terminal
    )
    os.close(theirs)
    try:
        seen = b""
        while b"gshare" not in seen:
            seen += os.read(ours, 1 << 16)
        os.close(ours)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGHUP
    finally:
        process.kill()
        process.wait()


def test_without_a_terminal_it_says_so() -> None:
    command = [sys.executable, "-m", "gshare.cli.main", "tui"]
    done = subprocess.run(
        command,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT / ".dev")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "needs a terminal" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--theme", "pink"], "the themes are gshare-dark"),
        (["--speed", "2"], "--speed is for --replay alone"),
        (["--record", "a", "--replay", "b"], "name one of them"),
    ],
)
def test_bad_flags(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    from gshare.cli.main import main

    assert main(["tui", *arguments]) == 2
    assert why in capsys.readouterr().err
