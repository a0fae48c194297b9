"""What an adapter may ask of a model, told by the model's config alone: before anything is sent or loaded."""

from __future__ import annotations

from collections.abc import Iterable

from gshare.agent.jobs.faults import Faults
from gshare.agent.jobs.spec import AdapterSpec


def add_model_faults(
    adapters: Iterable[AdapterSpec], num_layers: int, max_positions: int | None, faults: Faults
) -> None:
    """Adds a fault for each layer and length beyond the model's. `max_positions` None: not known here."""
    for spec in adapters:
        where = f"adapter {spec.name}"
        beyond = [layer for layer in spec.layers_to_transform or () if layer >= num_layers]
        if beyond:
            faults.add(
                f"{where}: layers_to_transform",
                f"{beyond[0]} is no layer of this model, which has {num_layers} (0 to {num_layers - 1})",
            )
        if max_positions is not None and spec.max_length > max_positions:
            faults.add(
                f"{where}: max_length",
                f"{spec.max_length} is beyond the model's max_position_embeddings, {max_positions}; "
                "set it to that or less",
            )
