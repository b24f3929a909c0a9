"""Prints what becomes of a loader in another process, by how that was started, and what was done before.

Each cell of the table is a program of its own, ended after a time limit: `python scripts/worker_table.py`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

METHODS = ("fork", "spawn", "forkserver")
BEFORE = {
    "nothing": "",
    "a store read by anndata alone": "import anndata; anndata.read_zarr(path + '/cells.zarr/dataset_0')",
    "a loader made": "loader = dl.DonorLoader(path, batch_size=64)",
    "a loader iterated": "loader = dl.DonorLoader(path, batch_size=64)\n    list(loader)",
}
SECONDS = 150  # for a child, with its imports, on a busy machine; what it says about a fork comes at once

PREPARE = """
import anndata as ad, numpy as np, pandas as pd, sys, warnings
from pathlib import Path
from scipy import sparse
warnings.simplefilter("ignore")
import donorloader as dl
folder = Path(sys.argv[1])
obs = pd.DataFrame({"donor_id": np.repeat([f"d{i}" for i in range(8)], 64)}, index=[f"c{i}" for i in range(512)])
x = sparse.random(512, 50, 0.3, format="csr", dtype=np.float32, random_state=0)
ad.AnnData(x, obs=obs).write_h5ad(folder / "cells.h5ad")
dl.prepare(folder / "cells.h5ad", out=folder / "study", progress=False)
"""

PROGRAM = """
import multiprocessing, os, sys, time, warnings
warnings.simplefilter("ignore")
import donorloader as dl

def child(path, start, send):
    try:
        send.send(f"works, {{sum(1 for _ in dl.DonorLoader(path, batch_size=64))}} batches")
    except RuntimeError as error:
        send.send(f"error after {{time.time() - start:.1f}} s" if "fork" in str(error) else repr(error))

if __name__ == "__main__":
    path, context = sys.argv[1], multiprocessing.get_context({method!r})
    {before}
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(path, time.time(), send))
    process.start()
    print(receive.recv() if receive.poll({seconds}) else "HANGS")
    process.kill()
    os._exit(0)
"""


def outcome(folder: Path, method: str, before: str) -> str:
    """What a child process says that makes a loader and iterates it."""
    program = folder / f"{method}.py"
    program.write_text(PROGRAM.format(method=method, before=before, seconds=SECONDS))
    try:
        command = [sys.executable, str(program), str(folder / "study")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS)
    except subprocess.TimeoutExpired:
        return "HANGS"
    return done.stdout.strip() or f"fails: {done.stderr.strip().splitlines()[-1:]}"


def main() -> None:
    """Print the table, as Markdown."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-c", textwrap.dedent(PREPARE), name], check=True)
        print("| before, in the first process | " + " | ".join(METHODS) + " |")
        print("|---" * (len(METHODS) + 1) + "|")
        for told, before in BEFORE.items():
            outcomes = [outcome(folder, method, before) for method in METHODS]
            print(f"| {told} | " + " | ".join(outcomes) + " |", flush=True)


if __name__ == "__main__":
    main()
