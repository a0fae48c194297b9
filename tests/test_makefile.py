"""`make clean` removes what the other targets made, and nothing that git keeps."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_clean_removes_what_the_demos_write() -> None:
    told = subprocess.run(
        ["make", "-n", "clean", "VENV=.venv"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    removed = set(told.stdout.split())
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "sweep-demo"):
        (script,) = re.findall(rf"^{target}:.*\n.*python (\S+)$", makefile, re.MULTILINE)
        text = (ROOT / script).read_text()
        where = re.search(r'^(?:RUN|OUT) = HERE((?:\.parent)*) / "(.+)"$', text, re.MULTILINE)
        assert where is not None, script
        above = where[1].count(".parent")
        folder = [Path(script).parent, *Path(script).parent.parents][above]
        assert str(folder / where[2]) in removed
