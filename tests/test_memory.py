"""The analytic memory estimate: hand-worked figures, the base once, monotone in everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gshare.agent.jobs.memory import (
    GRAPHS,
    MemoryEstimate,
    ModelShape,
    estimate_generation,
    estimate_run,
    is_launch_bound,
    largest_pass,
)
from gshare.agent.jobs.spec import LINEARS, AdapterSpec, RunSpec
from hypothesis import example, given, settings
from hypothesis import strategies as st

SMOL = ModelShape(49152, 576, 1536, 30, 9, 3, 64, True)
LLAMA_8B = ModelShape(128256, 4096, 14336, 32, 32, 8, 128, False)
GIB = 2**30


def adapter(**keys: Any) -> AdapterSpec:
    return AdapterSpec(
        **({"name": "a", "data": "d", "output_dir": "o", "lora_alpha": 32.0, "seed": 0} | keys)
    )


def estimate(shape: ModelShape = SMOL, adapters: int | list[AdapterSpec] = 1, **keys: Any) -> MemoryEstimate:
    specs = [adapter()] * adapters if isinstance(adapters, int) else adapters
    options = {"base_dtype": "bf16", "device": "cpu", "pass_tokens": 1024, "longest_row": 1024} | keys
    return estimate_run(shape, specs, **options)


def test_parameter_counts_are_the_published_ones() -> None:
    assert SMOL.parameters == 134_515_008
    assert LLAMA_8B.parameters == 8_030_261_248


def test_smollm2_by_hand() -> None:
    it = estimate(pass_tokens=1000, longest_row=100)
    # 106,168,320 linear and 28,311,552 embedding weights of 2 bytes, 35,136 norm weights of 4.
    assert it["base"] == 106_168_320 * 2 + 28_311_552 * 2 + 35_136 * 4
    assert it["unpacking"] == 49152 * 576 * 4  # the head, bf16 → fp32
    # r = 16 over (out + in): q 1152, k 768, v 768, o 1152, gate 2112, up 2112, down 2112 = 10,176; 30 layers.
    elements = 16 * 10_176 * 30
    assert elements == 4_884_480
    assert it["adapters"] == elements * 8
    assert it["optimizer"] == elements * 8
    # Kept a layer: 2·576 + 2·576 + 2·192 + 2·1536 + 2 + 7·16 = 5,874; working set 5·576 + 2·576 + 2·192
    # + 4·1536 = 10,560; head 4·576 = 2,304.
    assert it["activations"] == 1000 * 4 * (30 * 5_874 + 10_560 + 2_304)
    assert it["attention"] == 4 * 9 * 100 * 100 * 4
    assert it["logits"] == 2 * 256 * 49152 * 4
    assert it["evaluation"] == 0
    assert it["snapshots"] == 6 * elements * 12
    assert it.total == sum(part.nbytes for part in it.parts)


def test_llama_8b_in_4_bits_by_hand() -> None:
    it = estimate(LLAMA_8B, base_dtype="nf4", device="cuda", attention_matrix=False)
    linears = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336)
    assert linears == 6_979_321_856
    # Half a byte, 1/64 and 4/16384: 4.127 bits a weight, as QLoRA states.
    assert (
        it["base"] == linears // 2 + linears // 64 + linears // 4096 + 2 * 128256 * 4096 * 2 + 65 * 4096 * 4
    )
    assert it["base"] / GIB == pytest.approx(5.31, abs=0.01)
    assert it["unpacking"] == 2 * 4096 * 14336 * 2  # gate and up are one product
    # r = 16: 41,943,040 adapter weights, PEFT's figure; fp32 masters and gradients and a bf16 copy.
    assert it["adapters"] == 41_943_040 * 10
    assert it["optimizer"] == 41_943_040 * 8
    assert it["attention"] == 0
    assert it["logits"] == 1024 * 128256 * 2
    # Snapshots are in the host's memory: not part of the GPU's total.
    assert it.total == sum(part.nbytes for part in it.parts) - it["snapshots"]


def test_generation_by_hand() -> None:
    keys = {"base_dtype": "nf4", "device": "cuda", "adapter_bytes": 5_000_000}
    it = estimate_generation(LLAMA_8B, prompt_tokens=100, positions=356, **keys)
    assert it["base"] == estimate(LLAMA_8B, base_dtype="nf4", device="cuda")["base"]
    assert it["cache"] == 65 * 356 * 8 * 128 * 2  # 32 layers' keys and values, one of them twice
    assert it["activations"] == 100 * 2 * (5 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336)
    assert it["attention"] == 4 * 32 * 100 * 100 * 4
    assert it.total == sum(part.nbytes for part in it.parts)
    longer = estimate_generation(LLAMA_8B, prompt_tokens=1, positions=8192, **keys)
    assert longer["attention"] == 4 * 32 * 8192 * 4  # one row over the whole cache
    assert it["adapter"] == longer["adapter"] == 5_000_000


def test_stored_dtypes() -> None:
    sizes = {dtype: estimate(LLAMA_8B, base_dtype=dtype)["base"] for dtype in ("nf4", "int8", "bf16", "fp32")}
    assert sizes["nf4"] < sizes["int8"] < sizes["bf16"] < sizes["fp32"]
    assert sizes["fp32"] == LLAMA_8B.parameters * 4
    assert estimate(base_dtype="fp32")["unpacking"] == 0
    assert estimate(base_dtype="bf16", device="cuda")["unpacking"] == 0
    assert estimate(base_dtype="fp32", device="cuda")["activations"] == estimate()["activations"]
    assert estimate(base_dtype="bf16", device="cuda")["activations"] * 2 == estimate()["activations"]


def test_n_adapters_cost_the_base_once() -> None:
    one, three = estimate(adapters=1), estimate(adapters=3)
    for part in ("base", "unpacking", "activations", "attention", "logits", "snapshots"):
        assert three[part] == one[part]
    assert three["adapters"] == 3 * one["adapters"]
    assert three["optimizer"] == 3 * one["optimizer"]
    saved = 3 * one.total - three.total
    assert saved == 2 * (one.total - one["adapters"] - one["optimizer"])


def test_checkpointing_counts_only_when_every_adapter_asks_for_it() -> None:
    on, off = adapter(gradient_checkpointing=True), adapter()
    some, every, none = (estimate(adapters=a)["activations"] for a in ([on, off], [on, on], [off, off]))
    assert every < some == none
    # x of each layer and one whole layer, instead of 30 whole layers.
    assert none - every == 1024 * 4 * (29 * 5_874 - 30 * 576)


def test_layers_below_the_lowest_adapted_one_keep_nothing() -> None:
    top = estimate(adapters=[adapter(layers_to_transform=(28, 29))])
    assert estimate()["activations"] - top["activations"] == 1024 * 4 * 28 * 5_874
    assert top["adapters"] * 15 == estimate()["adapters"]


def test_8_bit_optimizer_state_by_hand() -> None:
    plain, eight = estimate(), estimate(adapters=[adapter(optim="adamw_8bit")])
    # r = 16, a layer: 9 matrices of 16·576 = 9,216 (36 blocks), 3 of 16·1536 = 24,576 (96 blocks), and B of
    # k_proj and v_proj of 16·192 = 3,072, too small for 8 bits: two fp32 moments.
    layer = 9 * (2 * 9_216 + 8 * 36) + 3 * (2 * 24_576 + 8 * 96) + 2 * (8 * 3_072)
    assert eight["optimizer"] == 30 * (layer + 9 * 8 * (48 - 36))  # 64 bytes are 16 floats
    assert plain["optimizer"] == 8 * 4_884_480
    assert eight["snapshots"] == 6 * (4 * 4_884_480 + 30 * layer)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("base_dtype", ["fp32", "bf16", "int8", "nf4"])
def test_base_and_arena_take_what_is_estimated(tmp_path: Path, family: str, base_dtype: str) -> None:
    import torch
    from gshare.agent.base.load import load_base
    from gshare.agent.base.tiny import make_tiny_checkpoint
    from gshare.agent.train.arena import Arena, adapter_shapes

    base = load_base(
        make_tiny_checkpoint(tmp_path / "m", family=family), base_dtype=base_dtype, device=torch.device("cpu")
    )
    spec = adapter(r=3, target_modules=("q_proj", "down_proj"))
    shape = ModelShape.of(base.config)
    it = estimate(shape, [spec], base_dtype=base_dtype)
    # Biases, q and k norms, and NF4 blocks that end at each matrix are not counted one by one.
    assert it["base"] == pytest.approx(base.nbytes, rel=0.01)
    assert it["unpacking"] == base.scratch.nbytes
    arena = Arena(base.device, base.compute_dtype)
    arena.allocate("a", adapter_shapes(spec, base.config))
    assert it["adapters"] + it["optimizer"] == arena.nbytes()
    eight, arena = adapter(r=49, optim="adamw_8bit"), Arena(base.device, base.compute_dtype)
    arena.allocate("a", adapter_shapes(eight, base.config), eight_bit=True)
    assert any(elements % 64 and elements > 4096 for _, _, elements, _, _ in arena.matrices_8bit("a"))
    it = estimate(shape, [eight], base_dtype=base_dtype)
    assert it["adapters"] + it["optimizer"] == arena.nbytes()


def test_a_small_model_is_reserved_with_room_for_its_graphs() -> None:
    """They have memory of their own beside what passes take that are launched; a large model does without."""
    it = estimate(device="cuda", base_dtype="bf16", pass_tokens=2000)
    assert it[GRAPHS] == it["activations"] + it["logits"]
    assert it.needed == it.total - it[GRAPHS]
    for other in (estimate(device="cpu"), estimate(LLAMA_8B, device="cuda", base_dtype="bf16")):
        assert GRAPHS not in [part.name for part in other.parts]
        assert other.needed == other.total


def test_adapters_of_the_upper_layers_take_their_states_from_a_buffer() -> None:
    """On CUDA: a power of two of tokens, and more than the pass has. Adapters of all layers need none."""
    top = [adapter(layers_to_transform=(31,)), adapter(layers_to_transform=(30, 31))]
    for tokens, expected in ((8192, 128 * 2**20), (4095, 32 * 2**20), (4096, 64 * 2**20)):
        it = estimate(LLAMA_8B, top, device="cuda", pass_tokens=tokens)
        assert it["trunk states"] == expected
    for other in (estimate(LLAMA_8B, device="cuda"), estimate(LLAMA_8B, top)):
        assert "trunk states" not in [part.name for part in other.parts]


def run(**keys: Any) -> RunSpec:
    specs = (
        adapter(max_length=100, per_device_train_batch_size=4, gradient_accumulation_steps=8),
        adapter(max_length=1000),
        adapter(max_length=10, per_device_train_batch_size=3),
    )
    return RunSpec(**({"model": "m", "adapters": specs} | keys))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 1430),
        ({"max_tokens_per_pass": 1200}, 1200),
        ({"max_tokens_per_pass": 64}, 1000),  # a row is never cut
        ({"schedule": "priority_val_loss"}, 1000),
        ({"schedule": "round_robin", "max_adapters_per_pass": 2}, 1400),
        ({"schedule": "synchronized", "max_adapters_per_pass": 2}, 1430),
    ],
)
def test_largest_pass(keys: dict[str, Any], expected: int) -> None:
    assert largest_pass(run(**keys)) == (expected, 1000)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_table_names_every_part_and_its_total_is_the_sum_of_what_is_above_it(device: str) -> None:
    it = estimate(device=device)
    assert it["snapshots"] > 2**20
    lines = [line.split() for line in it.table().splitlines()]
    at = [name for name, *_ in lines].index("total")
    assert sorted(name for name, *_ in lines) == sorted([*(part.name for part in it.parts), "total"])
    shown = [float(mb.replace(",", "")) for _, mb, *_ in lines]
    assert shown[at] == round(it.total / 2**20, 1)
    assert abs(sum(shown[:at]) - shown[at]) < 0.05 * (at + 1)  # each is rounded to a tenth
    assert [" ".join(line[3:]) for line in lines[at + 1 :]] == (
        [] if device == "cpu" else ["checkpoints being written; in main memory"]
    )


shapes = st.builds(
    ModelShape,
    st.integers(8, 200_000),
    st.integers(1, 64).map(lambda n: n * 64),
    st.integers(1, 64).map(lambda n: n * 64),
    st.integers(1, 40),
    st.integers(1, 32),
    st.integers(1, 8),
    st.sampled_from([64, 128]),
    st.booleans(),
)


#: Parts that hold 8-bit optimizer state.
STATE = ("optimizer", "snapshots")
#: Below so many elements a matrix keeps fp32 moments, 8 bytes an element; from there on 2 and the scales.
LEAST_8BIT = 4096
SHAPE_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_layers", "num_heads", "num_kv_heads"),
)


def reaches_8_bits(small: tuple[ModelShape, AdapterSpec], large: tuple[ModelShape, AdapterSpec]) -> bool:
    """Whether a matrix of the adapter is below `LEAST_8BIT` elements in `small` and not in `large`."""
    return large[1].optim != "adamw" and any(
        side * small[1].r < LEAST_8BIT <= larger * large[1].r
        for name in LINEARS
        for side, larger in zip(small[0].linear_shape(name), large[0].linear_shape(name), strict=True)
    )


def ungraphed(it: MemoryEstimate) -> MemoryEstimate:
    parts = tuple(part for part in it.parts if part.name != GRAPHS)
    assert MemoryEstimate(parts, it.device).total == it.needed
    return MemoryEstimate(parts, it.device)


def assert_costs_more(
    small: tuple[ModelShape, AdapterSpec], large: tuple[ModelShape, AdapterSpec], what: str, **options: Any
) -> None:
    """The total grows; where a matrix reaches 8 bits, whose state then shrinks, all the rest does, and where
    a model becomes too large for graphs to be counted, all but these."""
    before, after = estimate(small[0], [small[1]], **options), estimate(large[0], [large[1]], **options)
    if is_launch_bound(small[0].parameters) != is_launch_bound(large[0].parameters):
        before, after = ungraphed(before), ungraphed(after)
    if reaches_8_bits(small, large):
        rest = [
            it.total - sum(it[part] for part in STATE if it.device == "cpu" or part != "snapshots")
            for it in (before, after)
        ]
        assert rest[1] > rest[0], what
    else:
        assert after.total > before.total, what


#: 3 KV heads and rank 16: B of k_proj and v_proj has 3,072 elements, with a fourth head 4,096.
FOURTH_KV_HEAD = ModelShape(8, 64, 64, 1, 1, 3, 64, False)
#: 5 heads and rank 11: B of q_proj has 3,520 elements and A of o_proj too, with a sixth head 4,224.
SIXTH_HEAD = ModelShape(137_233, 64, 3904, 36, 5, 6, 64, True)


@settings(max_examples=150, deadline=None)
@given(
    shapes,
    st.sampled_from(["nf4", "int8", "bf16", "fp32"]),
    st.sampled_from(["cpu", "cuda"]),
    st.integers(1, 128),
    st.integers(1, 8192),
    st.sampled_from(["adamw", "adamw_8bit"]),
    st.booleans(),
)
@example(FOURTH_KV_HEAD, "bf16", "cpu", 16, 1, "adamw_8bit", False)
@example(FOURTH_KV_HEAD, "bf16", "cpu", 16, 1, "adamw", False)
@example(replace(FOURTH_KV_HEAD, num_kv_heads=4), "bf16", "cpu", 15, 1, "adamw_8bit", False)
@example(SIXTH_HEAD, "bf16", "cuda", 11, 1, "adamw_8bit", False)
def test_more_of_anything_never_costs_less(
    shape: ModelShape, base_dtype: str, device: str, r: int, tokens: int, optim: str, checkpointing: bool
) -> None:
    spec = adapter(r=r, optim=optim, gradient_checkpointing=checkpointing)
    options = {"base_dtype": base_dtype, "device": device, "pass_tokens": tokens, "longest_row": tokens}
    before = estimate(shape, [spec], **options).total
    assert estimate(shape, [spec, spec], **options).total > before
    assert estimate(shape, [spec], **(options | {"pass_tokens": tokens + 1})).total > before
    assert estimate(shape, [spec], **(options | {"longest_row": tokens + 1})).total > before
    higher = msgspec.structs.replace(spec, r=r + 1)
    assert_costs_more((shape, spec), (shape, higher), "r", **options)
    for field in SHAPE_FIELDS:
        larger = replace(shape, **{field: getattr(shape, field) + 1})
        assert_costs_more((shape, spec), (larger, spec), field, **options)


def test_a_matrix_that_reaches_8_bits_does_take_less_and_is_estimated_so() -> None:
    """Why the claim above leaves the optimizer's state out there: the arena itself shrinks."""
    import torch
    from gshare.agent.train.arena import Arena, MatrixKey

    taken, foreseen = [], []
    for kv_heads in (3, 4):
        shape = replace(FOURTH_KV_HEAD, num_kv_heads=kv_heads)
        spec = adapter(r=16, optim="adamw_8bit", target_modules=("k_proj",))
        out, inner = shape.linear_shape("k_proj")
        arena = Arena(torch.device("cpu"), torch.float32)
        keys = {MatrixKey(0, "k_proj", "A"): (16, inner), MatrixKey(0, "k_proj", "B"): (out, 16)}
        arena.allocate("a", keys, eight_bit=True)
        taken.append(arena.nbytes())
        it = estimate(shape, [spec])
        foreseen.append(it["adapters"] + it["optimizer"])
    assert taken == foreseen
    assert taken[1] < taken[0]
    for shape, grown, r, device in (
        (FOURTH_KV_HEAD, replace(FOURTH_KV_HEAD, num_kv_heads=4), 16, "cpu"),
        (SIXTH_HEAD, replace(SIXTH_HEAD, num_heads=6), 11, "cuda"),
    ):
        spec = adapter(r=r, optim="adamw_8bit")
        small, large = (
            estimate(one, [spec], device=device, pass_tokens=1, longest_row=1) for one in (shape, grown)
        )
        assert large.total < small.total, "no counterexample any more: the claim can be simpler"
