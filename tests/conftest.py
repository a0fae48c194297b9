"""What every test needs before torch is imported, and the fixtures that many of them share.

The environment is set when this file is loaded, so before pytest imports the first test module:

- the trainer's own settings (MKL's strict mode and the rest), or packed rows have no solo bits;
- two threads, no hub, no tokenizer threads;
- state, cache, config and runtime directories in a new folder, so that no test sees or leaves anything
  of the user's. It is short on purpose: a Unix socket's path has at most 107 bytes;
- no deadline of 0.2 s for one example of hypothesis: a busy machine passes it;
- signals that whoever started the tests ignores (nohup) are not ignored by the processes that tests start.

Without torch (`make test-py310`), test modules that import what needs it are not collected; the summary
names them.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
import shutil
import tempfile
from pathlib import Path

import pytest
from child_signals import undo_ignoring
from gshare.agent.service.environment import trainer_environment
from hypothesis import settings

#: Imports that need the `train` extra.
NEEDS_TORCH = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "peft", "bitsandbytes", "gguf"),
    *("pyarrow", "huggingface_hub", "gshare.kernels", "gshare.agent.base", "gshare.agent.train"),
)
#: Files that take minutes to half a minute of a core, the longest first, without test_ and .py.
LONGEST = (
    *("device_engine", "triton_compile", "measure_memory", "sweep_process", "durability", "trunk_device"),
    *("sweep_repeated", "sweep_benchmark", "trunk", "memory_real", "examples", "queueing_ahead"),
    *("cli_estimate", "clone_exact", "nf4", "vram_killed", "joining_exact", "sweep_cluster_process"),
    *("trunk_graphs", "reserve_everywhere", "finetune_real", "trunk_benchmark", "cluster_process"),
)
HAS_TORCH = importlib.util.find_spec("torch") is not None

_home = Path(tempfile.mkdtemp(prefix="gshare-test-"))


def _set_environment() -> None:
    os.environ.update(trainer_environment())
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels are decorated when their module is loaded
        if platform.machine() == "x86_64":
            # There a kernel's dot is numpy's. Of its code for different processors that for Haswell and Zen
            # gives other bits to a sum that begins at another place, and some machines ask for it; this one
            # runs everywhere.
            os.environ["OPENBLAS_CORETYPE"] = "Prescott"
    os.environ.update(
        OMP_NUM_THREADS="2",
        OMP_WAIT_POLICY="PASSIVE",  # threads that spin between two operators take the cores of another test
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        GSHARE_LEDGER_DIR=str(_home / "ledger"),
    )
    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        folder = _home / variable.removeprefix("XDG_").removesuffix("_HOME").removesuffix("_DIR").lower()
        folder.mkdir(mode=0o700)
        os.environ[variable] = str(folder)


_set_environment()
undo_ignoring()
settings.register_profile("gshare", settings.default, deadline=None)
settings.load_profile("gshare")

#: Longer values, and bytes, make ids that nobody reads; some are drawn anew by every process (keys, clocks),
#: and processes that share the tests (pytest-xdist) must name them alike.
LONGEST_ID = 40


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """The argument's name, which pytest numbers; None: as usual."""
    drawn = isinstance(val, bytes) or (isinstance(val, str) and len(val) > LONGEST_ID)
    return argname if drawn else None


def _imports(source: str) -> set[str]:
    """Every module that a test file imports, at any depth, with `from a import b` as `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def needs_torch(path: Path) -> bool:
    """Whether the test file, or a file of `support/` that it imports, imports anything of `NEEDS_TORCH`."""
    imported = _imports(path.read_text(encoding="utf-8"))
    if any(name == need or name.startswith(need + ".") for name in imported for need in NEEDS_TORCH):
        return True
    helpers = (Path(__file__).parent / "support" / f"{name}.py" for name in imported if "." not in name)
    return any(needs_torch(helper) for helper in helpers if helper.is_file() and helper != path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first: shared out a file at a time, they would be what all wait for."""
    place = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if HAS_TORCH or not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    return True if needs_torch(collection_path) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not HAS_TORCH:
        out = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py") if needs_torch(path))
        terminalreporter.write_line(f"no torch here; not collected: {', '.join(out)}")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_home, ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama checkpoint of two layers with a tokenizer and a chat template; read-only."""
    pytest.importorskip("torch", reason="a checkpoint needs it")
    from gshare.agent.base.tiny import make_tiny_checkpoint

    return make_tiny_checkpoint(tmp_path_factory.mktemp("base") / "tiny-llama")
