"""How much memory a run will take, by part, before anything is loaded: an analytic estimate.

Where the base was measured on this card, `memory_choice.py` takes that instead.

    V vocabulary, H hidden, I intermediate, L layers, Hq/Hkv query/key heads, D head size
    T tokens of the largest pass, R its longest row, r rank

The base is held once whatever the number of adapters; of the activations only the largest pass counts,
since passes follow one another. Not in it: the process itself (interpreter, torch, CUDA context: measured
by who admits it) and the allocator's fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from gshare.agent.jobs.spec import LINEARS, AdapterSpec, BaseDtype, RunSpec
from gshare.agent.vram.budget import FRAGMENTATION
from gshare.kernels.logit_chunks import most_rows

Device = Literal["cpu", "cuda"]
#: The part that a run is only slower without.
GRAPHS = "graphs"

#: NF4 with double quantisation (QLoRA, arXiv:2305.14314, section 3): half a byte a weight; a byte for the
#: absmax of each block of 64; 4 bytes for the scale of each 256 of those.
NF4_BLOCK, NF4_SCALE_BLOCK = 64, 256
#: Rows of logits that exist at once on the CPU (kernels/cross_entropy.py), each also as log-probabilities.
LOGIT_ROWS = 256
#: Arena slots are padded to 64 bytes a matrix: elements of fp32, and of 8-bit codes.
_ALIGN, _CODES_ALIGN = 16, 64
#: Blocks of the 8-bit optimizer and the size below which a matrix keeps fp32 moments (kernels/adamw_8bit.py).
_BLOCK_8BIT, _LEAST_8BIT = 256, 4096
#: fp32 matrices (Hq, R, R) that the attention reference's backward holds: P, dP, dS and a temporary.
_SCORE_MATRICES = 4
#: Snapshots on the host at once: CheckpointWriter's five that wait or are being written, one being taken.
SNAPSHOTS = 6

#: Above this many tokens × parameters a pass is not captured as a CUDA graph: the device is slower than the
#: host that launches. A step of 8B is 1,567 launches, 91 ms on an H200's host, and 2,000 tokens of it take
#: 115 ms.
GRAPH_LIMIT = 1.6e13
#: Up to so many parameters a step is bound by its launches whatever its size (SmolLM2 on an H200: 130 ms by
#: launch and 11 ms replayed, at 3,000 tokens): its memory is reserved with room for graphs. Larger models use
#: graphs for short passes, where the reservation has room.
LAUNCH_BOUND = 1_000_000_000


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that its memory depends on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_word_embeddings: bool
    qk_norm: bool = False

    @classmethod
    def of(cls, config: object) -> ModelShape:
        """From anything with these attributes, such as `gshare.agent.base.config.ModelConfig`."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def linear_shape(self, name: str) -> tuple[int, int]:
        """(out_features, in_features) of one of `LINEARS`."""
        h, i = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (q, h),
            "k_proj": (kv, h),
            "v_proj": (kv, h),
            "o_proj": (h, q),
            "gate_proj": (i, h),
            "up_proj": (i, h),
            "down_proj": (h, i),
        }[name]

    @property
    def linear_parameters(self) -> int:
        """Weights of all decoder linears."""
        return self.num_layers * sum(math.prod(self.linear_shape(name)) for name in LINEARS)

    @property
    def parameters(self) -> int:
        """All weights but biases, a tied head once: SmolLM2-135M 134,515,008; Llama-3-8B 8,030,261,248."""
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.linear_parameters + embeddings + (2 * self.num_layers + 1) * self.hidden_size


@dataclass(frozen=True)
class MemoryPart:
    """`name` for the table, `nbytes`, and `note`: what it holds. `host`: in RAM even on a GPU run."""

    name: str
    nbytes: int
    note: str
    host: bool = False


@dataclass(frozen=True)
class MemoryEstimate:
    """`fragmentation`: share that the allocator takes beyond these bytes. `source`: where they are from."""

    parts: tuple[MemoryPart, ...]
    device: Device
    fragmentation: float = FRAGMENTATION
    source: str = "estimate"

    @property
    def total(self) -> int:
        """Bytes on the device at the peak; on CPU everything, snapshots included."""
        return sum(part.nbytes for part in self.parts if self.device == "cpu" or not part.host)

    @property
    def needed(self) -> int:
        """Of `total`: what the run cannot do without."""
        return self.total - sum(part.nbytes for part in self.parts if part.name == GRAPHS)

    @property
    def added(self) -> int:
        """Bytes that the run adds where its base is loaded already, at most: passes of others and its own
        may be one, and what they share (a row's scores, the logits' buffer) is counted whole."""
        return self.total - self["base"] - self["unpacking"]

    @property
    def resident(self) -> int:
        """Of `added`: what stays for as long as the adapters do."""
        return self["adapters"] + self["optimizer"]

    def __getitem__(self, name: str) -> int:
        """Bytes of the part `name`."""
        return next(part.nbytes for part in self.parts if part.name == name)

    def table(self) -> str:
        """Lines for `--dry-run`: part, MiB, what it is. Above the total what is in it, below it the rest."""
        inside = [part for part in self.parts if self.device == "cpu" or not part.host]
        rows = [(part.name, part.nbytes, part.note) for part in inside]
        where = "the CPU" if self.device == "cpu" else "the GPU"
        rows.append(("total", self.total, f"peak on {where}: {self.source}"))
        rows += [(p.name, p.nbytes, f"{p.note}; in main memory") for p in self.parts if p not in inside]
        return "\n".join(f"{name:<12} {nbytes / 2**20:>10,.1f} MiB  {note}" for name, nbytes, note in rows)


def largest_pass(run: RunSpec) -> tuple[int, int]:
    """(most tokens of a pass, longest row) of a run, rows taken at `max_length`.

    A pass holds at most one micro-batch of each adapter of the round, and at most `max_tokens_per_pass`
    tokens unless a single row is longer.
    """
    longest = max((spec.max_length for spec in run.adapters), default=0)
    batches = sorted(
        (spec.per_device_train_batch_size * spec.max_length for spec in run.adapters), reverse=True
    )
    if run.schedule == "priority_val_loss":
        batches = batches[:1]
    elif run.max_adapters_per_pass and run.schedule != "synchronized":
        batches = batches[: run.max_adapters_per_pass]
    return max(longest, min(run.max_tokens_per_pass, sum(batches))), longest


def estimate_run(
    shape: ModelShape,
    adapters: Sequence[AdapterSpec],
    *,
    base_dtype: BaseDtype,
    device: Device,
    pass_tokens: int,
    longest_row: int,
    attention_matrix: bool = True,
    trunk_cache: int = 0,
    trunk_cache_host: int = 0,
) -> MemoryEstimate:
    """The peak memory of a run, by part.

    Args:
        shape: the base model.
        adapters: all adapters trained at once.
        base_dtype: how the base's linears are stored.
        device: sets the compute dtype: fp32 on the CPU and for an fp32 base, else bf16.
        pass_tokens: T, the most tokens of a pass; see `largest_pass`.
        longest_row: R, the most tokens of a row.
        attention_matrix: the attention in use forms (R, R) matrices (the reference does; a flash kernel
            does not).
        trunk_cache, trunk_cache_host: bytes that the run asks for, on the device and in main memory.
    """
    compute = compute_bytes(base_dtype, device)
    training = _activation_bytes(shape, adapters, compute, pass_tokens)
    attention = _SCORE_MATRICES * shape.num_heads * longest_row**2 * 4 if attention_matrix else 0
    evaluation = pass_tokens * _layer_columns(shape, adapters, kept=False) * compute
    parts = (
        MemoryPart("base", _base_bytes(shape, base_dtype), f"{shape.parameters:,} weights, {base_dtype}"),
        MemoryPart(
            "unpacking",
            _scratch_bytes(shape, base_dtype, compute),
            "one dense group of weights, the largest",
        ),
        MemoryPart(
            "adapters", sum(adapter_bytes(shape, a, compute) for a in adapters), "fp32 A, B and gradients"
        ),
        MemoryPart("optimizer", sum(_optimizer_bytes(shape, a) for a in adapters), "Adam's moments"),
        MemoryPart("activations", training, f"one pass of {pass_tokens:,} tokens"),
        MemoryPart("attention", attention, f"scores of one row of {longest_row:,} tokens"),
        _logits(shape, device, compute, pass_tokens),
        *_graphs(shape, adapters, device, compute, pass_tokens),
        MemoryPart("evaluation", max(0, evaluation - training), "beyond what a training pass takes"),
        MemoryPart(
            "snapshots",
            SNAPSHOTS * max((saved_bytes(shape, a, moments=True) for a in adapters), default=0),
            "checkpoints being written",
            host=True,
        ),
        *_trunk_states(shape, adapters, device, compute, pass_tokens),
        *_trunk_caches(trunk_cache, trunk_cache_host),
    )
    return MemoryEstimate(parts, device)


def is_launch_bound(parameters: int) -> bool:
    return parameters <= LAUNCH_BOUND


def graph_bytes(shape: ModelShape, adapters: Sequence[AdapterSpec], compute: int, pass_tokens: int) -> int:
    """What captured passes keep for themselves: activations and logits of the largest one. They share it."""
    tokens = min(pass_tokens, int(GRAPH_LIMIT / shape.parameters))
    logits = most_rows(tokens, shape.vocab_size, compute) * shape.vocab_size * compute if tokens else 0
    return _activation_bytes(shape, adapters, compute, tokens) + logits


def _graphs(
    shape: ModelShape, adapters: Sequence[AdapterSpec], device: Device, compute: int, pass_tokens: int
) -> tuple[MemoryPart, ...]:
    """No line on a CPU, which has none, nor for models that do without."""
    if device == "cpu" or not is_launch_bound(shape.parameters):
        return ()
    nbytes = graph_bytes(shape, adapters, compute, pass_tokens)
    return (MemoryPart(GRAPHS, nbytes, "CUDA graphs: the same again, for passes that are replayed"),)


def _trunk_states(
    shape: ModelShape, adapters: Sequence[AdapterSpec], device: Device, compute: int, pass_tokens: int
) -> tuple[MemoryPart, ...]:
    """What a pass takes over from the layers below its lowest adapted one; no line where there are none."""
    if device == "cpu" or not any(spec.lowest_layer for spec in adapters):
        return ()
    tokens = 1 << pass_tokens.bit_length()  # the engine's buffer: a power of two, and more than the pass has
    return (
        MemoryPart("trunk states", tokens * shape.hidden_size * compute, "below the lowest adapted layer"),
    )


def _trunk_caches(device_bytes: int, host_bytes: int) -> tuple[MemoryPart, ...]:
    """No line for what was not asked for."""
    parts = (
        MemoryPart("trunk cache", device_bytes, "states below the adapters, asked for"),
        MemoryPart("trunk cache", host_bytes, "the same, what has no room there", host=True),
    )
    return tuple(part for part in parts if part.nbytes)


def estimate_generation(
    shape: ModelShape,
    *,
    base_dtype: BaseDtype,
    device: Device,
    prompt_tokens: int,
    positions: int,
    adapter_bytes: int,
) -> MemoryEstimate:
    """The peak memory of answering one prompt (agent/base/generate.py), by part.

    Args:
        shape: the base model.
        base_dtype: how the base's linears are stored.
        device: sets the compute dtype, as for `estimate_run`.
        prompt_tokens: rows of the first pass; every later one has a single row.
        positions: tokens of prompt and answer, which the cache holds.
        adapter_bytes: size of the adapter's file, fp32; 0 without one.
    """
    compute = compute_bytes(base_dtype, device)
    kv = shape.num_kv_heads * shape.head_dim
    # One layer's keys are in memory twice while a token is added to them.
    cache = (2 * shape.num_layers + 1) * positions * kv * compute
    attention = _SCORE_MATRICES * shape.num_heads * max(prompt_tokens**2, positions) * 4
    parts = (
        MemoryPart("base", _base_bytes(shape, base_dtype), f"{shape.parameters:,} weights, {base_dtype}"),
        MemoryPart(
            "unpacking",
            _scratch_bytes(shape, base_dtype, compute),
            "one dense group of weights, the largest",
        ),
        MemoryPart("adapter", adapter_bytes, "A and B"),
        MemoryPart("cache", cache, f"keys and values of {positions:,} tokens"),
        MemoryPart(
            "activations",
            prompt_tokens * _layer_columns(shape, (), kept=False) * compute,
            f"one layer over a prompt of {prompt_tokens:,} tokens",
        ),
        MemoryPart("attention", attention, "scores of the prompt"),
        MemoryPart("logits", 2 * shape.vocab_size * 4, "one row"),
    )
    return MemoryEstimate(parts, device)


def compute_bytes(base_dtype: BaseDtype, device: Device) -> int:
    """Of a value that is computed with: fp32 on the CPU and for an fp32 base, else bf16."""
    return 4 if device == "cpu" or base_dtype == "fp32" else 2


def _logits(shape: ModelShape, device: Device, compute: int, pass_tokens: int) -> MemoryPart:
    """On a GPU one buffer in the compute dtype, its own gradient later; every token may have a label."""
    if device == "cpu":
        rows, nbytes = LOGIT_ROWS, 2 * LOGIT_ROWS * shape.vocab_size * 4
    else:
        rows = most_rows(pass_tokens, shape.vocab_size, compute)
        nbytes = rows * shape.vocab_size * compute
    return MemoryPart("logits", nbytes, f"{rows:,} rows at a time")


def _base_bytes(shape: ModelShape, base_dtype: BaseDtype) -> int:
    """Linears as stored; embedding and head (never quantised) in fp32 for an fp32 base, else bf16; norms
    in 4 bytes at most."""
    weights = shape.linear_parameters
    if base_dtype == "nf4":
        blocks = math.ceil(weights / NF4_BLOCK)
        linears = weights // 2 + blocks + 4 * math.ceil(blocks / NF4_SCALE_BLOCK)
    elif base_dtype == "int8":
        # One fp32 scale an output channel.
        linears = weights + 4 * shape.num_layers * sum(shape.linear_shape(name)[0] for name in LINEARS)
    else:
        linears = weights * (4 if base_dtype == "fp32" else 2)
    embeddings = (1 if shape.tie_word_embeddings else 2) * shape.vocab_size * shape.hidden_size
    norms = (2 * shape.num_layers + 1) * shape.hidden_size
    return linears + embeddings * (4 if base_dtype == "fp32" else 2) + 4 * norms


#: Linears that are one product, as `kernels.layout.GROUPS` has them (torch is not imported here).
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def _scratch_bytes(shape: ModelShape, base_dtype: BaseDtype, compute: int) -> int:
    """The shared buffer that a weight stored otherwise than in the compute dtype is unpacked into."""
    largest = 0
    stored = {"fp32": 4, "bf16": 2}.get(base_dtype)
    if stored != compute:
        largest = max(sum(math.prod(shape.linear_shape(name)) for name in members) for members in GROUPS)
    if (4 if base_dtype == "fp32" else 2) != compute:
        largest = max(largest, shape.vocab_size * shape.hidden_size)
    return largest * compute


def _matrices(shape: ModelShape, spec: AdapterSpec) -> list[int]:
    """Elements of every A (r, in) and B (out, r) of an adapter."""
    sizes = [side * spec.r for name in spec.targets for side in shape.linear_shape(name)]
    return sizes * _adapted_layers(shape, spec)


def _adapted_layers(shape: ModelShape, spec: AdapterSpec) -> int:
    return shape.num_layers if spec.layers_to_transform is None else len(spec.layers_to_transform)


def _padded(elements: int, align: int = _ALIGN) -> int:
    return math.ceil(elements / align) * align


def adapter_bytes(shape: ModelShape, spec: AdapterSpec, compute: int) -> int:
    """fp32 masters and gradients, and below fp32 a copy in the compute dtype."""
    elements = sum(map(_padded, _matrices(shape, spec)))
    return elements * (8 if compute == 4 else 8 + compute)


def _optimizer_bytes(shape: ModelShape, spec: AdapterSpec) -> int:
    """Two fp32 moments an element in the arena, or the 8-bit optimizer's own state."""
    if spec.optim != "adamw":
        return _eight_bit_bytes(shape, spec, _CODES_ALIGN, _ALIGN)
    return 8 * sum(map(_padded, _matrices(shape, spec)))


def _eight_bit_bytes(
    shape: ModelShape, spec: AdapterSpec, codes_align: int = 1, floats_align: int = 1
) -> int:
    """Two bytes an element and two fp32 absmax a block; small matrices keep fp32 moments. The alignments are
    those of each matrix's codes and floats, in elements."""
    return sum(
        8 * _padded(size, floats_align)
        if size < _LEAST_8BIT
        else 2 * _padded(size, codes_align) + 8 * _padded(math.ceil(size / _BLOCK_8BIT), floats_align)
        for size in _matrices(shape, spec)
    )


def saved_bytes(shape: ModelShape, spec: AdapterSpec, *, moments: bool = False) -> int:
    """One adapter's weights in a file (fp32); with its `moments`, as a checkpoint holds them."""
    weights = 4 * sum(_matrices(shape, spec))
    if not moments:
        return weights
    return weights + (2 * weights if spec.optim == "adamw" else _eight_bit_bytes(shape, spec))


def _layer_columns(shape: ModelShape, adapters: Sequence[AdapterSpec], *, kept: bool) -> int:
    """Values a token has in one layer.

    `kept`: what the backward needs: x and x after attention (H each), q and the attention's output (Hq·D
    each), k, v (Hkv·D each), gate, up (I each), two norm factors, with qk-norm q and k before it and their
    factors, and S = x Aᵀ (r) of each adapted linear, for the adapter with the most.

    Otherwise the working set besides it: gradients of the same rows, the normalised rows, the recomputed
    input of down_proj and its gradient.
    """
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if not kept:
        return 5 * h + 2 * q + 2 * kv + 4 * i
    ranks = max((spec.r * len(spec.targets) for spec in adapters), default=0)
    qk_norm = q + kv + shape.num_heads + shape.num_kv_heads if shape.qk_norm else 0
    return 2 * h + 2 * q + 2 * kv + 2 * i + 2 + qk_norm + ranks


def _activation_bytes(
    shape: ModelShape, adapters: Sequence[AdapterSpec], compute: int, pass_tokens: int
) -> int:
    """Kept rows of all layers from the lowest adapted one, one layer's working set, and the head's rows.

    With checkpointing each layer keeps its input alone (H) and one layer is whole at a time. A pass with
    a checkpointing adapter is checkpointed as a whole; counted only when every adapter asks for it, since
    otherwise a pass without one may come.
    """
    lowest = min((spec.lowest_layer for spec in adapters), default=shape.num_layers)
    layers = max(0, shape.num_layers - lowest)
    layer = _layer_columns(shape, adapters, kept=True)
    if adapters and all(spec.gradient_checkpointing for spec in adapters):
        kept = layers * shape.hidden_size + layer
    else:
        kept = layers * layer
    # Rows at the head: hidden before and after the norm, and both gradients.
    head = 4 * shape.hidden_size
    return pass_tokens * compute * (kept + _layer_columns(shape, adapters, kept=False) + head)
