"""sdist → wheel → every module imports from a fresh directory; extras and bounds are as they should be."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("agent", "cli", "coordinator", "kernels", "tui")

IMPORT_ALL = """
import importlib, pathlib, sys
target = pathlib.Path(sys.argv[1])
sys.path = [p for p in sys.path if ".dev" not in p]
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
sys.path.insert(0, str(target))
names = []
for file in sorted((target / "gshare").rglob("*.py")):
    parts = file.relative_to(target).with_suffix("").parts
    names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
for name in names:
    module = importlib.import_module(name)
    assert module.__file__.startswith(str(target)), (name, module.__file__)
print(len(names))
"""


def source_modules() -> list[str]:
    return sorted(
        f"gshare/{file.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the sdist, as an index would get it, with no network."""
    pytest.importorskip("hatchling", reason="hatchling is in the dev extra")
    out = tmp_path_factory.mktemp("dist")
    hatch = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    subprocess.run([*hatch, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True, timeout=120)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    unpacked = out / sdist.name.removesuffix(".tar.gz")
    subprocess.run([*hatch, "-t", "wheel"], cwd=unpacked, check=True, capture_output=True, timeout=120)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_every_module_under_gshare(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if name.endswith(".py")) == source_modules()
    assert all(name.startswith(("gshare/", "gshare-")) for name in names)
    for room in ROOMS:
        assert f"gshare/{room}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_has_only_what_git_has(wheel: Path) -> None:
    """An environment or a run that lies in the work tree must not be published with it."""
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames()}
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    assert packed - set(done.stdout.splitlines()) == {"PKG-INFO"}


def test_the_wheel_is_pure_and_has_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "gshare = gshare.cli.main:main" in archive.read(points).decode()
    assert wheel.name.endswith("-py3-none-any.whl")


def test_every_module_of_the_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="half of the modules need it")
    zipfile.ZipFile(wheel).extractall(tmp_path / "target")
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, str(tmp_path / "target")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) == len(source_modules())


def test_a_missing_module_is_noticed(wheel: Path, tmp_path: Path) -> None:
    """Negative control: with one room cut out of the wheel the imports fail."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            tmp_path / "target", [n for n in archive.namelist() if not n.startswith("gshare/agent/errors")]
        )
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, str(tmp_path / "target")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert "gshare.agent.errors" in done.stderr


def test_the_base_install_has_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    heavy = ("torch", "triton", "transformers", "bitsandbytes", "safetensors", "pyarrow")
    assert not [line for line in project["dependencies"] if line.startswith(heavy)]
    train = project["optional-dependencies"]["train"]
    assert [line for line in train if line.startswith("torch>")] == ["torch>=2.11,<2.14"]


def test_every_dependency_has_an_upper_bound() -> None:
    """A release that nobody ran is not admitted."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    lines = [line for group in (project["dependencies"], *extras) for line in group]
    unbounded = [line for line in lines if "<" not in line.split(";")[0] and not line.startswith("gshare[")]
    assert not unbounded


def test_scripts_are_run_as_they_say() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")
    done = subprocess.run(
        ["make", "-n", "-C", str(ROOT), "test", "VENV=/nowhere"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for step in ("-m venv /nowhere", "'.[train,dev]'", "ruff check", "lint-imports", "pyright", "pytest"):
        assert step in done.stdout, step
