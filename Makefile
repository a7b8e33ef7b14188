# Everything runs in .venv/, which `make setup` makes. Root or not; a bare Debian is enough (as root, the missing packages come
# through apt-get). Your own choice of interpreter: make setup PYTHON=python3.12
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
# On Linux x86-64 PyPI's build of this has CUDA. Another build or another index: make setup TORCH='torch==2.13.0+cu130', with
# PIP_EXTRA_INDEX_URL. `make gpu` takes what is installed on the machine, if that sees a device.
TORCH ?= torch==2.13.0

BIN := .venv/bin
STAMP := .venv/.installed
LIBRARIES := .venv/.libraries
DOCUMENTATION := .venv/.documentation

.PHONY: help setup test check demo soak docs test-gpu bench-gpu gpu clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 11

setup: $(STAMP) ## make .venv/ with the package installed in it; quick when that is done

# Two processes more than there are cores, because tests wait for drives and children; four at most. Each runs whole files. Idle
# threads of torch's would spin where another test computes. Compiled modules are kept, whatever the environment says: dozens of
# processes import them.
test: setup $(LIBRARIES) ## every test but the long ones
	@PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -q -n $$(( $$(nproc) + 2 )) --maxprocesses 4 --dist loadfile

check: setup ## ruff, mypy --strict, and whether docs/reference.md is that of the docstrings
	$(BIN)/ruff check .
	$(BIN)/mypy --strict tiered libaio_ext
	$(BIN)/python docs/make_reference.py --check

demo: setup ## train a small GPT under a memory budget, in demo-store/
	$(BIN)/tiered train demo-store --existing overwrite

soak: setup $(LIBRARIES) ## the fault tests with their full counts; hours
	@$(BIN)/python -m pytest -q -m soak

docs: $(DOCUMENTATION) ## the documentation as a site, in build/site/; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --clean --quiet
	@$(BIN)/python docs/site/check.py build/site

test-gpu: setup ## what needs a CUDA device; without one, a line that says so
	@$(BIN)/python -m tests.gpu

DIR ?= .
bench-gpu: setup ## copies to and from the device beside what the hardware does alone; DIR=folder on the drive; 4 minutes
	@$(BIN)/python -m bench.gpu --dir $(DIR)

gpu: ## the most useful first on a bare machine with an NVIDIA device, environment included; OUT=folder LIMIT=530 (seconds)
	@bench/gpu.sh

clean: ## remove what the targets above made
	rm -rf .venv build dist demo-store .hypothesis .pytest_cache .mypy_cache .ruff_cache *.egg-info
	rm -f tiered/io/_aio.*.so tiered/links/_disk.*.so tiered/packing/_unpack.*.so tiered/tables/_rows.*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What of the system is missing: a compiler, Python's headers, libaio and xxHash for the fast backend and link, venv, strace for faults.
# Headers and venv of a Python that Debian did not make are not Debian's to give.
define SYSTEM_PACKAGES
missing=(); python="$(PYTHON)"; \
command -v gcc >/dev/null && echo 'int main(void) { return 0; }' | gcc -x c - -o /dev/null 2>/dev/null \
	|| missing+=(gcc libc6-dev); \
[[ -e /usr/include/libaio.h ]] || missing+=(libaio-dev); \
[[ -e /usr/include/xxhash.h ]] || missing+=(libxxhash-dev); \
command -v strace >/dev/null || missing+=(strace); \
if ! command -v python3 >/dev/null; then missing+=(python3 python3-venv python3-dev); \
elif [[ $$("$${python:-python3}" -c 'import sys; print(sys.base_prefix)' 2>/dev/null) == /usr ]]; then \
	"$${python:-python3}" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv); \
	"$${python:-python3}" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
		|| missing+=(python3-dev); \
fi; \
if (( $${#missing[@]} )); then \
	if [[ $$(id -u) == 0 ]] && command -v apt-get >/dev/null; then \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$${missing[@]}" \
			|| echo "setup: apt-get failed; going on without: $${missing[*]}"; \
	else \
		echo "setup: going on without these system packages (sudo apt-get install $${missing[*]}, then make -B setup)"; \
	fi; \
fi
endef

$(STAMP): pyproject.toml setup.py $(wildcard libaio_ext/*.[ch] libaio_ext/*.map libaio_ext/*.py)
	@$(SYSTEM_PACKAGES)
	@$(MAKE) --no-print-directory environment

# What tiered/integrations is tested against. Where it cannot be installed, those tests are skipped.
$(LIBRARIES): $(STAMP) tests/libraries.txt
	@$(BIN)/pip install -q '$(TORCH)' -c tests/libraries.txt --no-build-isolation -e '.[test,dev,hf,lightning,nf4,gguf]' \
		|| echo "setup: without transformers, accelerate, peft, trl, lightning, bitsandbytes and gguf; their tests are skipped"
	@touch $(LIBRARIES)

$(DOCUMENTATION): $(STAMP)
	@$(BIN)/pip install -q '$(TORCH)' --no-build-isolation -e '.[docs]'
	@touch $(DOCUMENTATION)

# A second make, so that PYTHON is looked for again after Python itself may have been installed.
.PHONY: environment
environment:
	@[[ -n "$(PYTHON)" ]] && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
		|| { echo "setup: no Python 3.10 or newer here ('$(PYTHON)' is not); name one with make setup PYTHON=..." >&2; exit 1; }
	@[[ -x $(BIN)/python && -x $(BIN)/pip ]] || $(PYTHON) -m venv .venv \
		|| { rm -rf .venv; echo "setup: $(PYTHON) cannot make a virtual environment (Debian: python3-venv)" >&2; exit 1; }
	@# torch by an exact pin and first: what is asked for later must not bring another build of it.
	$(BIN)/pip install -q '$(TORCH)' 'setuptools>=77' wheel 'cffi>=1.16'
	$(BIN)/pip install -q -c tests/libraries.txt --no-build-isolation -e '.[test,dev]'
	@$(BIN)/python -c 'from tiered.io.probe import libaio_unavailable as why; \
		why() and print("setup: the libaio backend is not available, posix serves:", why())'
	@touch $(STAMP)
