"""The command line: ``eecore generate``, ``info``, ``convert``, ``search``, ``train``,
``train-classifier``, ``calibrate``, ``evaluate``, ``sweep`` and ``exits``.

Heavy modules are imported by the command that needs them, so that ``eecore --help`` is quick.
"""

from eecore.cli.app import main

__all__ = ["main"]
