# Two commands do everything on a fresh machine: `make demo` and `make test`.
PY := .venv/bin/python
# The models are small: one thread each is fastest and leaves the other core to the server.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test test-full native plugins-tensorrt peers lint format clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo       convert hybrid-tiny, serve it with Triton, answer three prompts"
	@echo "make test       the tests, within minutes on two cores"
	@echo "make test-full  also the long ones"
	@echo "make native     the CPU kernels; setup, demo and test do this by themselves"
	@echo "make plugins-tensorrt  the TensorRT plugin library (needs no GPU)"
	@echo "make peers      the peers of perf.ttft: llama.cpp's server, a GGUF writer"
	@echo "make lint       ruff and mypy"
	@echo "make setup      only install what the above need, into .venv"
	@echo "make clean      remove outputs and caches; distclean also removes .venv"

setup: .venv/ready native

.venv/ready: $(wildcard requirements/*)
	requirements/setup.sh

# Quick where nothing changed; without a compiler or the headers it says so and goes on.
native:
	plugins/native/build.sh

demo: .venv/ready native
	$(PY) convert.py --model hybrid-tiny
	$(PY) -m perf.demo

test: .venv/ready native .venv/tensorrt/ready
	$(PY) -m pytest -m "not full"

test-full: .venv/ready native .venv/tensorrt/ready
	$(PY) -m pytest

# Headers, a plugin registry and a network builder; none of them needs a GPU.
.venv/tensorrt/ready: requirements/tensorrt.txt | .venv/ready
	requirements/setup.sh tensorrt

plugins-tensorrt: .venv/tensorrt/ready
	$(PY) -m plugins.tensorrt.build

peers: .venv/peers/ready

.venv/peers/ready: requirements/peers.txt | .venv/ready
	$(PY) -m pip install --quiet --no-deps --upgrade --target .venv/peers -r $<
	touch $@

lint: .venv/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: .venv/ready
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf artifacts .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
