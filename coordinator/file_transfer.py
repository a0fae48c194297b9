"""Files between here and a node, by content: resumed where they were cut, checked by hash at the end.

Both ways are in chunks of `CHUNK_BYTES` with a few under way, so that a line with a long round trip is filled
and events still pass in between. Nothing is sent that the other side has already.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.jobs.names import shorten
from gshare.agent.node.protocol import (
    CHUNK_BYTES,
    BlobRef,
    BlobsHeld,
    BundleFiles,
    BundleKind,
    Chunk,
    HoldBlobs,
    NodeDone,
    PinBundle,
    PutChunk,
    ReadChunk,
    Received,
    ReleaseBundle,
)
from gshare.coordinator.blobs import SHA256, BlobStore, Damaged, hash_file, path_fault
from gshare.coordinator.link import AgentLink, LinkGone, LinkLate, LinkRefused

#: Chunks under way at once: 2 MiB fill a line of 100 Mbit/s with a round trip of 160 ms.
WINDOW = 8
#: One chunk, on a line that is nearly dead.
CHUNK_SECONDS = 120.0
#: Pinning copies or links the files first.
PIN_SECONDS = 120.0
#: Bytes of a bundle, files in it: far beyond any adapter, and a bound for what a node can make us fetch.
MAX_BUNDLE_BYTES = 256 << 30
MAX_BUNDLE_FILES = 1000

R = TypeVar("R", bound=msgspec.Struct)
#: bytes done, bytes in all
Progress = Callable[[int, int], None]


class SourceChanged(GshareError):
    """A file is no longer what it was when its job was submitted."""


@dataclass(frozen=True)
class Source:
    """A file here that a node shall have."""

    path: Path
    sha256: str
    size: int


@dataclass(frozen=True)
class Bundle:
    """What was pulled: `files` are whole in the blob store."""

    files: tuple[BlobRef, ...]
    step: int
    val_loss: float | None


def _no_progress(done: int, total: int) -> None:
    return None


async def push_files(link: AgentLink, sources: Sequence[Source], progress: Progress = _no_progress) -> None:
    """Until the node has every source.

    Raises `SourceChanged`, `LinkRefused` (disk full there: `retry`), `LinkLate`, `LinkGone`.
    """
    wanted = {source.sha256: source for source in sources}
    if not wanted:
        return
    held = await link.ask(BlobsHeld, HoldBlobs, blobs=sorted(wanted))
    total = sum(source.size for source in wanted.values())
    done = sum(wanted[sha].size for sha in held.complete if sha in wanted)
    for sha256, source in wanted.items():
        if sha256 in held.complete:
            continue
        before = done

        def report(sent: int, before: int = before) -> None:
            progress(before + sent, total)

        await _push(link, source, held.bytes_held.get(sha256, 0), report)
        done += source.size
        progress(done, total)


async def _push(link: AgentLink, source: Source, offset: int, report: Callable[[int], None]) -> None:
    """One file from `offset` on; from the start, once, when what the node had before does not fit."""
    for last_try in (False, True):
        try:
            if await _push_from(link, source, offset, report):
                return
            raise LinkGone("the agent has every byte of a file and does not say that it is whole")
        except LinkRefused as error:
            if error.retry:
                raise
            await _check_source(source)
            if last_try:
                raise
            offset = 0
    raise AssertionError("unreachable")


async def _push_from(link: AgentLink, source: Source, offset: int, report: Callable[[int], None]) -> bool:
    """Sends the chunks; True when the node says that the file is whole."""
    offset = offset if 0 <= offset < source.size else 0
    complete = False
    under_way: deque[tuple[asyncio.Future[msgspec.Struct], int]] = deque()

    async def take() -> bool:
        future, end = under_way.popleft()
        received = await _chunk_reply(link, future, Received)
        report(end)
        return received.complete

    try:
        with _opened(source) as file:
            file.seek(offset)
            while offset < source.size or (source.size == 0 and not complete and not under_way):
                data = await asyncio.to_thread(file.read, min(CHUNK_BYTES, source.size - offset))
                if len(data) < min(CHUNK_BYTES, source.size - offset):
                    raise SourceChanged(f"{source.path} has become shorter since its job was submitted")
                future = link.send(
                    PutChunk, sha256=source.sha256, offset=offset, total=source.size, data=data
                )
                offset += len(data)
                under_way.append((future, offset))
                await link.drain()
                if len(under_way) >= WINDOW:
                    complete = await take()
            while under_way:
                complete = await take()
    finally:
        _forget(future for future, _ in under_way)
    return complete


def _opened(source: Source) -> BinaryIO:
    try:
        return open(source.path, "rb")
    except OSError as error:
        raise SourceChanged(
            f"{source.path}: {error.strerror}; it was there when its job was submitted"
        ) from None


async def _check_source(source: Source) -> None:
    """`SourceChanged` when the file here is not what it was: then the node was right to refuse it."""
    try:
        same = await asyncio.to_thread(hash_file, source.path) == source.sha256
    except OSError as error:
        raise SourceChanged(f"{source.path}: {error.strerror}") from None
    if not same:
        raise SourceChanged(f"{source.path} has changed since its job was submitted; submit it again")


async def pull_bundle(
    link: AgentLink,
    job: str,
    attempt: int,
    kind: BundleKind,
    blobs: BlobStore,
    progress: Progress = _no_progress,
) -> Bundle:
    """The files of an attempt, whole in `blobs`.

    Raises `DiskFull` (at home), `Damaged` (what came is not what was promised; the part is dropped),
    `LinkRefused`, `LinkGone`. After any of them a second call goes on where this one was.
    """
    pinned = await link.ask(BundleFiles, PinBundle, timeout=PIN_SECONDS, job=job, attempt=attempt, kind=kind)
    check_bundle(pinned.files)
    try:
        missing = {ref.sha256: ref for ref in pinned.files if not blobs.has(ref)}
        blobs.make_room(sum(ref.size - blobs.partial(ref) for ref in missing.values()))
        total = sum(ref.size for ref in pinned.files)
        done = total - sum(ref.size for ref in missing.values())
        for ref in missing.values():
            async with blobs.lock(ref.sha256):
                if not blobs.has(ref):  # another node may have brought it meanwhile
                    await _pull(link, pinned.bundle, ref, blobs)
            done += ref.size
            progress(done, total)
    finally:
        if not link.is_gone:
            await _release(link, pinned.bundle)
    return Bundle(tuple(pinned.files), pinned.step, pinned.val_loss)


async def _pull(link: AgentLink, bundle: str, ref: BlobRef, blobs: BlobStore) -> None:
    asked = written = blobs.partial(ref)
    under_way: deque[tuple[asyncio.Future[msgspec.Struct], int]] = deque()
    try:
        while written < ref.size:
            while asked < ref.size and len(under_way) < WINDOW:
                length = min(CHUNK_BYTES, ref.size - asked)
                future = link.send(ReadChunk, bundle=bundle, name=ref.name, offset=asked, length=length)
                under_way.append((future, length))
                asked += length
            future, length = under_way.popleft()
            chunk = await _chunk_reply(link, future, Chunk)
            if len(chunk.data) != length:
                raise Damaged(f"{shorten(ref.name)}: asked for {length} bytes, {len(chunk.data)} came")
            await asyncio.to_thread(blobs.append, ref, written, chunk.data)
            written += length
    finally:
        _forget(future for future, _ in under_way)
    await asyncio.to_thread(blobs.finish, ref)


async def _release(link: AgentLink, bundle: str) -> None:
    # Otherwise it is released by itself after an hour.
    with contextlib.suppress(LinkRefused, LinkLate, LinkGone):
        await link.ask(NodeDone, ReleaseBundle, bundle=bundle)


async def _chunk_reply(link: AgentLink, future: asyncio.Future[msgspec.Struct], kind: type[R]) -> R:
    try:
        return link.checked(await asyncio.wait_for(future, CHUNK_SECONDS), kind)
    except asyncio.TimeoutError:
        raise LinkLate(f"no chunk of a file came within {CHUNK_SECONDS:.0f} s") from None


def check_bundle(files: Sequence[BlobRef]) -> None:
    """`Damaged` for what no honest agent offers: paths that lead out, endless sizes, two of one name."""
    if len(files) > MAX_BUNDLE_FILES:
        raise Damaged(f"the node offers {len(files)} files; at most {MAX_BUNDLE_FILES} are taken")
    for ref in files:
        fault = path_fault(ref.name)
        if fault is not None:
            raise Damaged(f"the node offers a file {shorten(ref.name)}, which {fault}")
        if not SHA256.match(ref.sha256) or ref.size < 0:
            raise Damaged(f"the node offers {shorten(ref.name)} without a right hash and size")
    if sum(ref.size for ref in files) > MAX_BUNDLE_BYTES:
        raise Damaged(f"the node offers more than {MAX_BUNDLE_BYTES >> 30} GiB of one job")
    if len({ref.name for ref in files}) < len(files):
        raise Damaged("the node offers two files of one name")


def _forget(futures: Iterable[asyncio.Future[msgspec.Struct]]) -> None:
    for future in futures:
        future.cancel()
