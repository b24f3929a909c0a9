"""A small model after LIVI (Vagiaki et al., 2026): an autoencoder of cell state with donor and genotype terms.

The log expression of a gene in a cell is a sum of

- the gene's baseline and the pool's effect,
- the cell's state: ``z``, inferred from the cell's counts, times linear loadings,
- the donor's effect, in the states that it acts in: (gate of z) x (embedding of the donor), times linear loadings,
- the cis effects: the donor's dosages times one weight for each gene and variant in cis; all other weights are 0.

It is written for this demo, to be read: LIVI itself has more terms, phases and penalties.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

STATE_SIZE = 8
DONOR_FACTORS = 4
HIDDEN = 64
EFFECT_SCALE = 0.3  # prior standard deviation of a cis effect, in log expression for each copy of an allele


class CisModel(nn.Module):
    """Variational autoencoder of counts with donor and cis genotype terms.

    Parameters
    ----------
    genes, pools
        How many of each.
    donors
        Ids of all donors; the rows of the donor embedding, in this order.
    cis_gene, cis_variant
        (n_pairs,) int64: gene (column of the counts) and variant (column of the dosages) of each pair in cis.
    mean_dosage
        (n_variants,) float32: mean dosage of each variant over the donors with a call. Dosages are centred with it,
        and a missing call counts as the mean.
    generator
        Source of the initial weights and of the noise in training. The global generator of torch is not used.
    """

    mean_dosage: Tensor
    cis_gene: Tensor
    cis_variant: Tensor

    def __init__(
        self,
        *,
        genes: int,
        pools: int,
        donors: Sequence[str],
        cis_gene: Tensor,
        cis_variant: Tensor,
        mean_dosage: Tensor,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self._generator = generator
        self._donor_row = {donor: row for row, donor in enumerate(donors)}
        self.register_buffer("cis_gene", cis_gene)
        self.register_buffer("cis_variant", cis_variant)
        self.register_buffer("mean_dosage", mean_dosage)

        self.hidden = self._weights(genes, HIDDEN, scale=genes**-0.5)
        self.hidden_bias = nn.Parameter(torch.zeros(HIDDEN))
        self.to_state = self._weights(HIDDEN, 2 * STATE_SIZE, scale=0.1 * HIDDEN**-0.5)

        self.baseline = nn.Parameter(torch.zeros(genes))
        self.pool = nn.Parameter(torch.zeros(pools, genes))
        self.state_loading = self._weights(STATE_SIZE, genes, scale=0.1)
        self.gate = self._weights(STATE_SIZE, DONOR_FACTORS, scale=0.1)
        self.donor = self._weights(len(donors), DONOR_FACTORS, scale=0.1)
        self.donor_loading = self._weights(DONOR_FACTORS, genes, scale=0.1)
        self.cis_effect = nn.Parameter(torch.zeros(len(cis_gene)))
        self.log_dispersion = nn.Parameter(torch.ones(genes))

    def _weights(self, rows: int, columns: int, *, scale: float) -> nn.Parameter:
        return nn.Parameter(scale * torch.randn(rows, columns, generator=self._generator))

    def encode(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the state of each cell, (n_cells, STATE_SIZE) each."""
        depth = counts.sum(dim=1, keepdim=True)
        scaled = torch.log1p(counts * (1_000 / depth))
        out = F.relu(scaled @ self.hidden + self.hidden_bias) @ self.to_state
        mean, log_variance = out.chunk(2, dim=1)
        return mean, log_variance

    def cis(self, dosages: Tensor) -> Tensor:
        """Cis effects of each donor on log expression, (n_donors, n_genes), from dosages with -1 as missing."""
        # int8 stores mark a missing call with -1. Centred, 0 is the mean of the variant: a missing call takes that.
        centred = torch.where(dosages < 0, 0.0, dosages - self.mean_dosage)
        each_pair = centred[:, self.cis_variant] * self.cis_effect
        return each_pair.new_zeros(len(dosages), len(self.baseline)).index_add(1, self.cis_gene, each_pair)

    def loss(self, counts: Tensor, pool: Tensor, donors: Sequence[str], donor_idx: Tensor, dosages: Tensor) -> Tensor:
        """Negative evidence lower bound of a batch, mean over its cells.

        Parameters
        ----------
        counts
            (n_cells, n_genes) float32.
        pool
            (n_cells,) int64.
        donors, donor_idx, dosages
            ``unique_donors``, ``donor_idx`` and ``donor_features`` of the batch: whatever depends on the donor only is
            computed once for each donor, then handed to the donor's cells by ``donor_idx``.
        """
        mean, log_variance = self.encode(counts)
        noise = torch.randn(mean.shape, generator=self._generator)
        state = mean + noise * torch.exp(0.5 * log_variance)

        rows = torch.tensor([self._donor_row[donor] for donor in donors])
        donor_effect = torch.sigmoid(state @ self.gate) * self.donor[rows][donor_idx]
        log_share = F.log_softmax(
            self.baseline
            + self.pool[pool]
            + state @ self.state_loading
            + donor_effect @ self.donor_loading
            + self.cis(dosages)[donor_idx],
            dim=1,
        )
        expected = counts.sum(dim=1, keepdim=True) * log_share.exp()
        log_likelihood = _negative_binomial(counts, expected, self.log_dispersion).sum(dim=1)
        divergence = 0.5 * (mean**2 + log_variance.exp() - log_variance - 1).sum(dim=1)
        return (divergence - log_likelihood).mean()

    def penalty(self) -> Tensor:
        """Negative log density of the normal priors on donor and cis weights, for the whole study."""
        cis = (self.cis_effect / EFFECT_SCALE).square().sum()
        return 0.5 * (cis + self.donor.square().sum() + self.donor_loading.square().sum())


def _negative_binomial(counts: Tensor, mean: Tensor, log_dispersion: Tensor) -> Tensor:
    """Log probability of counts with variance mean + mean² / dispersion."""
    dispersion = log_dispersion.exp()
    log_total = torch.log(dispersion + mean)
    return (
        torch.lgamma(counts + dispersion)
        - torch.lgamma(dispersion)
        - torch.lgamma(counts + 1)
        + dispersion * (log_dispersion - log_total)
        + counts * (torch.log(mean + 1e-10) - log_total)
    )
