"""One batch, explained: its fields, and one cell followed to its genotype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from donorloader import DonorLoader

_MEANING = {
    "X": "counts, cells × genes",
    "index": "each cell's row in the collection",
    "obs": "columns asked for",
    "unique_donors": "donors of these cells",
    "donor_idx": "each cell's donor, as a row",
    "donor_features": "genotypes, donors × variants",
}


def explain_batch(console: Console, loader: DonorLoader, panel: Path, donor_key: str) -> None:
    """Print the fields of a loader's first batch, and check its join against the raw PLINK file.

    Parameters
    ----------
    console
        Where to print.
    loader
        A loader whose batches bring the donor column in ``obs``.
    panel
        The ``.bed`` that the genotypes came from.
    donor_key
        The donor column.

    Raises
    ------
    RuntimeError
        If a cell got another donor's genotypes, which cannot be unless donorloader is at fault.
    """
    batch = next(iter(loader))
    print_fields(console, batch, _MEANING)

    variants = np.asarray(loader.variant_names)
    donors, donor_idx = batch["unique_donors"], batch["donor_idx"].numpy()
    dosages = batch["donor_features"].numpy()
    expected = _read_panel(panel, donors, variants)
    stray = np.flatnonzero(donors[donor_idx] != batch["obs"][donor_key].astype(str).to_numpy())
    if stray.size or not np.array_equal(dosages, expected):
        raise RuntimeError("A batch does not agree with the raw files. Please report this fault of donorloader.")

    row = donor_idx[0]
    variant = int(np.argmax(dosages[row]))
    name, donor = variants[variant], donors[row]
    console.print(
        f"\nThe first cell is row {int(batch['index'][0]):,} of the collection. Its donor_idx is {row}:\n"
        f"unique_donors[{row}] is {donor}, and donor_features[{row}] has its genotypes:\n"
        f"{dosages[row, variant]} at {name}, for one.\n"
        f"Checked: all {len(donor_idx):,} cells and {dosages.size:,} genotypes of this batch agree with the files."
    )


def print_fields(console: Console, batch: dict[str, Any], meaning: dict[str, str]) -> None:
    """Print shape, type and meaning of some fields of a batch."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("batch[...]", "shape", "type", "holds"):
        table.add_column(column)
    for key, what in meaning.items():
        table.add_row(f"[bold]{key}[/]", _shape(batch[key]), _type(batch[key]), what)
    console.print(table)


def _read_panel(panel: Path, donors: Any, variants: Any) -> Any:
    """Genotypes straight from the PLINK file, missing calls -1."""
    from bed_reader import open_bed

    with open_bed(panel, num_threads=1) as bed:
        rows, columns = pd.Index(bed.iid).get_indexer(donors), pd.Index(bed.sid).get_indexer(variants)
        dosages = bed.read(np.s_[rows, columns], dtype="int8")
    return np.where(dosages < 0, -1, dosages)


def _shape(value: Any) -> str:
    return " × ".join(f"{length:,}" for length in value.shape)


def _type(value: Any) -> str:
    if isinstance(value, pd.DataFrame):
        return "DataFrame"
    if value.dtype == object:
        return "text"
    return str(value.dtype).removeprefix("torch.") + (" CSR" if value.layout == torch.sparse_csr else "")
