"""`memcalc gpus`: the table of GPUs."""

from __future__ import annotations

from memcalc.cli.options import TableJsonOrMarkdown, Units


def command(
    form: TableJsonOrMarkdown = "table",
    units: Units = "GiB",
) -> None:
    """List the GPUs with their memory.

    Advertised memory, total memory in nvidia-smi, and memory usable by frameworks, which verdicts use.
    """
    from memcalc.cli.render import print_listing
    from memcalc.report.screens.listings import gpu_rows, gpu_table

    rows = gpu_rows()
    print_listing(form, rows, gpu_table(rows, units))
