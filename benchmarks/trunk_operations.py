"""How much an arm of `benchmarks/trunk.py` has to multiply: the products with frozen weights, and the head.

    T tokens of the jobs' rows, U of their distinct rows, R labels

Attention, LoRA, norms and the optimizer are left out. A ratio of two counts is what less arithmetic explains;
what is measured is below it by that rest, and above it by how much better many rows use a device than few.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gshare.agent.base.config import ModelConfig
from gshare.agent.train.part import Row
from gshare.kernels.layout import GROUPS
from trunk_workload import Cohort

#: What of the layers below the adapters is run.
EACH, ONCE, KEPT = "each", "once", "kept"
HEAD = -1


@dataclass(frozen=True)
class Product:
    """`rows` rows times a frozen weight (out, in); `transposed`: dX."""

    layer: int  # HEAD: the head
    linears: tuple[str, ...]  # side by side in one weight
    rows: int
    transposed: bool = False


def pass_products(config: ModelConfig, lowest: int, rows: Sequence[Row], trunk: str) -> list[Product]:
    """The products of one pass that trains; every row's job begins at layer `lowest`."""
    tokens, labels = sum(len(row.tokens) for row in rows), sum(row.label_tokens for row in rows)
    distinct = sum({row.content: len(row.tokens) for row in rows}.values())
    below = {EACH: tokens, ONCE: distinct, KEPT: 0}[trunk]
    found = [Product(layer, linears, below) for layer in range(lowest) for linears in GROUPS.values()]
    top = config.num_layers - 1
    for layer in range(lowest, top):
        found += [Product(layer, linears, tokens) for linears in GROUPS.values()]
        # Nothing asks for the gradient of the lowest adapted layer's input.
        asked = [name for name in GROUPS if name != "qkv" or layer > lowest]
        found += [Product(layer, GROUPS[name], tokens, True) for name in asked]
    q, kv = ("q_proj",), ("k_proj", "v_proj")
    rest = [Product(top, GROUPS[name], labels) for name in ("o", "gate_up", "down")]
    found += [Product(top, q, labels), Product(top, kv, tokens), *rest]
    found += [Product(top, one.linears, labels, True) for one in rest]
    if top > lowest:
        found.append(Product(top, GROUPS["qkv"], tokens, True))
    return [*found, Product(HEAD, (), labels), Product(HEAD, (), labels, True)]


def peft_products(config: ModelConfig, lowest: int, rows: Sequence[Row]) -> list[Product]:
    """The same of transformers + PEFT: every row through everything, logits of every token; autograd stops
    at the lowest adapted layer too."""
    tokens = sum(len(row.tokens) for row in rows)
    layers = range(config.num_layers)
    found = [Product(layer, linears, tokens) for layer in layers for linears in GROUPS.values()]
    for layer in layers[lowest:]:
        asked = [name for name in GROUPS if name != "qkv" or layer > lowest]
        found += [Product(layer, GROUPS[name], tokens, True) for name in asked]
    return [*found, Product(HEAD, (), tokens), Product(HEAD, (), tokens, True)]


def multiplications(config: ModelConfig, products: Sequence[Product]) -> int:
    """Multiply-adds of the products."""

    def elements(one: Product) -> int:
        if one.layer == HEAD:
            return config.vocab_size * config.hidden_size
        shapes = (config.linear_shape(linear) for linear in one.linears)
        return sum(outputs * inputs for outputs, inputs in shapes)

    return sum(one.rows * elements(one) for one in products)


def expected(cohort: Cohort) -> dict[str, int]:
    """Multiply-adds of an epoch of the cohort in each arm; of the last one, where the cache is full."""
    config, lowest = cohort.config, cohort.lowest_layer
    found: dict[str, int] = defaultdict(int)
    for step in range(cohort.steps):
        rows = [row for job in range(cohort.jobs) for row in cohort.rows(step, job)]
        for arm, trunk in (("dedicated", EACH), ("packed", EACH), ("shared", ONCE), ("cached", KEPT)):
            found[arm] += multiplications(config, pass_products(config, lowest, rows, trunk))
        for arm in ("peft", "mps"):
            found[arm] += multiplications(config, peft_products(config, lowest, rows))
    return dict(found)
