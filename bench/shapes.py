"""Shapes that several operations are measured on."""

from __future__ import annotations

from collections.abc import Mapping

from bench.entry import Shape

# T tokens, model dim D, hidden dim H, E experts, K choices a token.
LLM = {
    "OLMoE": (32768, 2048, 1024, 64, 8),
    "Qwen3-30B, short": (8192, 2048, 768, 128, 8),
    "Qwen3-30B": (32768, 2048, 768, 128, 8),
    "Qwen3-235B": (32768, 4096, 1536, 128, 8),
    "fine-grained": (32768, 2048, 512, 256, 32),
    "Mixtral": (8192, 4096, 14336, 8, 2),
    "DeepSeek-V3": (8192, 7168, 2048, 256, 8),
    "gpt-oss": (8192, 2880, 2880, 128, 4),
}
AIMED = {name: LLM[name] for name in ("Qwen3-30B", "OLMoE", "Mixtral")}
PAPERS = {
    "CompeteSMoE": (24576, 352, 352, 16, 2),
    "V-MoE S/32": (12800, 512, 2048, 32, 2),
    "MMoE": (512, 256, 256, 16, 2),
}
ROUTINGS = ("uniform", "zipf", "adversarial")


def routed(sizes: list[Shape], routings: tuple[str, ...] = ROUTINGS) -> list[Shape]:
    return [{**size, "routing": kind} for size in sizes for kind in routings]


def sizes(table: Mapping[str, tuple[int, ...]], names: str) -> list[Shape]:
    """The values of a table as shapes that have only the sizes in `names`, such as "TDEK"; without duplicates."""
    found = [{name: each["TDHEK".index(name)] for name in names} for each in table.values()]
    return [size for index, size in enumerate(found) if size not in found[:index]]


def fewer_tokens(shape: Shape, device: str) -> Shape:
    """The shape; on a CPU with at most 2^25 elements in the rows (T K, D)."""
    return {**shape, "T": min(shape["T"], 2**25 // (shape["K"] * shape["D"]))} if device == "cpu" else shape
