# make test and make demo each prepare .venv the first time; PYTHON chooses the interpreter it is made from.
# PY=python3 runs a target with that interpreter as it is, preparing nothing.
PYTHON ?= python3
VENV ?= .venv
.DEFAULT_GOAL := help

ifdef PY
dev demo-env:
else
PY := $(VENV)/bin/python
dev:
	@$(PYTHON) tools/environment.py $(VENV) dev demo
demo-env:
	@$(PYTHON) tools/environment.py $(VENV) demo
endif

.PHONY: help test demo lint docs wheel gpu-test sanitize fuzz fuzz-gpu transformers-sweep release-check clean dev demo-env

help:
	@echo "make test      lint, types, tests and docs, as CI runs them"
	@echo "make demo      a real encoder over real text, eager against warploom"
	@echo "make lint      ruff and mypy"
	@echo "make docs      build the documentation into site/"
	@echo "make wheel     build the wheel and the source archive into dist/"
	@echo "make gpu-test  the tests that need a CUDA device"
	@echo "make sanitize  compute-sanitizer over each compiled Triton kernel, on a CUDA device"
	@echo "make fuzz      random problems against an oracle, on this CPU, up to ten minutes (ARGS='--seed 7')"
	@echo "make fuzz-gpu  the same on a CUDA device"
	@echo "make transformers-sweep  every model class of transformers, eager against warploom; about an hour"
	@echo "make release-check  archives, metadata, and clean installs for each Python here; half an hour, and the network (ARGS='--python 3.12')"
	@echo "make clean     remove what the other targets made, .venv included"

test: dev
	@$(PY) tools/check.py

demo: demo-env
	@$(PY) -m warploom demo $(ARGS)

lint: dev
	@$(PY) tools/check.py lint types

docs: dev
	@$(PY) tools/check.py docs

wheel: dev
	@$(PY) -m build

gpu-test: dev
	@$(PY) -m pytest -m gpu $(ARGS)

sanitize: dev
	@$(PY) -m tests.sanitize $(ARGS)

fuzz: dev
	@$(PY) -m tests.fuzz $(ARGS)

fuzz-gpu: dev
	@$(PY) -m tests.fuzz --device cuda --seed 12 --problems 18000 --json benchmarks/results/fuzz.json $(ARGS)

transformers-sweep: dev
	@$(PY) -m tests.integrations.sweep $(ARGS)

release-check: dev
	@$(PY) tools/release_check.py $(ARGS)

clean:
	rm -rf .venv build dist site demo-out fuzz-failures *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .modules
	find . -name __pycache__ -prune -exec rm -rf {} +
