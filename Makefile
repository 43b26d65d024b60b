# Two commands do all the set-up on a fresh Debian machine: make demo, make test.
SHELL := /bin/sh
PYTHON ?= /usr/bin/python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help venv demo test lint unit eval bench lock deps clean images e2e

help:  ## say what each target does
	@awk -F':.*## ' '/^[a-z0-9]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

deps:  ## install the Debian packages that the demo and the tests use (root; else say what is missing)
	@tools/debian-packages

venv: $(VENV)/.ready  ## make .venv with kitty, kitty-webhook, kitty-sidecar and kitty-lab in it

$(VENV)/.ready: requirements/dev.txt pyproject.toml | deps
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: venv  ## run the main job: a four-pod training job, a fault, and what the sidecars see
	$(BIN)/kitty-lab demo

test: venv lint unit  ## style, types, import contracts, tests (CI: this, make eval, and make e2e where a cluster is)

lint: venv  ## style, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Much of the tests' time is waiting, so parts of them run side by side, two at a time, each printed
# whole once it is done; one that fails does not end the others. The markers say what some tests
# need (pyproject.toml). The order counts: what needs a quiet machine begins beside gpu, which mostly
# waits, and ends before the emulated machines of guest begin; the long ones come before the short.
PYTEST := $(BIN)/python -m pytest
FOLDERS := gpu lab guest sidecar webhook rules kitty
PARTS := quiet $(FOLDERS) rest
SHARED := -m 'not alone and not quiet'
.PHONY: unit-alone $(PARTS:%=unit-%)

unit: unit-alone
	@tools/prometheus >/dev/null || true # two parts at a time would want it
	@echo 'the parts of the tests run two at a time; each is shown when it is done (minutes)'
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target $(PARTS:%=unit-%)

unit-alone unit-quiet: unit-%: venv
	$(PYTEST) --ignore=tests/e2e -m $*

$(FOLDERS:%=unit-%): unit-%: venv
	$(PYTEST) $(SHARED) tests/$*

unit-rest: venv
	$(PYTEST) $(SHARED) $(addprefix --ignore=tests/,e2e $(FOLDERS))

eval: venv  ## score the verdicts against known faults, each once (8 minutes, root)
	$(BIN)/kitty-lab eval --quick

images:  ## build both images with docker, podman or buildah, into build/images
	tools/images

e2e: export KUBECONFIG := $(or $(KUBECONFIG),$(HOME)/.kube/config)
e2e: venv  ## try the whole way on the cluster of the kubeconfig, with what make images built
	@$(BIN)/python -m tests.e2e.install
	$(BIN)/python -m pytest tests/e2e

bench: venv  ## the measurements behind the figures in the docs (minutes; see bench/)
	@echo 'each measurement is a script of its own: $(BIN)/python -m bench.NAME'; ls bench

lock: venv  ## resolve requirements/*.txt anew from pyproject.toml
	tools/lock

clean:  ## remove what the targets above made in this folder
	rm -rf $(VENV) .cache build artifacts *.egg-info
