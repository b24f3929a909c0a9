"""One small panel in every format of genotypes, and its values counted by hand from the alleles of each call."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import bgen
import cyvcf2
import numpy as np
import pgenlib
import zarr
from bed_reader import to_bed

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pandas as pd

#: A call without this copy (haploid), and a missing one.
NO_COPY, MISSING = -2, -1
#: Text that looks like numbers, like nothing, and with spaces of other writers' kinds.
IDS = ["7", "007", "NA", "s-3", "d1", "1e5", "s_6", "é7", "d10", "d11", "x"]
FIDS = ["0", "0", "fam", "fam", "0", "fam", "f2", "f2", "0", "0", "0"]
N_RECORDS = 61


@dataclass(frozen=True)
class SmallPanel:
    """Records and their calls.

    Attributes
    ----------
    chrom, pos, ids, alleles
        Of each record; `alleles` begins with REF.
    calls
        (n_records, n_donors, 2) allele numbers, `MISSING` or `NO_COPY`.
    """

    chrom: list[str]
    pos: list[int]
    ids: list[str]
    alleles: list[tuple[str, ...]]
    calls: np.ndarray

    def expected(self, var: pd.DataFrame) -> np.ndarray:
        """(n_donors, n_variants) copies of `a1`, NaN where missing, counted call by call."""
        where = {(c, p, a[0]): i for i, (c, p, a) in enumerate(zip(self.chrom, self.pos, self.alleles, strict=True))}
        where |= {
            (c, p, alt): i
            for i, (c, p, a) in enumerate(zip(self.chrom, self.pos, self.alleles, strict=True))
            for alt in a[1:]
        }
        out = np.full((len(IDS), len(var)), np.nan)
        for j, (chrom, pos, a1) in enumerate(zip(var["chrom"], var["pos"], var["a1"], strict=True)):
            record = where[chrom, pos, a1]
            counted = self.alleles[record].index(a1)
            for i, call in enumerate(self.calls[record].tolist()):
                copies = [allele for allele in call if allele != NO_COPY]
                if copies and MISSING not in copies:
                    out[i, j] = copies.count(counted)
        return out

    def without(self, *, multiallelic: bool = False, haploid: bool = False) -> SmallPanel:
        """The panel as a format can hold it: two alleles a record, and calls of one copy as two of the same."""
        keep = [i for i, a in enumerate(self.alleles) if not multiallelic or len(a) == 2]
        calls = self.calls[keep].copy()
        if haploid:
            calls[..., 1] = np.where(calls[..., 1] == NO_COPY, calls[..., 0], calls[..., 1])
        return SmallPanel(
            *([values[i] for i in keep] for values in (self.chrom, self.pos, self.ids, self.alleles)), calls
        )


def small_panel() -> SmallPanel:
    """Chromosomes 1, 2 and X; missing calls; ids that are absent or repeat; three alleles twice; calls of one copy."""
    rng = np.random.default_rng(11)
    chrom = ["1"] * 30 + ["2"] * 20 + ["X"] * (N_RECORDS - 50)
    pos = [10 * (i + 1) for i in range(N_RECORDS)]
    ids = [f"rs{i}" for i in range(N_RECORDS)]
    ids[3] = ids[4] = "."
    ids[7] = ids[8] = "rs7"
    alleles: list[tuple[str, ...]] = [("ACGT"[i % 4], "ACGT"[(i + 1 + i % 3) % 4]) for i in range(N_RECORDS)]
    alleles[12], alleles[33] = ("A", "G", "T"), ("C", "CTT", "A")
    frequency = rng.uniform(0.02, 0.6, (N_RECORDS, 1, 1))
    calls = (rng.random((N_RECORDS, len(IDS), 2)) < frequency).astype(int)
    calls[[12, 33]] = rng.integers(0, 3, (2, len(IDS), 2))
    calls[rng.random((N_RECORDS, len(IDS))) < 0.12] = MISSING
    calls[20] = MISSING  # nobody has a call
    calls[21] = 0  # nobody has the ALT allele
    haploid = calls[52:57, ::2]
    haploid[..., 1] = NO_COPY
    return SmallPanel(chrom, pos, ids, alleles, calls)


def write_panel(panel: SmallPanel, folder: Path, kind: str) -> Path:
    """Write the panel as a file of the kind, and return its path."""
    return {
        "bed": _write_bed,
        "pgen": _write_pgen,
        "bgen": _write_bgen,
        "vcf": _write_vcf,
        "vcf.gz": _write_vcf_gz,
        "bcf": _write_bcf,
        "vcz2": lambda panel, folder: write_vcz(panel, folder, 2),
        "vcz3": lambda panel, folder: write_vcz(panel, folder, 3),
    }[kind](panel, folder)


def fam_lines(fids: Iterable[str] = FIDS, ids: Iterable[str] = IDS) -> str:
    """A `.fam` with sexes and a phenotype."""
    return "".join(
        f"{fid} {iid} 0 0 {i % 3} {[-9, 1, 2][i % 3]}\n" for i, (fid, iid) in enumerate(zip(fids, ids, strict=True))
    )


def _write_bed(panel: SmallPanel, folder: Path) -> Path:
    """Every third variant counts REF: allele 1 of a `.bim` is either."""
    counted = [0 if i % 3 == 0 else 1 for i in range(len(panel.ids))]
    calls = (panel.calls == np.array(counted)[:, None, None]).sum(axis=2)
    calls[(panel.calls < 0).any(axis=2)] = -127
    properties = {
        "fid": FIDS,
        "iid": IDS,
        "sid": panel.ids,
        "chromosome": panel.chrom,
        "bp_position": panel.pos,
        "allele_1": [a[k] for a, k in zip(panel.alleles, counted, strict=True)],
        "allele_2": [a[1 - k] for a, k in zip(panel.alleles, counted, strict=True)],
    }
    to_bed(folder / "panel.bed", calls.T.astype(np.int8), properties=properties)
    (folder / "panel.fam").write_text(fam_lines())
    return folder / "panel.bed"


def pvar_text(panel: SmallPanel) -> str:
    lines = ["##fileformat=VCFv4.3\n", "#CHROM\tPOS\tID\tREF\tALT\n"]
    records = zip(panel.chrom, panel.pos, panel.ids, panel.alleles, strict=True)
    return "".join([*lines, *(f"{c}\t{p}\t{i}\t{a[0]}\t{','.join(a[1:])}\n" for c, p, i, a in records)])


def psam_text() -> str:
    rows = zip(FIDS, IDS, range(len(IDS)), strict=True)
    return "".join(["#FID\tIID\tSEX\tage\n", *(f"{f}\t{i}\t{n % 3 or 'NA'}\t{30 + n}\n" for f, i, n in rows)])


def _write_pgen(panel: SmallPanel, folder: Path) -> Path:
    path = folder / "panel.pgen"
    writer = pgenlib.PgenWriter(bytes(path), len(IDS), variant_ct=len(panel.ids), nonref_flags=False, allele_ct_limit=3)
    for alleles, calls in zip(panel.alleles, panel.calls, strict=True):
        codes = np.where((calls < 0).any(axis=1, keepdims=True), -9, calls).astype(np.int32)
        writer.append_alleles(codes.ravel(), allele_ct=len(alleles))
    writer.close()
    (folder / "panel.pvar").write_text(pvar_text(panel))
    (folder / "panel.psam").write_text(psam_text())
    return path


def _write_bgen(panel: SmallPanel, folder: Path) -> Path:
    path = folder / "panel.bgen"
    with bgen.BgenWriter(path, len(IDS), samples=IDS) as file:
        for i, (alleles, calls) in enumerate(zip(panel.alleles, panel.calls, strict=True)):
            ploidy = (calls != NO_COPY).sum(axis=1).astype(np.uint8)
            genotypes = [(a, b) for b in range(len(alleles)) for a in range(b + 1)]
            probabilities = np.full((len(IDS), len(genotypes)), np.nan)
            for donor, call in enumerate(calls):
                if (call == MISSING).any():
                    continue
                columns = genotypes if ploidy[donor] == 2 else [(a,) for a in range(len(alleles))]
                probabilities[donor, : len(columns)] = 0
                probabilities[donor, columns.index(tuple(sorted(call[call != NO_COPY])))] = 1
            file.add_variant(f"v{i}", panel.ids[i], panel.chrom[i], panel.pos[i], alleles, probabilities, ploidy=ploidy)
    return path


def vcf_text(panel: SmallPanel, *, ids: Iterable[str] = IDS) -> str:
    """GT, every other call phased; DS, the count and a quarter."""
    lines = ["##fileformat=VCFv4.2", *(f"##contig=<ID={c},length=9999>" for c in dict.fromkeys(panel.chrom))]
    lines.append('##FORMAT=<ID=GT,Number=1,Type=String,Description="Genotype">')
    lines.append('##FORMAT=<ID=DS,Number=A,Type=Float,Description="Dosage">')
    lines.append("\t".join(["#CHROM", "POS", "ID", "REF", "ALT", "QUAL", "FILTER", "INFO", "FORMAT", *list(ids)]))
    for c, p, i, a, calls in zip(panel.chrom, panel.pos, panel.ids, panel.alleles, panel.calls, strict=True):
        fields = []
        for donor, call in enumerate(calls.tolist()):
            copies = [x for x in call if x != NO_COPY]
            gt = "/|"[donor % 2].join("." if x == MISSING else str(x) for x in copies)
            known = MISSING not in copies
            ds = ",".join(str(copies.count(k) * 0.75 + 0.25) if known else "." for k in range(1, len(a)))
            fields.append(f"{gt}:{ds}")
        lines.append("\t".join([c, str(p), i, a[0], ",".join(a[1:]), ".", ".", ".", "GT:DS", *fields]))
    return "\n".join(lines) + "\n"


def _write_vcf(panel: SmallPanel, folder: Path) -> Path:
    (folder / "panel.vcf").write_text(vcf_text(panel))
    return folder / "panel.vcf"


def _write_vcf_gz(panel: SmallPanel, folder: Path) -> Path:
    (folder / "panel.vcf.gz").write_bytes(gzip.compress(vcf_text(panel).encode()))
    return folder / "panel.vcf.gz"


def _write_bcf(panel: SmallPanel, folder: Path, mode: str = "wb") -> Path:
    source, path = folder / "source.vcf", folder / ("panel.bcf" if mode == "wb" else "panel.vcf.gz")
    source.write_text(vcf_text(panel))
    records = cyvcf2.VCF(str(source))
    writer = cyvcf2.Writer(str(path), records, mode=mode)
    for record in records:
        writer.write_record(record)
    writer.close()
    records.close()
    return path


def write_vcz(panel: SmallPanel, folder: Path, zarr_format: int, *, leave_out: Iterable[str] = ()) -> Path:
    path = folder / f"panel{zarr_format}.vcz"
    contigs = list(dict.fromkeys(panel.chrom))
    widest = max(map(len, panel.alleles))
    dosages = np.stack(
        [
            np.where((panel.calls == MISSING).any(axis=2), np.nan, (panel.calls == k).sum(axis=2) * 0.75 + 0.25)
            for k in range(1, widest)
        ],
        axis=2,
    )
    text: Any = np.dtypes.StringDType()
    arrays = {
        "call_genotype": panel.calls.astype(np.int8),
        "call_DS": dosages.astype(np.float32),
        "variant_position": np.array(panel.pos, dtype=np.int32),
        "variant_contig": np.array([contigs.index(c) for c in panel.chrom], dtype=np.int8),
        "variant_id": np.array(panel.ids, dtype=text),
        "variant_allele": np.array([[*a, *[""] * (widest - len(a))] for a in panel.alleles], dtype=text),
        "contig_id": np.array(contigs, dtype=text),
        "sample_id": np.array(IDS, dtype=text),
    }
    group = zarr.open_group(str(path), mode="w", zarr_format=zarr_format)
    group.attrs["vcf_zarr_version"] = "0.4"
    for name, values in arrays.items():
        if name in leave_out:
            continue
        chunks = (7, 4, 2)[: values.ndim] if name.startswith("call") else values.shape
        array = group.create_array(name, shape=values.shape, chunks=chunks, dtype=values.dtype)
        array[...] = values
    return path
