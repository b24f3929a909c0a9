"""The genotypes of a study to be: opened, narrowed to the donors and variants asked for, written by donor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from donorloader._progress import progress_bar
from donorloader.genotypes import GenotypeStore, open_genotypes
from donorloader.genotypes._transpose import transpose
from donorloader.genotypes._write import check_layout, write_genotypes
from donorloader.genotypes.readers import file_kind, open_variants
from donorloader.study import is_study

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from donorloader.genotypes._selection import Selection
    from donorloader.genotypes._write import DosageType, GenotypeCounts, Layout
    from donorloader.genotypes.readers import IdBy, Multiallelic, VariantReader

__all__ = ["Panel", "open_panel"]


@dataclass
class Panel:
    """Genotypes of any kind, and what of them is wanted.

    Attributes
    ----------
    source
        Rows of donors, or a file that is read by variants.
    selection
        What is wanted of a file.
    samples
        Positions of the donors that are wanted.
    owned
        Whether the source was opened here.
    layout, dosage_type
        How it is to be written.
    notes
        What writing has found, a sentence each.
    """

    source: GenotypeStore | VariantReader
    selection: Selection
    samples: NDArray[np.int64]
    owned: bool
    layout: Layout | None
    dosage_type: DosageType | None
    notes: list[str] = field(default_factory=list)

    @property
    def ids(self) -> NDArray[np.object_]:
        """Ids of the donors that are wanted."""
        return self.source.ids[self.samples]

    def write(
        self,
        path: Path,
        *,
        only: NDArray[np.object_] | None,
        memory: int,
        progress: bool | None,
    ) -> GenotypeCounts:
        """Write the store.

        Parameters
        ----------
        path
            The store to make. A scratch file may lie beside it meanwhile.
        only
            Ids of the donors to write, `None` for all that are wanted.
        memory
            Bytes that this may take. [Unit: byte]
        progress
            Show bars; `None`: on a terminal.
        """
        chosen = self.samples if only is None else self.samples[np.isin(self.ids, only)]
        how: Any = {"layout": self.layout, "dosage_type": self.dosage_type}
        if isinstance(self.source, GenotypeStore):
            with progress_bar(progress, "writing donors", len(chosen)) as on_rows:
                return write_genotypes(self.source, path, rows=chosen, memory=memory, on_rows=on_rows, **how)
        with progress_bar(progress, "reading variants", self.source.n_variants) as on_variants:
            rows = transpose(
                self.source,
                path.with_suffix(".scratch"),
                samples=chosen,
                selection=self.selection,
                memory=memory,
                on_variants=on_variants,
            )
        with rows, progress_bar(progress, "writing donors", len(chosen)) as on_rows:
            self.notes += rows.notes
            return write_genotypes(rows, path, memory=memory, on_rows=on_rows, **how)

    def close(self) -> None:
        """Close what was opened here."""
        if self.owned:
            self.source.close()


def open_panel(
    genotypes: Any,
    *,
    genotype_layer: str | None,
    id_by: IdBy,
    selection: Selection,
    multiallelic: Multiallelic,
    read_dosages: bool | None,
    layout: Layout | None,
    dosage_type: DosageType | None,
) -> Panel | None:
    """Open genotypes of any kind.

    Raises
    ------
    FileNotFoundError
        If a file does not exist.
    ImportError
        If a file needs a library that is not installed.
    KeyError
        If the selection names what is not there.
    ValueError, TypeError
        If the genotypes cannot be used, or an option has no effect on their kind.
    """
    kind = file_kind(genotypes) if isinstance(genotypes, Path) else None
    if kind is not None:
        if genotype_layer is not None:
            raise ValueError(
                f"genotype_layer={genotype_layer!r} chooses a layer of an AnnData; {genotypes.name!r} has none. "
                "Leave it out."
            )
        reader = open_variants(genotypes, id_by=id_by, multiallelic=multiallelic, read_dosages=read_dosages)
        try:
            check_layout(reader.dtype, layout, dosage_type)
            samples = selection.choose_samples(reader.ids, reader.path)
            selection.choose_variants(reader.var(), reader.path)  # now, and not after the cells are written
        except BaseException:
            reader.close()
            raise
        return Panel(reader, selection, samples, True, layout, dosage_type)
    if id_by != "iid":
        raise ValueError(f"id_by={id_by!r} chooses ids of PLINK files; these genotypes are none. Leave it out.")
    effects = {"multiallelic": multiallelic != "split", "read_dosages": read_dosages is not None, **selection.options}
    if genotypes is None:
        effects |= {"layout": layout is not None, "dosage_type": dosage_type is not None}
    if set_ := [name for name, is_set in effects.items() if is_set]:
        remedy = (
            "Leave it out."
            if genotypes is None
            else "Subset an AnnData before it is prepared: `adata[donors, variants].write_h5ad(...)`."
        )
        raise ValueError(f"{', '.join(set_)} tells what to read of a file such as .bed, .pgen or .vcf. {remedy}")
    if genotypes is None:
        if genotype_layer is not None:
            raise ValueError(
                f"genotype_layer={genotype_layer!r} chooses a layer of genotypes, but there are none. Leave it out."
            )
        return None
    if isinstance(genotypes, Path):
        if is_study(genotypes):
            raise ValueError(f"{str(genotypes)!r} is a study; name the genotypes in it.")
        if not genotypes.exists():
            raise FileNotFoundError(f"The genotypes {str(genotypes)!r} do not exist.")
    store = open_genotypes(genotypes, layer=genotype_layer)
    try:
        check_layout(store.dtype, layout, dosage_type)
    except BaseException:
        if store is not genotypes:
            store.close()
        raise
    return Panel(store, selection, np.arange(store.ids.size), store is not genotypes, layout, dosage_type)
