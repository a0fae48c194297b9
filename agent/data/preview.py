"""`gshare data preview`: the first rows as the model sees them, trained tokens marked."""

from __future__ import annotations

from itertools import groupby, islice
from pathlib import Path
from typing import Any

from gshare.agent.data.build import Pipeline, Prepared
from rich.console import Console
from rich.text import Text

#: Around trained tokens where there is no colour. Not in everyday text, so they are not read as data.
OPEN, CLOSE = "⟦", "⟧"
_TRAINED_STYLE = "bold green"


def preview(
    source: Path,
    tokenizer_dir: Path,
    *,
    rows: int = 3,
    data_format: str = "auto",
    max_length: int = 1024,
    on_bad_turns: str = "error",
    train_on_prompt: bool = False,
    console: Console | None = None,
) -> None:
    """Print the first `rows` rows of the file; dropped ones with their reason. Writes no store.

    Coloured on a terminal; with `OPEN`/`CLOSE` around trained tokens elsewhere (and under NO_COLOR).
    Raises `UsageError` as `build_token_store` does, for the rows that it reads.
    """
    console = console or Console()
    pipeline = Pipeline(
        source,
        tokenizer_dir,
        data_format=data_format,
        max_length=max_length,
        on_bad_turns=on_bad_turns,
        train_on_prompt=train_on_prompt,
    )
    coloured = console.is_terminal and not console.no_color
    shown = list(islice(pipeline.rows(), rows))
    for row in shown:
        console.print(_headline(row), style="bold", highlight=False)
        if row.encoded is not None:
            console.print(render_row(row, pipeline.tokenizer, coloured=coloured), soft_wrap=True)
            for note in row.encoded.notes:
                console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
        console.print()
    mark = "green" if coloured else f"{OPEN}…{CLOSE}"
    how = "generation markers" if pipeline.encoder.has_markers else "prefix difference"
    template = f"chat template by {how}" if pipeline.encoder.template else "no chat template"
    footer = f"format {pipeline.parser.format}; {template}; trained tokens: {mark}"
    console.print(Text(footer, style="dim"), soft_wrap=True)


def render_row(row: Prepared, tokenizer: Any, *, coloured: bool) -> Text:
    """The row's tokens as text. Each run is decoded as one: a character can be several tokens."""
    assert row.encoded is not None
    text = Text()
    pairs = zip(row.encoded.tokens, row.encoded.trained, strict=True)
    for trained, run in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = _visible(decoded)
        if not trained:
            text.append(piece)
        elif coloured:
            text.append(piece, style=_TRAINED_STYLE)
        else:
            text.append(f"{OPEN}{piece}{CLOSE}")
    return text


def _headline(row: Prepared) -> str:
    if row.encoded is None:
        return f"row {row.number}: dropped: {row.dropped}"
    return f"row {row.number}: {len(row.encoded.tokens)} tokens, {sum(row.encoded.trained)} trained"


def _visible(text: str) -> str:
    """Without control characters: a data file must not drive the reader's terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
