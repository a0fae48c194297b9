"""The dashboard's sources against what they connect to: a coordinator, agents, trainers, files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster_of_straw import Straw, agents_of_straw
from fake_agent import FakeAgent, start_fields
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.spec import AdapterSpec, JobRequest
from gshare.agent.node import protocol as p
from gshare.agent.service.client import TrainerClient
from gshare.agent.service.hold import spawn_trainer
from gshare.agent.service.output_dir import RunRecord
from gshare.agent.service.protocol import Detach, SubmitJobs
from gshare.agent.service.registry import TrainerConfig, take_lock
from gshare.agent.service.wire import WireError, encode
from gshare.coordinator.api_protocol import (
    ApiHello,
    ApiWelcome,
    ClusterEventFrame,
    FromCoordinator,
    JobEnded,
    JobRows,
    ListClusterJobs,
    NodeRows,
)
from gshare.tui import frames as f
from gshare.tui import run_source
from gshare.tui.agent_source import AgentSource, parse_address
from gshare.tui.coordinator_source import CoordinatorSource
from gshare.tui.finding import find_source
from gshare.tui.local_source import LocalSource
from gshare.tui.run_source import RunSource
from gshare.tui.socket_link import SocketLink
from gshare.tui.typed_frames import TypedReader
from watching import Watched, watching

SUPPORT = Path(__file__).parent / "support"


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "GSHARE_LEDGER_DIR"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))
    devices = tmp_path / "devices.toml"
    devices.write_text('[[device]]\nuuid = "GPU-sim"\nname = "Sim 8 GB"\ntotal_mb = 8192\n')
    monkeypatch.setenv("GSHARE_DEVICES", str(devices))


def straw(tmp_path: Path, test: Callable[[Straw], Awaitable[None]], *names: str, **fields: Any) -> None:
    async def main() -> None:
        async with agents_of_straw(tmp_path, *names, **fields) as it:
            await asyncio.wait_for(test(it), 60)

    asyncio.run(main())


async def started(it: Straw, w: Watched) -> None:
    """Job "one" is placed, shown, and makes its first step."""
    await w.until(lambda: w.state.jobs.get("one") and w.state.jobs["one"].state == "starting")
    await w.until(lambda: it.agents["a"].attempts)
    it.agents["a"].advance(it.agents["a"].running("one"))
    await w.until(lambda: w.state.jobs["one"].state == "running")


# --- the wire


def test_frames_split_at_every_byte() -> None:
    rows = [NodeRows(reply_to=number, nodes=[]) for number in (1, 2, 3)]
    data = b"".join(encode(row) for row in rows)
    for cut in range(len(data) + 1):
        reader = TypedReader(FromCoordinator)
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) == rows
    reader = TypedReader(FromCoordinator)
    found = [message for number in range(len(data)) for message in reader.feed(data[number : number + 1])]
    assert found == rows


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (encode(ListClusterJobs(id=1)), "unexpected message"),
        (b"\xc1", "not a MessagePack stream"),
        (b"\x93\x01\x02\x03", "unexpected message"),
    ],
)
def test_what_is_no_message_ends_the_stream(data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        TypedReader(FromCoordinator).feed(data)


def test_a_frame_without_end_is_refused() -> None:
    reader = TypedReader(FromCoordinator, max_frame=1 << 16)
    assert reader.feed(b"\xdd\xff\xff\xff\xff" + bytes(65000)) == []  # an array of 2^32 - 1 numbers
    with pytest.raises(WireError, match="larger than 65536"):
        reader.feed(bytes(4096))


# --- a coordinator


def test_a_cluster_from_submission_to_the_end(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running(), watching(CoordinatorSource(it.state_dir)) as w:
            await w.until(lambda: w.live and len(w.state.nodes) == 2)
            await it.submit("one", "two")
            await w.until(lambda: {job.state for job in w.state.jobs.values()} == {"completed"})
            job = w.state.jobs["one"]
            assert (job.step, job.best_step) == (6, 6)
            await w.until(lambda: job.hyper)
            assert (job.hyper["r"], job.hyper["lora_alpha"], job.model) == (16, 32.0, "/models/tiny")
            assert job.val.steps() == [2, 4, 6]
            await w.until(lambda: w.state.jobs["one"].train.last is not None)
            assert {node.state for node in w.state.nodes.values()} <= {"ready", "busy"}
            kinds = {entry.kind for entry in w.state.entries}
            assert {"job", "eval", "checkpoint", "node", "source"} <= kinds
            times = [entry.time for entry in w.state.entries if entry.kind == "eval"]
            assert all(abs(time - w.frames[0].time) < 120 for time in times)

    straw(tmp_path, test, "a", "b", auto=True)


def test_who_comes_later_sees_how_it_is_and_is_told_what_was(tmp_path: Path) -> None:
    """The state is that of the lists: an old event (the job was running) takes nothing back."""

    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("one")
            await it.until(lambda: it.job("one").state == "completed")
            async with watching(CoordinatorSource(it.state_dir)) as w:
                await w.until(lambda: w.live)
                await w.until(lambda: any(e.text.startswith("completed") for e in w.state.entries))
                assert w.state.jobs["one"].state == "completed"
                assert not [frame for frame in w.frames if isinstance(frame, f.JobState)]
                assert w.state.jobs["one"].val.steps() == [2, 4, 6]  # by history
                await w.source.ask_history("one")
                assert w.state.jobs["one"].val.steps() == [2, 4, 6]
                assert w.state.jobs["one"].train.steps() == [1, 2, 3, 4, 5, 6], "its node has forgotten it"
                files = await w.source.list_files("one")
                assert "adapter_model.safetensors" in {row.name for row in files}

    straw(tmp_path, test, "a", auto=True)


def test_a_coordinator_that_restarts_is_caught_up_with(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        source = CoordinatorSource(it.state_dir)
        async with watching(source) as w:
            await w.until(lambda: w.state.source and w.state.source.retry_in)  # there is none yet
            assert not w.state.is_live
            async with it.running():
                await source.act("retry", [])
                await w.until(lambda: w.live)
                await it.submit("one")
                await started(it, w)
            await w.until(lambda: w.said[-1] == "lost")
            assert w.state.jobs["one"].state == "running"  # shown on, as old
            assert w.state.source is not None
            assert (w.state.source.retry_in or 0) > 0
            async with it.running():
                await w.until(lambda: w.live)
                for _ in range(5):
                    it.agents["a"].advance(it.agents["a"].running("one"))
                await w.until(lambda: w.state.jobs["one"].state == "completed")

    straw(tmp_path, test, "a")


def test_jobs_are_steered_and_what_fails_says_why(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running(), watching(CoordinatorSource(it.state_dir)) as w:
            with pytest.raises(GshareError, match="not connected"):
                await w.source.act("stop", ["one"])
            await w.until(lambda: w.live)
            await it.submit("one")
            await started(it, w)
            assert await w.source.act("pause", ["one"]) == {}
            await w.until(lambda: w.state.jobs["one"].state == "paused")
            assert await w.source.act("resume", ["one"]) == {}
            assert await w.source.act("stop", ["one"]) == {}
            await w.until(lambda: w.state.jobs["one"].state == "stopped")
            failed = await w.source.act("stop", ["one"])
            assert failed == {"one": "job one has ended: stopped"}
            with pytest.raises(GshareError, match="no job named 'nobody'"):
                await w.source.act("stop", ["nobody"])
            assert await w.source.act("release", ["id"]) == {"id": "no node has it any more"}
            assert await w.source.read_log(job="one") == "log of one\n"
            assert await w.source.read_log(node="a") == "log of the agent\n"
            with pytest.raises(GshareError, match="no node named 'z'"):
                await w.source.read_log(node="z")

    straw(tmp_path, test, "a")


def test_a_coordinator_of_another_cluster_is_not_taken(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            source = CoordinatorSource(it.state_dir, cluster=tmp_path / "other.toml")
            with pytest.raises(GshareError, match=r"is of cluster\.toml, not of .*other\.toml"):
                await source.run(lambda frame: None)

    straw(tmp_path, test, "a")


def test_a_coordinator_that_hangs_is_called_stale(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        source = CoordinatorSource(it.state_dir)
        source.stale_seconds = 0.6
        async with it.running(), watching(source) as w:
            await w.until(lambda: w.live)
            await w.until(lambda: w.said[-1] == "stale")  # beats come every 3 s only
            await w.until(lambda: w.said[-1] == "live")

    straw(tmp_path, test, "a")


# --- an agent


def test_an_agent_is_watched_and_not_steered(tmp_path: Path) -> None:
    async def main() -> None:
        async with FakeAgent(tmp_path / "node7") as agent:
            link = await agent.connect(owner="o1")
            await link.ask(p.AttemptAccepted, p.StartAttempt, **start_fields("old"))
            for _ in range(6):
                agent.advance(agent.running("old"))
            await link.ask(p.AttemptAccepted, p.StartAttempt, **start_fields("one"))
            async with watching(AgentSource(agent.socket)) as w:
                await w.until(lambda: w.live)
                node = w.state.nodes["node7"]
                assert (node.state, node.info is not None) == ("ready", True)
                await w.until(lambda: any(e.text == "completed" for e in w.state.entries))
                assert w.state.jobs["old"].state == "completed"
                for _ in range(3):
                    agent.advance(agent.running("one"))
                await w.until(lambda: w.state.jobs["one"].train.last == (3, pytest.approx(2 / 3)))
                assert (w.state.jobs["one"].state, w.state.jobs["one"].val.steps()) == ("running", [2])
                await w.source.ask_history("old")
                assert w.state.jobs["old"].val.steps() == [2, 4, 6]
                assert await w.source.read_log() == "log of the agent\n"
                with pytest.raises(UsageError, match="cannot stop"):
                    await w.source.act("stop", ["one"])
                agent.hang_up()
                await w.until(lambda: w.said[-1] == "lost")
                await w.until(lambda: w.live)
            await link.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("jetson", (None, "jetson", 7433)),
        ("jetson:22", (None, "jetson", 22)),
        ("me@jetson:22", ("me", "jetson", 22)),
        ("me@jetson", ("me", "jetson", None)),
        ("[::1]:9", (None, "::1", 9)),
    ],
)
def test_addresses_of_agents(text: str, found: object) -> None:
    assert parse_address(text) == found


@pytest.mark.parametrize("text", ["", ":7433", "a:b", "a:0", "a:99999", "a b@c@d", "::1", "x/y"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="--agent"):
        parse_address(text)


# --- this machine


def test_local_trainers_ledger_and_queue(tmp_path: Path) -> None:
    config = TrainerConfig(
        model="fake", model_dir="/nonexistent", base_dtype="fp32", runner="fake_runner:FakeRunner"
    )

    def request(name: str, script: str) -> JobRequest:
        spec = AdapterSpec(
            name=name, data=script, output_dir=str(tmp_path / name), lora_alpha=32, seed=0, r=4
        )
        return JobRequest(spec=spec, train_store="/nonexistent", train_hash="0" * 64)

    async def main() -> None:
        spawned = spawn_trainer(config)
        try:
            client = await asyncio.to_thread(TrainerClient, spawned.directory, "test")
            jobs = [request("quick", "steps=4"), request("slow", "steps=100000,sleep=0.02")]
            await asyncio.to_thread(lambda: client.ask(SubmitJobs, jobs=jobs))
            await asyncio.to_thread(lambda: client.ask(Detach))
            async with watching(LocalSource()) as w:
                await w.until(lambda: w.live and len(w.state.jobs) == 2)
                (node,) = w.state.nodes.values()
                (gpu,) = node.gpus
                assert (gpu.name, gpu.total_mb, gpu.load_percent) == ("Sim 8 GB", 8192, None)
                await w.until(lambda: w.state.jobs["slow"].train.last is not None)
                assert w.state.jobs["slow"].state == "running"
                await w.until(lambda: w.state.jobs["quick"].state == "completed")
                assert await w.source.act("stop", ["slow", "nobody"]) == {
                    "nobody": "job nobody has ended with its trainer"
                }
                await w.until(lambda: w.state.jobs["slow"].state == "stopped")
                with pytest.raises(GshareError):
                    await w.source.read_log(job="nobody")
        finally:
            os.kill(spawned.process.pid, signal.SIGKILL)
            spawned.process.wait()
            spawned.release()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_holds_are_released_and_living_reservations_are_not(tmp_path: Path) -> None:
    from gshare.agent.vram.ledger import Ledger

    async def main() -> None:
        command = [sys.executable, "-m", "gshare.cli.main", "gpu", "hold", "--vram", "1", "--for", "1h"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, cwd="/", env={**os.environ, "PYTHONSAFEPATH": "1"}
        )
        identity = (await process.communicate())[0].decode().strip()
        assert process.returncode == 0
        async with watching(LocalSource()) as w:
            await w.until(lambda: w.live and len(w.state.reservations()) == 1)
            assert w.state.reservations()[0][1].id == identity
            assert await w.source.act("release", [identity, "nothing"]) == {
                "nothing": (await w.source.act("release", ["nothing"]))["nothing"]
            }
            await w.until(lambda: not w.state.reservations())
        assert Ledger().directory == Path(os.environ["GSHARE_LEDGER_DIR"])

    asyncio.run(asyncio.wait_for(main(), 60))


# --- files of runs


def line(type: str, step: int, **fields: Any) -> str:
    return json.dumps({"type": type, "step": step, **fields}) + "\n"


def step(number: int, total: int = 50) -> str:
    return line("step", number, total_steps=total, loss=1 / number, tokens=10, seconds=0.1, epoch=0.1)


def make_run(directory: Path, steps: int) -> Path:
    directory.mkdir(parents=True)
    spec = AdapterSpec(name=directory.name, data="d", output_dir=str(directory), r=4)
    record = RunRecord(model="m", base_dtype="nf4", spec=spec)
    (directory / "run.json").write_bytes(msgspec.json.encode(record))
    text = "".join(step(number) for number in range(1, steps + 1))
    (directory / "metrics.jsonl").write_text(text + line("eval", steps, val_loss=0.5, best=True))
    return directory


def test_runs_are_followed_from_their_files(tmp_path: Path) -> None:
    async def main() -> None:
        a = make_run(tmp_path / "out" / "a", 50)
        b = make_run(tmp_path / "out" / "b", 20)
        (tmp_path / "out" / "empty").mkdir()
        lock = take_lock(b / ".lock")
        assert lock is not None
        async with watching(RunSource(tmp_path / "out")) as w:
            await w.until(lambda: w.live)
            assert {name: job.state for name, job in w.state.jobs.items()} == {
                "a": "completed",
                "b": "running",
            }
            job = w.state.jobs["b"]
            assert (job.step, job.total_steps, job.best_val_loss, job.hyper["r"]) == (20, 50, 0.5, 4)
            assert job.train.steps() == list(range(1, 21))
            with open(b / "metrics.jsonl", "a") as file:
                file.write(step(21) + step(22) + line("eval", 22, val_loss=0.25, best=True) + step(23)[:-9])
            await w.until(lambda: job.best_val_loss == 0.25)
            assert (job.step, job.train.last) == (22, (22, pytest.approx(1 / 22)))  # the torn line waits
            os.close(lock)
            await w.until(lambda: job.state == "stopped")
            (b / "metrics.jsonl").write_text("".join(step(number) for number in range(1, 11)))
            await w.until(lambda: job.step == 10)
            assert "metrics.jsonl" in {row.name for row in await w.source.list_files("a")}
            make_run(tmp_path / "out" / "c", 1)
            await w.until(lambda: "c" in w.state.jobs)
        assert a.exists()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_damaged_lines_and_files_of_a_run_are_left_out(tmp_path: Path) -> None:
    """Steps that are none, whole numbers that are no float, and nesting that no parser follows."""
    deep = '{"a":' * 5000
    bad = [line("step", number, loss=1.0) for number in (-1, 2**32, 10**400)]
    bad += [line("step", 4, loss=1.0, tokens=10**400), line("eval", -7, val_loss=0.1, best=True), deep + "\n"]

    async def main() -> None:
        a = make_run(tmp_path / "out" / "a", 3)
        make_run(tmp_path / "out" / "b", 3)
        text = (a / "metrics.jsonl").read_text()
        (a / "metrics.jsonl").write_text("".join(bad) + text + "".join(bad))
        (a / "run.json").write_text(deep)
        (a / "best").mkdir()
        (a / "best" / "metadata.json").write_text(deep)
        async with watching(RunSource(tmp_path / "out")) as w:
            await w.until(lambda: w.live)
            job = w.state.jobs["a"]
            assert (job.train.steps(), job.val.steps(), job.best_step) == ([1, 2, 3], [3], 3)
            with open(a / "metrics.jsonl", "a") as file:
                file.write("".join(bad) + step(4))
            await w.until(lambda: job.step == 4)
            assert (job.train.steps(), job.best_val_loss) == ([1, 2, 3, 4], 0.5)
            assert w.state.jobs["b"].model == "m"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_pipes_and_endless_files_in_a_run_are_not_waited_for_nor_read(tmp_path: Path) -> None:
    async def main() -> None:
        out = tmp_path / "out"
        for run, name in (("a", "metrics.jsonl"), ("b", "run.json"), ("c", ".lock")):
            (make_run(out / run, 3) / name).unlink(missing_ok=True)
            os.mkfifo(out / run / name)
        endless = make_run(out / "endless", 3)
        (endless / "best").mkdir()
        for name in ("metrics.jsonl", "run.json", "best/metadata.json"):
            (endless / name).unlink(missing_ok=True)
            (endless / name).symlink_to("/dev/zero")
        make_run(out / "whole", 3)
        async with watching(RunSource(out)) as w:
            await w.until(lambda: w.live)
            known = {name for name, job in w.state.jobs.items() if job.model == "m"}
            assert (known, len(w.state.jobs)) == ({"a", "c", "whole"}, 5)
            assert w.state.jobs["endless"].train.steps() == []
            with pytest.raises(GshareError, match="is no regular file"):
                await w.source.read_log(job="endless")

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_line_without_an_end_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_source, "READ_BYTES", 1000)
    monkeypatch.setattr(run_source, "MAX_LINE_BYTES", 400)
    run = run_source._Run(make_run(tmp_path / "a", 1), "a")
    (run.directory / "metrics.jsonl").write_text("x" * 5000 + "\n" + step(7))
    while not run.step:
        assert len(run.rest) <= 400
        run.read()
    assert run.step == 7


def test_the_log_of_a_run_is_for_people(tmp_path: Path) -> None:
    async def main() -> None:
        run = make_run(tmp_path / "a", 2)
        with open(run / "metrics.jsonl", "a") as file:
            file.write(line("step", 3, loss="nan", learning_rate=2e-4, grad_norm=1.5, adapters_in_pass=4))
            file.write("torn {")
        async with watching(RunSource(run)) as w:
            await w.until(lambda: w.live)
            assert (await w.source.read_log(job="a")).splitlines() == [
                "step 1 of 50  loss 1.0000  0.1 s",
                "step 2 of 50  loss 0.5000  0.1 s",
                "step 2  val loss 0.5000  (best)",
                "step 3  loss nan  grad norm 1.5  lr 0.0002  4 in the pass",
            ]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_nothing_is_written_to_a_run(tmp_path: Path) -> None:
    async def main() -> None:
        run = make_run(tmp_path / "a", 3)
        before = sorted(path.name for path in run.iterdir())
        async with watching(RunSource(run)) as w:
            await w.until(lambda: w.live)
            assert list(w.state.jobs) == ["a"]
        assert sorted(path.name for path in run.iterdir()) == before

    asyncio.run(asyncio.wait_for(main(), 60))


# --- which source


def test_the_nearest_thing_that_runs_is_found(tmp_path: Path) -> None:
    """No coordinator and no agent: this machine. An agent: that. A coordinator beside it: the coordinator."""
    agents = Path(os.environ["XDG_STATE_HOME"]) / "gshare" / "agent"
    home = Path(os.environ["XDG_STATE_HOME"]) / "gshare" / "coordinator"

    async def test(it: Straw) -> None:
        assert find_source().kind == "machine"
        async with FakeAgent(agents):
            assert find_source().kind == "agent"
            async with it.running():
                assert find_source(coordinator_state=it.state_dir).kind == "coordinator"
        assert not home.exists()
        with pytest.raises(GshareError, match="no coordinator runs"):
            find_source(coordinator_state=home)

    straw(tmp_path, test, "a")


def test_two_sources_are_not_shown_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--agent and --run: name one of them"):
        find_source(agent="a", run=tmp_path)
    with pytest.raises(UsageError, match="is no directory"):
        find_source(run=tmp_path / "nothing")


def test_a_list_is_told_before_the_events_that_were_sent_after_it(tmp_path: Path) -> None:
    """Reply and event in one segment: who awaits the reply would put the old list over the event."""

    async def main() -> None:
        order: list[str] = []
        awaited: list[str] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(65536)
            writer.write(encode(welcome))
            await reader.read(65536)
            event = ClusterEventFrame(journal_id="j", seq=1, event=JobEnded(job="a", state="stopped"))
            writer.write(encode(JobRows(reply_to=1, jobs=[])) + encode(event))
            await reader.read()

        welcome = ApiWelcome(protocol=1, gshare="0", owner="o", pid=1, cluster="c", journal_id="j")
        server = await asyncio.start_unix_server(serve, path=str(tmp_path / "s"))
        hello = ApiHello(protocol=1, gshare="0", client="test")

        def on_event(message: Any) -> None:
            order.append("event")
            awaited.append("event")

        link, _ = await SocketLink.open(
            tmp_path / "s", hello, ApiWelcome, FromCoordinator, ClusterEventFrame, on_event, what="it"
        )
        await link.ask(JobRows, ListClusterJobs, then=lambda rows: order.append("list"))
        awaited.append("list")
        assert order == ["list", "event"]
        assert awaited == ["event", "list"]  # what `then` is for
        await link.close()
        server.close()

    asyncio.run(asyncio.wait_for(main(), 20))
