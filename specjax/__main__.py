"""`python -m specjax`: the `specjax` command."""

from specjax.cli.entry import run

run()
