"""One small file per model family: what its config.json means. To add one: a file here and a line below.

All four use Llama's tensor names (`gshare.agent.base.config.ModelConfig.tensor_shapes`).
"""

from __future__ import annotations

from gshare.agent.base.families import llama, mistral, qwen2, qwen3
from gshare.agent.base.families.traits import Family
from gshare.agent.base.raw_config import RawConfig

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)


def family_of(raw: RawConfig) -> Family:
    """The family that `architectures` names, or `model_type` where that key is absent.

    Raises UsageError with the list of known architectures.
    """
    known = ", ".join(family.architecture for family in FAMILIES)
    architectures = raw.values.get("architectures")
    for family in FAMILIES:
        if architectures == [family.architecture] or (
            not architectures and raw.values.get("model_type") == family.name
        ):
            return family
    named = architectures or raw.values.get("model_type")
    raise raw.error("architectures", f"names {named!r}, which is not supported; known: {known}")
