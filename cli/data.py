"""`gshare data`: look at training data before anything is trained.

gshare data preview FILE --model MODEL [--rows 3] [--max-length 1024] …
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from gshare.agent.errors import UsageError
from gshare.agent.jobs.spec import DataFormat, TurnPolicy

app = App(name="data", help="Look at training data as the model will see it.")


@app.command
def preview(
    file: Path,
    *,
    model: str,
    rows: int = 3,
    data_format: DataFormat = "auto",
    max_length: Annotated[int, Parameter(alias="--max-seq-len")] = 1024,
    on_bad_turns: TurnPolicy = "error",
    train_on_prompt: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Show the first rows as the model sees them, with the tokens that are trained marked.

    Parameters
    ----------
    file
        Training data: .jsonl, .json, .csv or .parquet.
    model
        The base whose tokenizer and chat template are used: directory, hub id or .gguf file.
    rows
        How many rows to show.
    data_format
        The format of the rows; `auto` finds it from the first row.
    max_length
        Rows are cut to this many tokens.
    on_bad_turns
        What to do with a chat whose turns do not alternate.
    train_on_prompt
        Train every token, not only the assistant's or the completion's.
    """
    if rows < 1:
        raise UsageError(f"--rows {rows}: must be at least 1")
    from gshare.agent.base.resolve import resolve_model
    from gshare.agent.data.preview import preview as show
    from gshare.agent.xdg import cache_dir

    resolved = resolve_model(model, cache_dir=cache_dir(), base_dtype="bf16")
    show(
        file,
        resolved.path,
        rows=rows,
        data_format=data_format,
        max_length=max_length,
        on_bad_turns=on_bad_turns,
        train_on_prompt=train_on_prompt,
    )
