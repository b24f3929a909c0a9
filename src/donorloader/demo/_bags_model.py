"""Attention-based multiple-instance learning after Ilse, Tomczak and Welling (2018), on bags of any size.

The paper's model with gated attention (https://arxiv.org/abs/1802.04712, equations 7 and 9), for cell k of a bag:

    h[k] = ReLU(W x[k])                                        embedding of a cell
    a[k] = softmax over the bag of  w . (tanh(V h[k]) * sigmoid(U h[k]))
    z    = sum over the bag of a[k] h[k]
    log odds of the bag's label = linear in z, and, with genotypes, in the dosages of the bag's donor

The cells of a batch stay one ragged table: softmax and sum run within each bag, and nothing is padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import donorloader as dl

if TYPE_CHECKING:
    from collections.abc import Iterator

# Small, and with genes dropped at random in training: a few hundred bags are soon known by heart, and a model that has
# them by heart learns nothing more, from cells or from genotypes.
EMBEDDING = 16
ATTENTION = 16
DROPPED_GENES = 0.3
_DEPTH = 1_000  # counts of each cell are scaled to this sum


class AttentionModel(nn.Module):
    """Classifier of bags that says which cells it looked at.

    Parameters
    ----------
    genes
        How many.
    mean_dosage
        (n_variants,) float32: mean dosage of each variant over the training donors, for missing calls and to centre;
        `None` for a model without genotypes.
    generator
        Source of the initial weights and of the genes dropped in training. The global generator of torch is not used.
    """

    mean_dosage: Tensor | None

    def __init__(self, *, genes: int, mean_dosage: Tensor | None, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator
        # Every gene gets mean 0 and variance 1 over the cells, so that weights of all genes are of one size.
        self.scale = nn.BatchNorm1d(genes, affine=False)
        self.embed = self._weights(genes, EMBEDDING)
        self.embed_bias = nn.Parameter(torch.zeros(EMBEDDING))
        self.tanh_weight = self._weights(EMBEDDING, ATTENTION)
        self.gate_weight = self._weights(EMBEDDING, ATTENTION)
        self.attention = self._weights(ATTENTION, 1)
        self.out = self._weights(EMBEDDING, 1)
        self.out_bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean_dosage", mean_dosage)
        self.variant = None if mean_dosage is None else nn.Parameter(torch.zeros(len(mean_dosage)))

    def _weights(self, rows: int, columns: int) -> nn.Parameter:
        return nn.Parameter(rows**-0.5 * torch.randn(rows, columns, generator=self._generator))

    @staticmethod
    def log_expression(counts: Tensor) -> Tensor:
        """Counts of each cell scaled to the same sum, as log(1 + count)."""
        return torch.log1p(counts * (_DEPTH / counts.sum(dim=1, keepdim=True)))

    def cell_parameters(self) -> Iterator[nn.Parameter]:
        """All weights but those of the variants."""
        return (weight for weight in self.parameters() if weight is not self.variant)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Log odds of each bag, (n_bags,), and attention of each cell, (n_cells,): it sums to 1 within a bag.

        Of the batch, these fields are used: ``X`` (dense), ``offsets``, ``donor_idx``, and ``donor_features`` in a
        model with genotypes.
        """
        x = self.scale(self.log_expression(batch["X"]))
        if self.training:
            kept = torch.rand(x.shape, generator=self._generator) >= DROPPED_GENES
            x = x * kept / (1 - DROPPED_GENES)
        h = F.relu(x @ self.embed + self.embed_bias)
        score = (torch.tanh(h @ self.tanh_weight) * torch.sigmoid(h @ self.gate_weight)) @ self.attention
        weight = dl.bag_reduce(score, batch, "softmax")
        z = dl.bag_reduce(weight * h, batch, "sum")
        log_odds = (z @ self.out + self.out_bias).squeeze(1)
        if self.variant is not None:
            dosages = batch["donor_features"]
            # int8 stores mark a missing call with -1. Centred, 0 is the mean of the variant: a missing call takes that.
            log_odds = log_odds + torch.where(dosages < 0, 0.0, dosages - self.mean_dosage) @ self.variant
        return log_odds, weight.squeeze(1)
