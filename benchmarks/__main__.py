"""`python -m benchmarks`, short for `python -m benchmarks.run`."""

from benchmarks.run import app

app()
