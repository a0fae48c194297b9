"""Recordings: whole, cut, damaged, of another version; and what a replay shows."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gshare.agent.errors import UsageError
from gshare.tui import frames as f
from gshare.tui import recording as r
from gshare.tui.model import State
from gshare.tui.replay_source import ReplaySource
from watching import apply_all


def at(time: float) -> dict[str, Any]:
    return {"time": time, "received": time}


def story(seconds: int = 120, jobs: int = 3) -> list[f.Frame]:
    """Metrics each second, an evaluation each tenth, one job that fails half way."""
    names = [f"job{number}" for number in range(jobs)]
    frames: list[f.Frame] = [
        f.Found(**at(0.0), kind="coordinator", title="cluster lab", can=("stop",)),
        f.SourceState(**at(0.0), state="live", since=0.0),
        f.Snapshot(**at(0.0), jobs=tuple(f.JobView(job=name, state="running") for name in names)),
    ]
    for second in range(1, seconds):
        live = names if second < seconds // 2 else names[1:]
        found = tuple(
            f.Sample(job=name, step=second, total_steps=seconds, loss=1 / second, time=float(second))
            for name in live
        )
        frames.append(f.Samples(**at(second), samples=found))
        if second % 10 == 0:
            frames.append(f.Evaluation(**at(second), job=names[-1], step=second, val_loss=2 / second))
        if second == seconds // 2:
            frames.append(f.JobState(**at(second), job=names[0], state="failed", reason="no memory"))
    return frames


def record(path: Path, frames: list[f.Frame]) -> Path:
    with r.Recorder(path, started=0.0, title="cluster lab") as recorder:
        for frame in frames:
            recorder.write(frame)
    assert recorder.problem == ""
    return path


def test_numbers_beyond_64_bits_end_neither_dashboard_nor_recording(tmp_path: Path) -> None:
    """JSON files of runs may hold such, MessagePack cannot."""
    hyper = f.hyper_of({"seed": 10**30, "r": 8})
    assert hyper == {"seed": str(10**30), "r": 8}
    frames: list[f.Frame] = [
        f.Snapshot(**at(0.0), jobs=(f.JobView(job="a", state="running", hyper=hyper),)),
        f.JobState(**at(1.0), job="a", state="running", step=2**70),
        f.Evaluation(**at(2.0), job="a", step=3, val_loss=0.5),
    ]
    recording = r.Recording(record(tmp_path / "x.gshare", frames))
    job = state_at(recording, 3.0).jobs["a"]
    assert (job.hyper["seed"], job.step, job.val.steps()) == (str(10**30), None, [3])


def shown(state: State) -> list[Any]:
    """All of it but what only the source's last words differ in."""
    return [msgspec.to_builtins(frame) for frame in state.dump(0.0, 0.0)]


def state_at(recording: r.Recording, moment: float) -> State:
    """By the keyframe before it."""
    state = State()
    frames = recording.read(recording.before(moment))
    apply_all(state, [frame for frame in frames if frame.received <= moment])
    return state


def test_what_was_recorded_is_read_again(tmp_path: Path) -> None:
    frames = story()
    recording = r.Recording(record(tmp_path / "a.gshare", frames))
    assert list(recording.read()) == frames
    assert (recording.header.title, recording.note) == ("cluster lab", "")
    assert (recording.start, recording.end) == (0.0, 119.0)


@pytest.mark.parametrize("moment", [0.0, 29.5, 30.0, 61.0, 95.0, 119.0])
def test_a_seek_shows_what_was_shown_then(tmp_path: Path, moment: float) -> None:
    frames = story()
    recording = r.Recording(record(tmp_path / "a.gshare", frames))
    assert sum(chunk.keyframe for chunk in recording.chunks) >= 2
    straight = State()
    apply_all(straight, [frame for frame in frames if frame.received <= moment])
    assert shown(state_at(recording, moment)) == shown(straight)


def test_without_its_keyframes_a_seek_would_read_from_the_start(tmp_path: Path) -> None:
    recording = r.Recording(record(tmp_path / "a.gshare", story()))
    assert recording.chunks[recording.before(95.0)].keyframe
    assert recording.chunks[recording.before(95.0)].time > 60
    assert recording.before(5.0) == 0


def test_keyframes_are_at_most_half_of_it(tmp_path: Path) -> None:
    """Many jobs of which nothing is heard: a keyframe every 30 s would be nearly all of the file."""
    views = tuple(f.JobView(job=f"job{number}", state="running") for number in range(500))
    frames: list[f.Frame] = [f.Snapshot(**at(0.0), jobs=views)]
    frames += [f.Message(**at(second), level="info", text=f"line {second}") for second in range(1, 3600)]
    recording = r.Recording(record(tmp_path / "a.gshare", frames))
    packed = {key: sum(c.packed for c in recording.chunks if c.keyframe is key) for key in (True, False)}
    assert 0 < packed[True] < packed[False]


def test_cut_anywhere_it_is_read_up_to_there(tmp_path: Path) -> None:
    whole = record(tmp_path / "a.gshare", story(seconds=8)).read_bytes()
    frames = list(r.Recording(tmp_path / "a.gshare").read())
    first = r.Recording(tmp_path / "a.gshare").chunks[1].offset
    notes = 0
    for cut in range(first, len(whole)):
        path = tmp_path / "cut.gshare"
        path.write_bytes(whole[:cut])
        recording = r.Recording(path)
        found = list(recording.read())
        recording.close()
        assert found == frames[: len(found)]
        notes += bool(recording.note)
    assert notes > (len(whole) - first) * 0.9  # all but the cuts between two chunks


def test_cut_in_its_header_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gshare"
    path.write_bytes(record(tmp_path / "a.gshare", story(4)).read_bytes()[: len(r.MAGIC) + 9])
    with pytest.raises(r.BadRecording, match="header"):
        r.Recording(path)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = record(tmp_path / "a.gshare", story(8))
    data = bytearray(path.read_bytes())
    chunk = r.Recording(path).chunks[1]
    data[chunk.offset + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(r.BadRecording, match="wrong checksum"):
        list(r.Recording(path).read())


def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.gshare"
    header = msgspec.msgpack.encode(r.Header(schema=f.SCHEMA + 1, gshare="9.9", started=0.0))
    path.write_bytes(r.MAGIC + struct.pack(">I", len(header)) + header)
    with pytest.raises(r.BadRecording, match=r"gshare 9\.9 \(schema 2\)"):
        r.Recording(path)


@pytest.mark.parametrize("started", [1e300, -1e300, float("nan"), float("inf")])
def test_a_header_of_no_time_is_refused(tmp_path: Path, started: float) -> None:
    """And the same file with a time is taken."""
    data = record(tmp_path / "a.gshare", story(4)).read_bytes()
    path = tmp_path / "b.gshare"
    old, new = struct.pack(">d", 0.0), struct.pack(">d", started)
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(r.BadRecording, match=r"--replay .*b\.gshare: its header cannot be read"):
        ReplaySource(path)
    path.write_bytes(data.replace(old, struct.pack(">d", 5.0), 1))
    assert "1970" in ReplaySource(path).detail


DEEP = b"\x91" * 100_000 + b"\xc0"


def test_a_deeply_nested_chunk_is_refused(tmp_path: Path) -> None:
    import zlib

    path = record(tmp_path / "a.gshare", story(4))
    # An array of one frame whose unknown field is 100,000 arrays deep.
    data = b"\x91\x82" + b"\xa4type\xa5reset" + b"\xa4deep" + DEEP
    packed = zlib.compress(data)
    with open(path, "ab") as file:
        file.write(struct.pack(">cdIII", b"F", 9.0, len(packed), len(data), zlib.crc32(packed)) + packed)
    with pytest.raises(r.BadRecording, match=r"--replay .*a\.gshare: damaged at byte \d+: .*recursion"):
        ReplaySource(path)


def test_a_deeply_nested_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gshare"
    header = b"\x81\xa4deep" + DEEP
    path.write_bytes(r.MAGIC + struct.pack(">I", len(header)) + header)
    with pytest.raises(r.BadRecording, match=r"header cannot be read: .*recursion"):
        ReplaySource(path)


@pytest.mark.parametrize("content", [b"", b"hello", r.MAGIC, b"\x00" * 4096])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.gshare"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"--replay .*a\.gshare"):
        r.Recording(path)


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """A chunk that says it is small and is 64 MiB of zeros."""
    import zlib

    path = record(tmp_path / "a.gshare", story(4))
    packed = zlib.compress(bytes(64 << 20))
    with open(path, "ab") as file:
        file.write(struct.pack(">cdIII", b"F", 9.0, len(packed), 100, zlib.crc32(packed)) + packed)
    with pytest.raises(r.BadRecording, match="damaged"):
        list(r.Recording(path).read())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = record(tmp_path / "a.gshare", story(4))
    before = path.read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        r.Recorder(path, started=0.0)
    assert path.read_bytes() == before


def test_a_full_disk_ends_the_recording_only(tmp_path: Path) -> None:
    recorder = r.Recorder(tmp_path / "a.gshare", started=0.0)
    recorder._file.close()
    recorder._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - closed by the recorder
    for frame in story(10):
        recorder.write(frame)
    recorder.close()
    assert "No space left on device" in recorder.problem


class Clock:
    """A minute passes at each look, so that nothing is waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 60.0
        return self.now


def test_a_replay_gives_the_same_frames(tmp_path: Path) -> None:
    frames = story(30)
    source = ReplaySource(record(tmp_path / "a.gshare", frames), speed=1000.0, clock=Clock())
    got: list[f.Frame] = []

    async def play() -> None:
        task = asyncio.create_task(source.run(got.append))
        while not got or not isinstance(got[-1], f.SourceState) or got[-1].state != "ended":
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(play(), 30))
    assert got[1:-1] == frames[1:]
    assert got[0] == msgspec.structs.replace(frames[0], can=("seek",))  # no stopping of what is long over
    assert source.position == source.end


def test_seek_back_from_the_end_and_pause(tmp_path: Path) -> None:
    frames = story(120)
    source = ReplaySource(record(tmp_path / "a.gshare", frames), speed=1000.0)
    state = State()

    async def until(condition) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    async def play() -> None:
        task = asyncio.create_task(source.run(state.apply))
        await until(lambda: state.source is not None and state.source.state == "ended")
        source.pause(True)
        source.seek(40.0)
        await until(lambda: state.jobs and state.jobs["job0"].step == 40)
        await asyncio.sleep(0.05)
        straight = State()
        apply_all(straight, [frame for frame in frames if frame.received <= 40.0])
        assert shown(state)[2:] == shown(straight)[2:]  # paused: it has not gone on
        assert (source.position, source.paused) == (40.0, True)
        source.seek(-5.0)
        await until(lambda: source.position == source.start)
        source.pause(False)
        await until(lambda: state.source is not None and state.source.state == "ended")
        assert state.jobs["job0"].state == "failed"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(play(), 30))


@pytest.mark.parametrize("speed", [0.0, -1.0, 1e9, float("nan")])
def test_speeds_that_are_none(tmp_path: Path, speed: float) -> None:
    path = record(tmp_path / "a.gshare", story(4))
    with pytest.raises(UsageError, match="--speed"):
        ReplaySource(path, speed=speed)
