# Entry points for people. CMake builds; these lines call it. `make` lists the goals.
.DEFAULT_GOAL := help
.PHONY: help demo test test-all build bench docs clean

JOBS ?= $(shell nproc)
MINUTES ?=
TEXT ?=
MIXER ?=
CASES ?= @perf
CUDA ?=
MAKEFLAGS += --no-print-directory
export JOBS CUDA

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo:  ## train a small language model on real text and let it write (MINUTES=4 TEXT=file MIXER=kda)
	@scripts/setup.sh demo
	@scripts/build.sh cpu --new -DTHALWEG_BUILD_TESTS=OFF -DTHALWEG_BUILD_TOOLS=OFF --set -DTHALWEG_BUILD_EXAMPLES=ON --target demo
	@build/cpu/examples/demo $(if $(MINUTES),--minutes $(MINUTES)) $(if $(TEXT),--text "$(TEXT)") $(if $(MIXER),--mixer $(MIXER))

test:  ## build and run every test, sanitizers and document checks included (CUDA=1: the GPU backend too)
	@scripts/setup.sh test
	@scripts/test.sh

test-all:  ## the same, and the Python tests that need torch and transformers (5.6 GB from PyPI)
	@scripts/setup.sh test
	@scripts/test.sh --all

build:  ## the library, the tool, the tests and the examples, in build/cpu
	@scripts/setup.sh test
	@scripts/build.sh cpu --set -DTHALWEG_BUILD_TESTS=ON -DTHALWEG_BUILD_TOOLS=ON -DTHALWEG_BUILD_EXAMPLES=ON

bench: build  ## verify and time cases (CASES=@perf, or one case)
	@build/cpu/tools/thalweg/thalweg bench '$(CASES)'

docs: build  ## write the generated documents again and check all of them
	@scripts/tuning_index.py
	@python3 bench/report.py
	@build/cpu/tools/thalweg/thalweg docs
	@tests/docs_check.py build/cpu/tools/thalweg/thalweg

clean:  ## remove build/
	rm -rf build
