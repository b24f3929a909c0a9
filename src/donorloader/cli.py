"""The command line: `donorloader prepare`, `donorloader inspect`, `donorloader demo`."""

from __future__ import annotations

from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["app", "main"]

app = typer.Typer(
    help="Stream single cells and the genotypes of their donors, joined.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class IdByOption(StrEnum):
    """Which ids a PLINK file set is keyed by."""

    iid = "iid"
    fid_iid = "fid_iid"


class LayoutOption(StrEnum):
    """How hard calls are stored."""

    PACKED = "packed"
    PLAIN = "plain"
    BOTH = "both"


class DosageTypeOption(StrEnum):
    """How dosages are stored."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    UINT8 = "uint8"


class MultiallelicOption(StrEnum):
    """What becomes of records with several ALT alleles."""

    SPLIT = "split"
    ERROR = "error"


@app.command()
def prepare(
    cells: Annotated[
        list[Path], typer.Argument(help="AnnData of cells (.h5ad, .zarr), or one DonorData (.dd.h5, .dd.zarr).")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The study folder to make.")],
    genotypes: Annotated[
        Path | None,
        typer.Option(
            "--genotypes",
            "-g",
            help="PLINK .bed or .pgen, .bgen, .vcf(.gz), .bcf, .vcz, or AnnData (.h5ad, .zarr) of donors × variants.",
        ),
    ] = None,
    donor_key: Annotated[
        str | None, typer.Option(help="Column of obs with each cell's donor. Default: donor_id, or a DonorData's own.")
    ] = None,
    layer: Annotated[str | None, typer.Option(help="Layer of the cells to take in place of X.")] = None,
    obs_column: Annotated[
        list[str] | None, typer.Option(help="Column of obs to keep beside the donors; may be repeated. Default: all.")
    ] = None,
    genotype_layer: Annotated[str | None, typer.Option(help="Layer of the genotypes to take in place of X.")] = None,
    id_by: Annotated[IdByOption, typer.Option(help="Donor ids of a PLINK .bed or .pgen.")] = IdByOption.iid,
    samples: Annotated[
        Path | None, typer.Option(help="File of donors to take of the genotypes, one id a line. Default: all.")
    ] = None,
    region: Annotated[
        list[str] | None,
        typer.Option(help="Variants to take: chr, chr:position or chr:start-end, 1-based, inclusive; may be repeated."),
    ] = None,
    variants: Annotated[
        Path | None, typer.Option(help="File of variants to take, one id a line. Default: all.")
    ] = None,
    maf: Annotated[
        float | None, typer.Option(help="Least frequency of a variant's rarer allele, e.g. 0.01. Default: any.")
    ] = None,
    max_missing: Annotated[
        float | None,
        typer.Option(help="Largest part of a variant's calls that may be missing, e.g. 0.05. Default: any."),
    ] = None,
    multiallelic: Annotated[
        MultiallelicOption, typer.Option(help="Records with several ALT alleles: one variant for each, or an error.")
    ] = MultiallelicOption.SPLIT,
    read_dosages: Annotated[
        bool, typer.Option("--read-dosages", help="Read dosages of a .pgen, VCF or .vcz in place of hard calls.")
    ] = False,
    layout: Annotated[
        LayoutOption | None,
        typer.Option(help="How hard calls are stored: at two bits, as a plain matrix X, or both. Default: packed."),
    ] = None,
    dosage_type: Annotated[
        DosageTypeOption | None, typer.Option(help="How dosages are stored. Default: as they come.")
    ] = None,
    donor_map: Annotated[
        Path | None, typer.Option(help="Two tab-separated columns: donor id in the cells, id in the genotypes.")
    ] = None,
    only_donors_with_cells: Annotated[
        bool, typer.Option("--only-donors-with-cells", help="Leave out genotypes of donors without cells.")
    ] = False,
    no_bags: Annotated[
        bool, typer.Option("--no-bags", help="Do not write the cells a second time, grouped by donor, for bags.")
    ] = False,
    memory: Annotated[str, typer.Option(help="Memory that this may take.")] = "4GB",
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a study that is at --out.")] = False,
    debug: Debug = False,
) -> None:
    """Write cells and genotypes as a study, the folder that a DonorLoader streams from."""
    with _one_line_errors(debug=debug):
        from donorloader.prepare import prepare as prepare_study
        from donorloader.report import Report, print_report

        study = prepare_study(
            list(cells),
            genotypes,
            out=out,
            donor_key=donor_key,
            layer=layer,
            obs_columns=obs_column or None,
            genotype_layer=genotype_layer,
            id_by=id_by.value,
            samples=samples,
            regions=region or None,
            variants=variants,
            maf=maf,
            max_missing=max_missing,
            multiallelic=multiallelic.value,
            read_dosages=read_dosages or None,
            layout=None if layout is None else layout.value,
            dosage_type=None if dosage_type is None else dosage_type.value,
            donor_map=donor_map,
            only_donors_with_cells=only_donors_with_cells,
            bags=not no_bags,
            memory=memory,
            seed=seed,
            overwrite=overwrite,
        )
        print_report(Report.from_dict(study.meta["report"]))
        typer.echo(f"\nwritten to {out}")


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Study, annbatch collection, AnnData, or a file of genotypes.")],
    donor_key: Annotated[
        str | None,
        typer.Option(help="Column of obs with each cell's donor, where the store does not say. Default: donor_id."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Print what is in a study or store."""
    with _one_line_errors(debug=debug):
        from donorloader._inspect import inspect_store
        from donorloader.report import print_report

        print_report(inspect_store(path, donor_key=donor_key))


@app.command()
def demo(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Keep the raw files and the study in this folder. Default: temporary."),
    ] = None,
    bags: Annotated[
        bool,
        typer.Option(
            "--bags", help="Bags: one donor's cells at a time, and the disease of donors never seen in training."
        ),
    ] = False,
    genotypes: Annotated[
        bool, typer.Option("--genotypes", help="With --bags: also train a model that gets each bag's genotypes.")
    ] = False,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the cells in training. Default: 12, with --bags 10.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the simulation, the order of cells and the model.")] = 0,
    picture: Annotated[
        Path | None,
        typer.Option(help="The .png to write. Default: donorloader-demo.png, with --bags donorloader-demo-bags.png."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Simulate a small study, prepare it, stream it, train a model on it, and recover the effects that were planted."""
    with _one_line_errors(debug=debug):
        if genotypes and not bags:
            raise ValueError(
                "--genotypes belongs to the demo of bags: add --bags. Without it, genotypes are always in."
            )
        from donorloader import demo

        if bags:
            demo.run_bags_demo(
                out=out,
                epochs=demo.BAGS_EPOCHS if epochs is None else epochs,
                seed=seed,
                picture=picture or demo.BAGS_PICTURE,
                genotypes=genotypes,
            )
        else:
            demo.run_demo(
                out=out,
                epochs=demo.EPOCHS if epochs is None else epochs,
                seed=seed,
                picture=picture or demo.PICTURE,
            )


def main() -> None:
    """Entry point of the `donorloader` command."""
    app()


@contextmanager
def _one_line_errors(*, debug: bool) -> Iterator[None]:
    """Turn an exception into one message and exit code 1; with `debug`, let it through."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        typer.echo(f"error: {_message(error)}", err=True)
        raise typer.Exit(1) from None


def _message(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])  # str() of a KeyError is the repr of its message
    if isinstance(error, ValueError | TypeError | OSError | ImportError):
        return str(error)
    return f"{type(error).__name__}: {error} (rerun with --debug for the traceback)"
