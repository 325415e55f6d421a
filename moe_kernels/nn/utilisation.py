"""How often every neuron of a masked network is active (COMET fixed routing, section 4.1.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Utilisation:
    """For each neuron i of each layer l, the share of the samples b in which the neuron was active (m_l[b, i] is True).

        u_l[i] = number of samples b with m_l[b, i], over the number of samples

    Counts are int64, so any split into batches gives the same numbers. They stay on the device of the masks. On a GPU
    `dead` and `summary` wait for the device; `update` and `share` do not.

    Example:
        >>> seen = Utilisation().update([torch.tensor([[True, False], [True, True]])])
        >>> seen.share(), seen.summary()["dead"]
        ([tensor([1.0000, 0.5000], dtype=torch.float64)], 0)
    """

    def __init__(self) -> None:
        self.samples = 0
        self.counts: list[Tensor] = []

    def reset(self) -> None:
        self.samples = 0
        self.counts = []

    def update(self, masks: Sequence[Tensor]) -> Utilisation:
        """Counts one batch: masks[l] is bool (..., N_l). The leading dimensions, equal in all layers, are samples.

        Raises:
            TypeError: a mask is not bool.
            ValueError: layers differ in their leading dimensions, or in number or width from those of earlier batches.
        """
        for layer, mask in enumerate(masks):
            if mask.dtype != torch.bool:
                raise TypeError(f"Utilisation: masks must be bool, got {mask.dtype} in layer {layer}")
            if mask.shape[:-1] != masks[0].shape[:-1]:
                raise ValueError(
                    f"Utilisation: layer {layer} must have the leading dimensions of layer 0, "
                    f"{tuple(masks[0].shape[:-1])}; got {tuple(mask.shape[:-1])}"
                )
        samples = masks[0].shape[:-1].numel() if masks else 0
        return self._add([mask.reshape(samples, mask.shape[-1]).sum(0) for mask in masks], samples)

    def merge(self, other: Utilisation) -> Utilisation:
        """Adds the counts of another Utilisation, of the same layers on other samples."""
        return self._add(other.counts, other.samples) if other.counts else self

    def share(self) -> list[Tensor]:
        """u_l, float64 (N_l), for every layer: NaN without samples; no layers before the first update."""
        return [count.double() / self.samples for count in self.counts]

    def dead(self) -> list[Tensor]:
        """int64 indices of the neurons that no sample activated, for every layer."""
        return [(count == 0).nonzero().flatten() for count in self.counts]

    def summary(self) -> dict[str, float | int]:
        """min and mean of all neurons' shares, numbers of dead and of all neurons; NaN, NaN, 0, 0 without samples."""
        if not self.counts or self.samples == 0:
            return {"min": float("nan"), "mean": float("nan"), "dead": 0, "neurons": 0}
        share = torch.cat(self.share())
        return {
            "min": share.min().item(),
            "mean": share.mean().item(),
            "dead": int((share == 0).sum()),
            "neurons": share.numel(),
        }

    def _add(self, counts: list[Tensor], samples: int) -> Utilisation:
        if self.counts and [count.shape for count in counts] != [count.shape for count in self.counts]:
            raise ValueError(
                f"Utilisation: expected layers of widths {[count.numel() for count in self.counts]}, as before; "
                f"got {[count.numel() for count in counts]}"
            )
        self.counts = [old + new for old, new in zip(self.counts, counts, strict=True)] if self.counts else list(counts)
        self.samples += samples
        return self
