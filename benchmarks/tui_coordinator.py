"""A coordinator that has no cluster: it speaks the API of the real one and makes events at a given rate.

    python benchmarks/tui_coordinator.py STATE_DIR [--jobs 1000] [--nodes 64] [--rate 10]

Each job makes `--rate` events a second, a step each; every 50th is an evaluation as well. Each message is
written to the socket by itself, as the real one writes it. Once a second the best job is paused or goes on,
and a line `<monotonic s> <state>` on stdout says when that was sent. `hour` on stdin makes time run 60 times
as fast: steps are dropped for who reads slowly, as the real one drops them, evaluations are not.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.jobs.events import Evaluated, Stepped
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.node.protocol import GpuInfo, NodeInfo, ReservationInfo
from gshare.agent.service.server import socket_address
from gshare.agent.service.wire import FrameReader, convert, encode
from gshare.coordinator import api_protocol as p

EVAL_STEPS = 50
TOTAL_STEPS = 500_000
TICK_SECONDS = 0.01
#: The real one keeps 1,024 samples a client; what waits beyond is dropped.
HIGH_WATER = 1024 * 300
FAST = 60

_encode = msgspec.msgpack.Encoder().encode  # the bytes of `wire.encode` at a tenth of its cost


class Cluster:
    def __init__(self, jobs: int, nodes: int, rate: float) -> None:
        self.names = [f"adapter-{number:04d}" for number in range(jobs)]
        self.nodes = [f"node-{number:02d}" for number in range(nodes)]
        self.rate = rate
        self.steps = dict.fromkeys(self.names, 0)
        self.state = dict.fromkeys(self.names, "running")
        self.seq = 0
        self.fast = False
        self.clients: set[asyncio.StreamWriter] = set()
        self.sent = 0
        self.dropped = 0

    def loss(self, name: str) -> float:
        """Falls with the steps; the first job is the best of all at any time."""
        rank = 0 if name == self.names[0] else 1 + int(name[-4:]) % 97
        return 1.0 + 0.01 * rank + math.exp(-self.steps[name] / 5000)

    def node_of(self, name: str) -> str:
        return self.nodes[int(name[-4:]) % len(self.nodes)]

    # --- events

    def send(self, event: Any, *, durable: bool = False) -> None:
        if durable:
            self.seq += 1
        frame = _encode(
            p.ClusterEventFrame(
                journal_id="load", seq=self.seq if durable else 0, event=event, time=time.time()
            )
        )
        for writer in self.clients:
            if not durable and writer.transport.get_write_buffer_size() > HIGH_WATER:
                self.dropped += 1
                continue
            writer.write(frame)
            self.sent += 1

    def step(self, name: str) -> None:
        self.steps[name] += 1
        step, node = self.steps[name], self.node_of(name)
        stepped = Stepped(
            job=name,
            step=step,
            total_steps=TOTAL_STEPS,
            epoch=step / 1000,
            loss=self.loss(name) * 0.9,
            grad_norm=0.5,
            learning_rate=2e-4,
            tokens=900,
            label_tokens=400,
            seconds=1 / self.rate,
            adapters_in_pass=16,
        )
        self.send(p.JobEvent(node=node, attempt=1, event=stepped))
        if step % EVAL_STEPS == 0:
            seen = Evaluated(job=name, step=step, val_loss=self.loss(name), label_tokens=4000, best=True)
            self.send(p.JobEvent(node=node, attempt=1, event=seen), durable=True)

    def toggle(self) -> None:
        name = self.names[0]
        state = self.state[name] = "paused" if self.state[name] == "running" else "running"
        moved = p.JobMoved(
            job=name,
            state=state,
            node=self.node_of(name),
            attempt=1,
            step=self.steps[name],
            total_steps=TOTAL_STEPS,
        )
        print(f"{time.monotonic():.6f} {state}", flush=True)
        self.send(moved, durable=True)

    async def run(self) -> None:
        """Steps in turn, so many as are due; a late loop catches up by at most a second."""
        began = time.monotonic()
        done, turn, toggled = 0, 0, began
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            if self.fast:
                await self._minute_in_a_second()
                began, done = time.monotonic(), 0
                continue
            if self.clients and now - toggled >= 1.0:
                toggled = now
                self.toggle()
            due = int((now - began) * self.rate * len(self.names))
            if due - done > self.rate * len(self.names):
                began, done = now, 0
                continue
            for _ in range(due - done):
                name = self.names[turn % len(self.names)]
                turn += 1
                if self.state[name] == "running":
                    self.step(name)
            done = due

    async def _minute_in_a_second(self) -> None:
        """A minute of all jobs' evaluations, and their steps as far as they are read."""
        began = time.monotonic()
        for part in range(0, len(self.names), 10):
            for name in self.names[part : part + 10]:
                for _ in range(int(60 * self.rate / EVAL_STEPS)):
                    self.steps[name] += EVAL_STEPS - 1 - self.steps[name] % EVAL_STEPS
                    self.step(name)
            for writer in list(self.clients):
                await writer.drain()
            await asyncio.sleep(0)
        await asyncio.sleep(max(0.0, began + 60 / FAST - time.monotonic()))

    # --- requests

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        try:
            while data := await reader.read(65536):
                for message in frames.feed(data):
                    request = convert(message, p.FromApiClient)
                    writer.write(encode(self.answer(request)))
                    if isinstance(request, p.FollowCluster):
                        self.clients.add(writer)
        finally:
            self.clients.discard(writer)
            writer.close()

    def answer(self, request: Any) -> msgspec.Struct:
        if isinstance(request, p.ApiHello):
            return p.ApiWelcome(
                protocol=p.API_PROTOCOL_VERSION,
                gshare=version("gshare"),
                owner="load",
                pid=0,
                cluster="/load.toml",
                journal_id="load",
            )
        reply = request.id
        if isinstance(request, p.FollowCluster):
            return p.FollowingCluster(
                reply_to=reply, journal_id="load", next_seq=self.seq + 1, gap=False, last_seq=self.seq
            )
        if isinstance(request, p.ListClusterJobs):
            return p.JobRows(reply_to=reply, jobs=[self.row(name, request.orders) for name in self.names])
        if isinstance(request, p.ListNodes):
            return p.NodeRows(reply_to=reply, nodes=[self.node(name) for name in self.nodes])
        if isinstance(request, p.ReadEvaluations):
            return p.JobEvaluations(reply_to=reply, evaluations={})
        if isinstance(request, p.ReadJobSamples):
            return p.JobSamples(reply_to=reply, lines=[])
        if isinstance(request, p.ReadJobLog | p.ReadNodeLog):
            return p.JobLog(reply_to=reply, node="", text="no log\n")
        return p.JobsDone(reply_to=reply)

    def row(self, name: str, orders: bool) -> p.JobRow:
        spec = AdapterSpec(name=name, data="/d.jsonl", output_dir=f"/out/{name}", r=16, seed=0)
        loss = self.loss(name)
        return p.JobRow(
            job=name,
            state=self.state[name],
            node=self.node_of(name),
            attempt=1,
            step=self.steps[name],
            total_steps=TOTAL_STEPS,
            loss=loss * 0.9,
            val_loss=loss,
            best_val_loss=loss,
            best_step=self.steps[name],
            output_dir=spec.output_dir,
            model="/models/base" if orders else "",
            base_dtype="nf4" if orders else "",
            spec=spec if orders else None,
        )

    def node(self, name: str) -> p.NodeRow:
        number = int(name[-2:])
        gpu = GpuInfo(
            uuid=f"GPU-{number:08d}",
            name="Simulated 24 GB",
            memory_type="discrete",
            total_mb=24576,
            used_mb=12000 + number,
            reserved_mb=11000,
            peak_mb=9000,
            outside_mb=500,
            free_mb=9000,
            load_percent=(number * 7 + int(time.time()) // 3) % 100,
            temperature_c=60 + number % 20,
            power_w=250.0,
        )
        rows = [
            ReservationInfo(
                id=f"{number:04d}-{index}",
                gpu_uuid=gpu.uuid,
                budget_mb=5000,
                peak_mb=4500,
                task="gshare trainer",
                pid=1000 + index,
                user="user",
                created=time.time() - 600,
                state="held",
            )
            for index in range(2)
        ]
        info = NodeInfo(
            reply_to=0,
            hostname=name,
            time=time.time(),
            uptime_s=1e5,
            machine="x86_64",
            python="3.12",
            torch="2.13",
            cpu_cores=16,
            cpu_percent=50.0,
            ram_mb=65536,
            ram_free_mb=32000,
            disk_free_mb=500_000,
            gpus=[gpu],
            reservations=rows,
        )
        return p.NodeRow(node=name, transport="ssh", host=name, state="busy", seen_s=1.0, jobs=16, info=info)


async def main(arguments: argparse.Namespace) -> None:
    cluster = Cluster(arguments.jobs, arguments.nodes, arguments.rate)
    with socket_address(Path(arguments.state_dir) / "socket") as address:
        server = await asyncio.start_unix_server(cluster.serve, path=address)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    print("ready", flush=True)
    running = asyncio.create_task(cluster.run())
    before = time.monotonic(), 0
    while line := await commands.readline():
        word = line.decode().strip()
        if word in ("hour", "normal"):
            cluster.fast = word == "hour"
        now = time.monotonic()
        rate = (cluster.sent - before[1]) / (now - before[0])
        before = now, cluster.sent
        print(f"sent {rate:.0f} dropped {cluster.dropped} seq {cluster.seq}", flush=True)
    running.cancel()
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("state_dir")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--rate", type=float, default=10.0)
    asyncio.run(main(parser.parse_args()))
