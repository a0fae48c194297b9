"""A coordinator and agents of straw in one asyncio loop, for tests of the service without processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fake_agent import FakeAgent, sha
from gshare.agent.errors import GshareError
from gshare.agent.jobs.spec import AdapterSpec
from gshare.coordinator.api_client import CoordinatorClient
from gshare.coordinator.api_protocol import JobSubmission, LocalFile, ModelSource, SubmitToCluster
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.config import ClusterConfig, NodeConfig
from gshare.coordinator.link import StreamPair
from gshare.coordinator.service import Coordinator
from gshare.coordinator.store import Store
from gshare.coordinator.transfers import Limits

R = TypeVar("R")
#: Of the machine, so that a test does not wait for minutes.
LIMITS = Limits(lost_after_s=0.3, fault_delay_s=0.05, publish_delay_s=0.1, settle_s=0.5, check_best_s=0.2)


def submission(tmp_path: Path, names: Sequence[str], identity: str = "s1") -> dict[str, Any]:
    """Fields of `SubmitToCluster` for jobs of these names, with real files."""
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)

    def file(name: str, text: bytes) -> LocalFile:
        path = folder / name
        if not path.exists():  # a second submission while the first is read must not find it cut short
            path.write_bytes(text)
        return LocalFile(name=name, path=str(folder / name), sha256=sha(text), size=len(text))

    jobs = tuple(
        JobSubmission(
            spec=AdapterSpec(
                name=name, data="ignored", output_dir=str(tmp_path / "out" / name), lora_alpha=32.0, seed=0
            ),
            data=file(f"{name}.jsonl", b'{"text": "%s"}\n' % name.encode()),
            base_mb=0,
            adapter_mb=10,
        )
        for name in names
    )
    model = ModelSource(name="/models/tiny", files=(file("config.json", b"{}"),), parameters=1000)
    return {"submission": identity, "model": model, "base_dtype": "fp32", "jobs": jobs}


class Straw:
    """The running coordinator, its agents, and what it has said."""

    def __init__(self, tmp_path: Path, agents: dict[str, FakeAgent]) -> None:
        self.tmp_path = tmp_path
        self.agents = agents
        self.said: list[str] = []
        self.coordinator: Coordinator
        self.task: asyncio.Task[None]
        self.unreachable: set[str] = set()

    @property
    def state_dir(self) -> Path:
        return self.tmp_path / "home"

    def job(self, name: str):
        return self.coordinator.cluster.jobs[name]

    async def connect(self, node: NodeConfig, say: Callable[[str], None]) -> StreamPair:
        if node.name in self.unreachable:
            raise GshareError(f"node {node.name}: no route to it")
        try:
            return await self.agents[node.name].stream()
        except OSError as error:
            raise GshareError(f"node {node.name}: no agent answers ({error.strerror})") from None

    async def until(self, condition: Callable[[], bool], seconds: float = 15.0) -> None:
        async def wait() -> None:
            while not condition():
                assert not self.task.done(), f"the coordinator has ended: {self.task}"
                await asyncio.sleep(0.01)

        try:
            await asyncio.wait_for(wait(), seconds)
        except asyncio.TimeoutError:
            jobs = [msgspec.structs.replace(j, facts=None) for j in self.coordinator.cluster.jobs.values()]  # type: ignore[arg-type]
            raise AssertionError(f"{jobs}\n{self.said}") from None

    async def ask(self, reply: type[R], make: type[msgspec.Struct], **fields: Any) -> R:
        """Over the real socket, by the blocking client in a thread."""

        def call() -> R:
            with CoordinatorClient(self.state_dir, "test") as client:
                return client.ask(reply, make, **fields)  # type: ignore[type-var]

        return await asyncio.to_thread(call)

    async def submit(self, *names: str, identity: str = "s1") -> None:
        from gshare.coordinator.api_protocol import Submitted

        fields = submission(self.tmp_path, names, identity)
        reply = await self.ask(Submitted, SubmitToCluster, **fields)
        assert reply.jobs == list(names)

    @contextlib.asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[Coordinator]:
        """A coordinator on the state directory; ends it as kill -9 would when the block ends."""
        nodes = tuple(NodeConfig(name=name, transport="local", gpus=()) for name in self.agents)
        store = Store.open(self.state_dir)
        limits = options.pop("limits", LIMITS)
        coordinator = self.coordinator = Coordinator(
            store,
            options.pop("config", ClusterConfig(nodes=nodes, source="cluster.toml")),
            self.connect,
            lambda level, text: self.said.append(f"{level}: {text}"),
            cluster=Cluster(store.jobs(), limits),
            tick_seconds=0.05,
            heartbeat_seconds=0.1,
            **options,
        )
        # What a life has in threads dies with it, as the threads of a killed process do.
        threads = ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(threads)
        stop = asyncio.Event()
        task = self.task = asyncio.create_task(coordinator.run(stop))
        try:
            await self.until((self.state_dir / "socket").exists)
            yield coordinator
        finally:
            stop.set()
            try:
                await task
            finally:
                threads.shutdown()
                store.close()


@contextlib.asynccontextmanager
async def agents_of_straw(tmp_path: Path, *names: str, **fields: Any) -> AsyncIterator[Straw]:
    async with contextlib.AsyncExitStack() as stack:
        agents = {
            name: await stack.enter_async_context(FakeAgent(tmp_path / "agents" / name, **fields))
            for name in names
        }
        yield Straw(tmp_path, agents)


def run(tmp_path: Path, test: Callable[[Straw], Awaitable[None]], *names: str, **fields: Any) -> None:
    """Runs `test` beside agents of these names, in a loop of its own; 60 s at most."""

    async def main() -> None:
        async with agents_of_straw(tmp_path, *names, **fields) as it:
            await asyncio.wait_for(test(it), 60)

    asyncio.run(main())


def is_ended(it: Straw, *names: str) -> bool:
    return all(it.job(name).state in ("completed", "stopped", "failed", "diverged") for name in names)


def adapter(tmp_path: Path, name: str) -> bytes:
    return (tmp_path / "out" / name / "adapter_model.safetensors").read_bytes()


async def started(it: Straw, name: str, steps: int = 0) -> Any:
    """The attempt of a job, after so many steps."""

    def there() -> bool:
        job = it.job(name)
        return (
            any(key[1:] == (name, job.attempt) for key in it.agents[job.node].attempts) if job.node else False
        )

    await it.until(there)
    agent = it.agents[it.job(name).node]
    attempt = agent.running(name)
    for _ in range(steps):
        agent.advance(attempt)
    return agent, attempt
