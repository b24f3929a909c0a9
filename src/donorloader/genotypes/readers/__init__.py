"""Files of genotypes, read by variants: one kind a module, each on the library that is kept for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from ._reader import IdBy, Multiallelic, PackedReader, VariantBlock, VariantReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["IdBy", "Multiallelic", "PackedReader", "VariantBlock", "VariantReader", "file_kind", "open_variants"]

# By the end of the name. The rest of a file set is named to be told of.
_KINDS = {
    ".bed": "bed",
    ".pgen": "pgen",
    ".bgen": "bgen",
    ".vcz": "vcz",
    ".vcf": "vcf",
    ".vcf.gz": "vcf",
    ".vcf.bgz": "vcf",
    ".bcf": "vcf",
}
_COMPANIONS = {".bim": ".bed", ".fam": ".bed", ".pvar": ".pgen", ".psam": ".pgen", ".pvar.zst": ".pgen"}


def file_kind(path: Path) -> str | None:
    """Which reader a file is for: `"bed"`, `"pgen"`, `"bgen"`, `"vcz"`, `"vcf"`, or `None`.

    Raises
    ------
    ValueError
        If the file belongs to a set that is read by another of its files.
    """
    name = path.name.lower()
    for suffix, main in _COMPANIONS.items():
        if name.endswith(suffix):
            kind = "PLINK file set" if main == ".bed" else "PLINK 2 file set"
            raise ValueError(f"Name the {main} of a {kind}, not {str(path)!r}.")
    for suffix, kind in _KINDS.items():
        if name.endswith(suffix):
            return kind
    if path.is_dir() and (path / "call_genotype").is_dir():  # VCF Zarr under another name
        return "vcz"
    return None


def open_variants(
    path: Path, *, id_by: IdBy = "iid", multiallelic: Multiallelic = "split", read_dosages: bool | None = None
) -> VariantReader:
    """Open a file of genotypes.

    Parameters
    ----------
    path
        A file that `file_kind` knows.
    id_by
        Which ids the donors of PLINK files have.
    multiallelic
        What becomes of records with several ALT alleles: one variant for each, or an error.
    read_dosages
        Whether to read dosages (float32) where a file may hold both. `None`: hard calls (int8), but of a BGEN, which
        has nothing but probabilities.

    Raises
    ------
    FileNotFoundError
        If the file or one that belongs to it does not exist.
    ImportError
        If the library that reads it is not installed.
    ValueError
        If it is not what its name says, or an option has no effect on its kind.
    """
    kind = file_kind(path)
    if multiallelic not in get_args(Multiallelic):
        raise ValueError(f"multiallelic must be one of {get_args(Multiallelic)}, got {multiallelic!r}.")
    if kind not in ("bed", "pgen") and id_by != "iid":
        raise ValueError(f"id_by={id_by!r} chooses ids of PLINK files; {str(path)!r} is none. Leave it out.")
    if kind == "bed" and read_dosages:
        raise ValueError(
            f"read_dosages=True asks for dosages, but a .bed holds hard calls: {str(path)!r}. Leave it out."
        )
    if kind == "bgen" and read_dosages is False:
        raise ValueError(
            f"read_dosages=False asks for hard calls, but a .bgen holds probabilities: {str(path)!r}. Leave it out."
        )
    if not path.exists():
        raise FileNotFoundError(f"The file of genotypes {str(path)!r} does not exist.")

    def open_bed() -> VariantReader:
        from ._bed import BedReader

        return BedReader(path, id_by=id_by)

    def open_pgen() -> VariantReader:
        from ._pgen import PgenReader

        return PgenReader(path, id_by=id_by, multiallelic=multiallelic, read_dosages=bool(read_dosages))

    def open_bgen() -> VariantReader:
        from ._bgen import BgenReader

        return BgenReader(path, multiallelic=multiallelic)

    def open_vcz() -> VariantReader:
        from ._vcz import VczReader

        return VczReader(path, multiallelic=multiallelic, read_dosages=bool(read_dosages))

    def open_vcf() -> VariantReader:
        from ._vcf import VcfReader

        return VcfReader(path, multiallelic=multiallelic, read_dosages=bool(read_dosages))

    openers: dict[str | None, Callable[[], VariantReader]] = {
        "bed": open_bed,
        "pgen": open_pgen,
        "bgen": open_bgen,
        "vcz": open_vcz,
        "vcf": open_vcf,
    }
    return openers[kind]()
