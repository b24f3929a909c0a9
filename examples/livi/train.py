"""Train LIVI on a study. Needs LIVI: run with a checkout of https://github.com/PMBio/LIVI on PYTHONPATH."""

from __future__ import annotations

import argparse

import pandas as pd
import pytorch_lightning as pl
from src.models.livi import LIVI

import donorloader as dl


def main() -> None:
    """Split, train, and save the model with the order of its donors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", help="folder that `donorloader prepare` wrote")
    parser.add_argument("known_cis", help="table of variants × genes, 1 for a known cis-eQTL")
    parser.add_argument("--covariate", action="append", default=[], help="categorical column of obs, repeatable")
    parser.add_argument("--missing", default="absent", choices=["absent", "mean", "error"], help="missing calls")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()

    pl.seed_everything(arguments.seed)
    known_cis = pd.read_csv(arguments.known_cis, sep="\t", index_col=0)
    # as many training cells as can be, and a few of each donor to see whether the model overfits
    split = dl.split_cells(arguments.study, fractions={"train": 0.95, "val": 0.05}, seed=arguments.seed)
    with dl.LIVIDataModule(
        arguments.study,
        split=split,
        covariates=arguments.covariate,
        known_cis=known_cis,
        missing=arguments.missing,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        drop_last=True,
    ) as data:
        trainer = pl.Trainer(max_epochs=arguments.epochs, devices=1, callbacks=[dl.CellsPerSecond()])
        device = "cuda" if trainer.strategy.root_device.type == "cuda" else "cpu"
        model = LIVI(
            x_dim=data.n_genes,
            z_dim=15,
            y_dim=data.n_donors,
            n_DxC_factors=100,
            n_persistent_factors=5,
            n_cis_snps=data.n_cis_snps,
            encoder_hidden_dims=[512, 256, 64],
            learning_rate=8e-4,
            covariates_dims=data.covariates_dims,
            device=device,
        )
        trainer.fit(model, datamodule=data)
    trainer.save_checkpoint("livi.ckpt")
    pd.Series(data.donor_categories).to_csv("livi_donors.csv", index_label="code", header=["donor_id"])


if __name__ == "__main__":
    main()
