"""The front door for joined batches: shuffled cells with the genotype row of every donor among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from donorloader._choose import as_donors
from donorloader._engine import Engine
from donorloader._options import GenotypeOptions, ReadOptions, SamplingOptions
from donorloader._ordering import Ordering
from donorloader._ranks import find_ranks
from donorloader._stream_loader import StreamLoader, check_seed
from donorloader._tables import open_tables
from donorloader.samplers import SubsetSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from annbatch.abc import Sampler

    from donorloader._choose import Donors
    from donorloader.genotypes import Encoding, MissingCalls
    from donorloader.samplers import Share

__all__ = ["DonorLoader"]


class DonorLoader(StreamLoader):
    """Stream shuffled cells together with the genotypes of their donors.

    Cells are read by annbatch on one thread. On another, a replica of the same sampler says which donors the coming
    batches need, and their genotype rows are read and gathered ahead of time. Each batch is joined from both, and
    the donors of the two sides are compared.

    Parameters
    ----------
    cells
        A study (its folder, or :func:`open_study`), which brings its genotypes along; or the path of an annbatch
        collection, of an AnnData ``.zarr`` or of a DonorData ``.dd.zarr``; a :class:`annbatch.DatasetCollection`; an
        AnnData in memory or a list of these; a cellink ``DonorData``, which brings its genotypes along.
    genotypes
        Donors × variants with donor ids as ``obs_names``: the path of an AnnData ``.h5ad`` or ``.zarr`` or of an
        annbatch collection; an AnnData, in memory or backed; a :class:`GenotypeStore`; `None` for cells only.
    donor_key
        Column of the cells' ``obs`` with the donor of each cell. Default: that of the study or DonorData, else
        ``"donor_id"``. Ids are compared as text.
    batch_size
        Cells a batch.
    shuffle
        Whether cells come in random order: chunks of `chunk_size` cells are drawn at random, and the cells of a window
        of `preload_nchunks` chunks are shuffled together.
    drop_last
        Whether to leave out a last batch that is not full; where no batch would be left, an error.
    seed
        With the epoch, what the order depends on, and all it depends on.
    chunk_size, preload_nchunks
        Contiguous cells a read, and reads a window. Default: near 64 and 16,384 cells a window, chosen so that a
        window holds whole batches, as annbatch requires.
    batch_sampler
        Any annbatch sampler, in place of the six options above it but for `seed`. With `donors` or `cells_query`, it
        samples from the cells that are left, numbered from 0.
    obs_columns
        Columns of ``obs`` to yield with each batch.
    variants
        The variants to yield, in this order: names, positions, a boolean mask, a slice, or :func:`cis_window` for those
        near genes. Default: all.
    donors
        The donors to use: their ids; a condition as text over columns of donors, e.g. ``"disease == 'case'"``, or a
        function of the table of donors that gives one bool for each, in the order of the table or, as a Series, by id;
        or a split from :func:`split_donors` (or of cells, from :func:`split_cells`). The table has the ids as index,
        the columns of the genotypes' ``obs``, those of the cells' ``obs`` that are constant within donors, and
        ``n_cells``; a function has all of them read, a condition only those that it names. Default: all.
    cells_query
        Condition on columns of ``obs``, as :meth:`pandas.DataFrame.query` takes it, e.g. ``"cell_type == 'B'"``.
    missing_donors
        What to do about donors that have cells but no row of genotypes: ``"error"``, ``"drop"`` their cells (a line of
        the logger ``donorloader`` says how many), or give them rows of ``"nan"``, with `donor_features` in floating
        point.
    donor_rows
        Which rows a batch brings: those of its own donors (``"batch"``), or one table with those of all donors of its
        load request, shared by the batches of that request (``"window"``), which spares a copy where genotypes are
        wide.
    genotype_layer
        Layer of the genotypes to read in place of `X`.
    genotype_encoding
        What `donor_features` hold: `None`, the values as they are stored; ``"dosage"``, float32; ``"count"``, int8, -1
        where missing; ``"presence"``, float32, 1 where the counted allele is there at all; ``"standardized"``, float32
        (g − 2p) / √(2p(1 − p)) with the frequency p of the counted allele over all donors of the store, 0 for variants
        that do not vary; ``"onehot"``, int8 of shape (n_donors, n_variants, 3).
    missing_calls
        What missing calls become: ``"nan"``, ``"mean"`` (2p), ``"zero"``, or an ``"error"`` that names one. Default: as
        they are stored; with an encoding NaN, or -1 of ``"count"``, 0 of ``"standardized"`` (its mean) and no 1 of
        ``"onehot"``.
    genotype_memory
        Budget for genotype rows that stay in memory, in bytes or as text such as ``"2GB"``; packed stores are held
        packed, a byte for four calls. If the rows of the chosen variants and donors in use fit, they stay once they are
        read; otherwise those that are needed soonest do. ``"auto"``: a quarter of the memory that is free. 0: no more
        than the rows of one load request.
    to
        ``"torch"``; ``"numpy"`` for numpy arrays and scipy CSR; or ``"jax"`` for JAX arrays on its default device and
        BCSR, in 32 bits unless JAX is told to use 64. JAX compiles a function again for every shape, and with BCSR for
        every number of stored values: `densify` and `drop_last` give one shape.
    device
        Device for the tensors. Default: they stay on the CPU.
    densify
        Whether `X` is dense float32. On the CPU this is many times faster than torch's ``to_dense()``.
    prefetch
        Batches that may be ready ahead of the loop. Default: those of one load request, so that the next request is
        read while they are used (4 if `densify`, whose windows are read ahead on their own). 0: no threads at all.
    read_next_epoch
        Whether to read the beginning of the next epoch while the last batches of this one are used, so that a loop over
        epochs never waits for a first load request. After the last one, what was read waits until :meth:`close`.
    preload_to_gpu
        Passed to annbatch, which then handles X on the GPU by cupy.
    rank, world_size
        This process among those that share each epoch: every rank takes other cells, in as many batches. Default: those
        of ``torch.distributed`` if it is initialised, else of the environment (``RANK`` and ``WORLD_SIZE`` as torchrun
        sets them, ``SLURM_PROCID`` and ``SLURM_STEP_NUM_TASKS`` as srun does), else one rank.
    num_canonical_shards
        Numbers of ranks that divide it have the same cells at each step, and resume each other's states. Default: 64
        (or a multiple of `world_size` near it), and 16 or more for small data. On one rank, the order is the ordinary
        one unless it is given.
    uneven
        Where the cells do not give all ranks the same number of batches: ``"drop"`` the last ones, fewer than there are
        ranks and others each epoch, or ``"pad"``, repeating a cell on the ranks that lack one.
    genotypes_on_device
        Whether rows of genotypes lie packed on `device` and are unpacked there. Default: on CUDA, where the store is
        packed and all rows take a quarter of what is free there at the most.
    check
        Whether to compare, in every batch, the donor of each cell with the donor whose row it gets. Costs under 1% of
        the time.

    Raises
    ------
    ValueError, KeyError, TypeError, FileNotFoundError
        If an option, a store or an id is wrong; the message gives the rule, the value, and the remedy.

    Notes
    -----
    A batch is a dict:

    ``X``
        (n_cells, n_genes) torch sparse CSR in the type of the store; dense float32 with `densify`.
    ``index``
        (n_cells,) int64, the row of each cell in the collection.
    ``obs``
        DataFrame of `obs_columns`, indexed by ``index``; `None` without. Categories are the same in every batch.
    ``unique_donors``
        (n_donors,) ids, as an object array of text, in the order of :attr:`donors`.
    ``donor_idx``
        (n_cells,) int64, the row of ``donor_features`` (and of ``unique_donors``) of each cell.
    ``donor_features``
        (n_donors, n_variants) genotypes in the type of the store; `None` without genotypes.

    Every call of ``iter()`` begins a new pass, of the next epoch, also if the one before was cut short.

    Examples
    --------
    >>> with DonorLoader("study/", batch_size=512) as loader:  # doctest: +SKIP
    ...     for batch in loader:
    ...         genotype_of_each_cell = batch["donor_features"][batch["donor_idx"]]
    """

    def __init__(
        self,
        cells: Any,
        genotypes: Any = None,
        *,
        donor_key: str | None = None,
        batch_size: int = 1024,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        chunk_size: int | None = None,
        preload_nchunks: int | None = None,
        batch_sampler: Sampler | None = None,
        obs_columns: Sequence[str] = (),
        variants: Any = None,
        donors: Donors = None,
        cells_query: str | None = None,
        missing_donors: Literal["error", "drop", "nan"] = "error",
        donor_rows: Literal["batch", "window"] = "batch",
        genotype_layer: str | None = None,
        genotype_encoding: Encoding | None = None,
        missing_calls: MissingCalls | None = None,
        genotype_memory: int | str = "auto",
        to: Literal["torch", "numpy", "jax"] = "torch",
        device: str | torch.device | None = None,
        densify: bool = False,
        prefetch: int | None = None,
        read_next_epoch: bool = False,
        preload_to_gpu: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        num_canonical_shards: int | None = None,
        uneven: Literal["drop", "pad"] = "drop",
        genotypes_on_device: bool | None = None,
        check: bool = True,
    ):
        donors = as_donors(donors)
        self._arguments = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        options = ReadOptions.checked(
            obs_columns=obs_columns,
            donor_rows=donor_rows,
            to=to,
            device=device,
            densify=densify,
            prefetch=prefetch,
            read_next_epoch=read_next_epoch,
            preload_to_gpu=preload_to_gpu,
            genotypes_on_device=genotypes_on_device,
            check=check,
        )
        chosen = GenotypeOptions.checked(
            variants=variants,
            missing_donors=missing_donors,
            genotype_layer=genotype_layer,
            genotype_encoding=genotype_encoding,
            missing_calls=missing_calls,
            genotype_memory=genotype_memory,
        )
        sampling = SamplingOptions(
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            chunk_size=chunk_size,
            preload_nchunks=preload_nchunks,
        )
        seed = check_seed(seed)
        ranks = find_ranks(rank, world_size, num_canonical_shards, uneven)
        ordinary, window_cells = sampling.make(batch_sampler)
        tables = open_tables(
            cells,
            genotypes,
            donor_key=donor_key,
            donors=donors,
            cells_query=cells_query,
            genotype_options=chosen,
        )
        used = tables.match.keep

        def make(share: Share | None, *, unit: int | None = None, resumed: tuple[int, int] | None = None) -> Sampler:
            sampler = ordinary
            if share is not None:
                sampler = sampling.share(batch_sampler, share, unit=unit, resumed=resumed)
            return sampler if used is None else SubsetSampler(sampler, used)

        n_used = tables.match.codes.size if used is None else int(used.sum())
        with tables.closed_on_error():
            ordering = Ordering(
                ranks,
                make,
                what="cells",
                total=n_used,
                unit=batch_size,
                drop_last=drop_last,
                most=sampling.most_shards(n_used),
                elastic=batch_sampler is None,
            )
            engine = Engine(tables, ordering.sampler, seed=seed, window_cells=window_cells, options=options)
        super().__init__(tables, engine, ordering)
