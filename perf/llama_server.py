"""llama.cpp's own server, from the wheel ``xllamacpp``: run as a program of its own by ``peers``.

    llama_server.py MODEL.gguf CONTEXT THREADS [CHECKPOINT_STEP]

Prints its address once it is up, and ends with its standard input. Everything that is not given
here is at llama.cpp's default.
"""

from __future__ import annotations

import os
import socket
import sys

import xllamacpp


def main(model: str, context: str, threads: str, checkpoint_step: str = "") -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel = int(context), 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.verbosity = 0
    if checkpoint_step:
        params.checkpoint_min_step = int(checkpoint_step)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        params.port = probe.getsockname()[1]
    server = xllamacpp.Server(params)
    print(f"address {server.listening_address}", flush=True)
    sys.stdin.read()
    os._exit(0)  # the server's own threads would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
