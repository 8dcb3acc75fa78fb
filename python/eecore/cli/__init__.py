"""The command line: ``eecore chat``, ``generate``, ``serve``, ``info``, ``convert``, ``search``,
``train``, ``train-classifier``, ``calibrate``, ``evaluate``, ``sweep`` and ``exits``.

Heavy modules are imported by the command that needs them, so that ``eecore --help`` is quick.
"""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from eecore.cli.process import run_process

        sys.exit(run_process())
    except KeyboardInterrupt:  # before or after the code that reports it
        sys.exit(130)
