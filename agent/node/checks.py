"""What comes over the wire, before it becomes a path or a process: names, numbers, hashes, references.

Every check raises `UsageError` with one line that says which field is wrong; nothing is made before.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import msgspec
from gshare.agent.errors import UsageError
from gshare.agent.jobs.early_exit import EarlyExit, setting_faults
from gshare.agent.jobs.faults import Faults
from gshare.agent.jobs.names import check_name, name_fault, shorten
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.jobs.spec_rules import MAX_ROWS_OF_STEP, adapter_value
from gshare.agent.node.protocol import BlobRef, StartAttempt

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
#: 16 TiB: more than any disk's file, and far from where sums overflow what JSON readers take.
MAX_BLOB_BYTES = 1 << 44
MAX_FILES = 4096  # of one model or checkpoint
MAX_PARTS = 4
MAX_PART_BYTES = 200  # a file name has 255; temporary names add some
MAX_ATTEMPT = 1_000_000_000
MAX_STEPS = 10**12  # of a job, as far as numbers go
MAX_TEXT = 4096
#: Keys of a spec that the agent sets itself.
_OURS = frozenset({"name", "data", "val_data", "output_dir"})
#: Of a job's name inside its trainer, where names have at most 64 characters and the owner's tag takes 9.
_NAME_KEPT = 55


def check_owner(owner: str) -> str:
    """The id of a coordinator's store."""
    fault = name_fault(owner)
    if fault is not None:
        raise UsageError(f"owner: {fault}")
    return owner


def owner_tag(owner: str) -> str:
    """Eight hex digits for the owner, in names of directories and of trainer clients."""
    return hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def local_name(owner: str, job: str) -> str:
    """A job's name inside a trainer: two owners, or a person on the node, may have jobs of one name."""
    if len(job) > _NAME_KEPT:
        job = f"{job[: _NAME_KEPT - 9]}-{hashlib.sha256(job.encode()).hexdigest()[:8]}"
    return f"{owner_tag(owner)}-{job}"


def check_sha256(text: str) -> str:
    if not _SHA256.match(text):
        raise UsageError(f"sha256: {shorten(text)} is no SHA-256 in lower-case hex")
    return text


def check_size(size: int, *, what: str) -> int:
    if not 0 <= size <= MAX_BLOB_BYTES:
        raise UsageError(f"{what}: {shorten(size)} bytes; from 0 to {MAX_BLOB_BYTES} are possible")
    return size


def check_file_name(name: str) -> str:
    """A relative path of a few printable parts, none of which begins with a dot or a dash."""
    shown = shorten(name)
    parts = name.split("/")
    if len(parts) > MAX_PARTS:
        raise UsageError(f"file {shown}: at most {MAX_PARTS} parts are possible")
    for part in parts:
        if not part or part[0] in ".-" or "\\" in part or not part.isprintable():
            raise UsageError(
                f"file {shown}: must be a relative path of printable names that do not begin with '.' or '-'"
            )
        if len(part.encode("utf-8", "surrogatepass")) > MAX_PART_BYTES:
            raise UsageError(f"file {shown}: a name of more than {MAX_PART_BYTES} bytes")
    return name


def check_refs(refs: Iterable[BlobRef], *, what: str) -> int:
    """Each reference, and that no two want the same path. The sum of their sizes."""
    refs = list(refs)
    if len(refs) > MAX_FILES:
        raise UsageError(f"{what}: {len(refs)} files; at most {MAX_FILES} are possible")
    for ref in refs:
        check_sha256(ref.sha256)
        check_file_name(ref.name)
        check_size(ref.size, what=f"{what}: {shorten(ref.name)}")
    names = {ref.name for ref in refs}
    if len(names) != len(refs):
        raise UsageError(f"{what}: two files of the same name")
    folders = {name[: at.start()] for name in names for at in re.finditer("/", name)}
    clash = names & folders
    if clash:
        raise UsageError(f"{what}: {shorten(min(clash))} is a file and a folder")
    return sum(ref.size for ref in refs)


def check_start(request: StartAttempt) -> int:
    """All of it that can be told without looking at the node. Bytes that its files take."""
    check_name(request.job, what="job")
    check_attempt(request.attempt)
    faults = Faults()
    check_spec(request.spec, f"job {request.job}", faults)
    faults.raise_if_any()
    if len(request.data.name.split("/")) != 1:
        raise UsageError(f"data: {shorten(request.data.name)}: a plain file name is needed")
    total = check_refs([request.data], what="data")
    if request.val_data is not None:
        if len(request.val_data.name.split("/")) != 1:
            raise UsageError(f"val_data: {shorten(request.val_data.name)}: a plain file name is needed")
        total += check_refs([request.val_data], what="val_data")
    total += check_refs(request.model.files, what="model")
    total += check_refs(request.checkpoint, what="checkpoint")
    for what, text in (("model", request.model.name), ("model path", request.model.path)):
        if len(text) > MAX_TEXT or "\0" in text:
            raise UsageError(f"{what}: {shorten(text)} cannot be a model's name")
    if bool(request.model.path) == bool(request.model.files):
        raise UsageError("model: needs a path on the node or files, one of the two")
    if not request.gpu.isprintable() or len(request.gpu) > 100:
        raise UsageError(f"gpu: {shorten(request.gpu)} is no UUID of a GPU")
    if request.budget_mb is not None and not 1 <= request.budget_mb < 1 << 31:
        raise UsageError(f"budget_mb: {shorten(request.budget_mb)} must be from 1 to {(1 << 31) - 1} MiB")
    check_exits(request.early_exit, request.pause_at, f"job {request.job}", faults)
    faults.raise_if_any()
    if not 0 <= request.timeout_s < float("inf"):
        raise UsageError(f"timeout_s: {request.timeout_s} must be seconds, 0 or more")
    if request.max_tokens_per_pass < 1 or request.max_adapters_per_pass < 0:
        raise UsageError("max_tokens_per_pass must be at least 1, max_adapters_per_pass at least 0")
    return total


def check_spec(spec: AdapterSpec, where: str, faults: Faults) -> None:
    """The rules of the spec's file, but for paths and name: whoever uses those checks them."""
    for key, value in msgspec.to_builtins(spec).items():
        if key not in _OURS and (fault := adapter_value(key, value)[1]) is not None:
            faults.add(f"{where}: {key}", fault)
    rows = spec.per_device_train_batch_size * spec.gradient_accumulation_steps
    if rows > MAX_ROWS_OF_STEP:
        faults.add(where, f"{rows} rows a step; at most {MAX_ROWS_OF_STEP} are allowed")


def check_exits(early_exit: EarlyExit | None, pause_at: int, where: str, faults: Faults) -> None:
    """The rules of a sweep's table [early_exit], and a step that a job can have."""
    if early_exit is not None:
        for key, must in setting_faults(early_exit):
            faults.add(f"{where}: early_exit, {key}", f"must {must}")
    if not 0 <= pause_at <= MAX_STEPS:
        faults.add(f"{where}: pause_at", f"must be from 0 to {MAX_STEPS}, not {shorten(pause_at)}")


def check_attempt(attempt: int) -> int:
    if not 1 <= attempt <= MAX_ATTEMPT:
        raise UsageError(f"attempt: {shorten(attempt)} must be from 1 to {MAX_ATTEMPT}")
    return attempt
