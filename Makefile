# make demo: train for real, dense and with ScaleCom.   make test: the everyday tests.   make setup: only the environment.
PYTHON ?= $(or $(shell command -v python3.11),$(shell command -v python3),python3.11)
VENV := .venv
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(CURDIR)/$(VENV)/bin/python

.PHONY: setup setup-gpu setup-torch dist docs demo demo-torch test test-long test-nightly soak lint accuracy study bench bench-nodes race bench-keras bench-kernels bench-gpu test-gpu scaling clean
.DEFAULT_GOAL := help

help:
	@echo "make setup         .venv with pinned packages, Horovod built from source, this package"
	@echo "make setup-gpu     the same for GPUs: torch for CUDA, NCCL, no TensorFlow (CUDA=12: not nvcc's version)"
	@echo "make setup-torch   .venv-torch with PyTorch and this package alone (any Python from 3.10 to 3.13)"
	@echo "make demo          trains a ResNet, a Keras ResNet and an LSTM on 2 ranks, dense and with ScaleCom; table and picture"
	@echo "make demo-torch    trains the ResNet on 2 ranks by torchrun, without Horovod (three minutes)"
	@echo "make test          ruff, mypy and the tests, on 1 and 2 ranks (six minutes on two cores)"
	@echo "make test-long     what CI runs besides: nodes, kills, hosts, elastic jobs, late streams (20 minutes)"
	@echo "make test-nightly  all other tests: more launchers and ranks, random programs, study (an hour)"
	@echo "make test-gpu      the doctor's tests of GPUs, the kernel's, and those of torchrun's ranks on a GPU"
	@echo "make lint          ruff and mypy alone"
	@echo "make soak          trains while workers are killed, stopped and added (MINUTES=3)"
	@echo "make accuracy      the accuracy table of docs/results.md (minutes)"
	@echo "make study         trains every method on five models; tables in study/ (four hours; QUICK=1: minutes)"
	@echo "make bench         step times over slow and fast networks, dense and compressed (root; minutes)"
	@echo "make bench-nodes   several ranks on each host: every rank a worker, or every host (root; minutes)"
	@echo "make race          how soon a language model is trained over slow networks, in all ways (root; hours)"
	@echo "make scaling       the scaling model, from what make bench measured"
	@echo "make bench-keras   step times of Keras on this machine's ranks, dense and with ScaleCom, in one run"
	@echo "make bench-kernels the kernel's speed against the memory's"
	@echo "make bench-gpu     the same on a GPU"
	@echo "make docs          docs/_build/html: the pages as a site (a minute; without Horovod)"
	@echo "make dist          dist/: an sdist, and one wheel for Python 3 on any Linux with glibc (needs a C compiler; a minute)"

# $(call found,3.11): ends with advice if there is no Python.
found = @command -v $(PYTHON) >/dev/null || { echo "make $(MAKECMDGOALS) failed: $(PYTHON) is not on the PATH. Install Python $(1), or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }

# The script finds out by itself what is missing. A second call takes well under a second.
setup:
	$(call found,3.11)
	@$(PYTHON) scripts/setup/setup_environment.py --venv $(VENV)

setup-gpu:
	$(call found,3.11)
	@$(PYTHON) scripts/setup/setup_environment.py --venv $(VENV) --gpu $(if $(CUDA),--cuda $(CUDA))

setup-torch:
	$(call found,3.10 to 3.13)
	@$(PYTHON) scripts/setup/setup_environment.py --torch-alone

dist:
	$(call found,3.10 to 3.13)
	@$(PYTHON) scripts/setup/make_dist.py

# This is a separate environment, because the site needs neither Horovod nor a framework.
.venv-docs/installed: scripts/setup/requirements-docs.txt
	$(call found,3.11 or later)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make docs failed: it needs Python 3.11 or later, and $(PYTHON) is older: make docs PYTHON=/path/to/python3.12"; exit 1; }
	@echo "make docs: making .venv-docs, once; a minute"
	@$(PYTHON) -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

docs: .venv-docs/installed
	@.venv-docs/bin/python -m sphinx -b html -E -a -W --keep-going -q docs docs/_build/html
	@echo "docs/_build/html/index.html"

demo-torch: setup-torch
	@.venv-torch/bin/python scripts/examples/demo.py --torch-alone --output demo/torch

demo: setup
	@$(RUN) scripts/examples/demo.py

test: setup
	@$(RUN) scripts/checks/run_tests.py

test-long: setup setup-torch docs
	@$(RUN) scripts/checks/run_tests.py --long

test-nightly: setup setup-torch
	@$(RUN) scripts/checks/run_tests.py --nightly

# It runs with any PyTorch that has CUDA, and makes no environment.
test-gpu:
	@$(PYTHON) scripts/checks/run_tests.py --gpu

lint: setup
	@$(RUN) scripts/checks/run_tests.py ruff mypy

soak: setup
	@$(RUN) scripts/checks/soak.py --minutes $(or $(MINUTES),3)

study: setup
	@$(RUN) scripts/study/study.py $(if $(QUICK),--quick --output study/quick)

accuracy: setup
	@$(RUN) scripts/study/accuracy.py

race: setup
	@$(RUN) scripts/race/race.py

bench bench-nodes bench-keras bench-kernels bench-gpu: setup
	@$(RUN) scripts/bench/$(subst -,_,$@).py

scaling: setup
	@$(RUN) scripts/bench/scaling_model.py

clean:
	rm -rf $(VENV) .venv-torch .venv-dist .venv-docs dist docs/_build build *.egg-info demo bench study scalecom_hvd/native/_*.so
