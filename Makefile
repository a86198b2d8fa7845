# Two worlds: `test`, `lint` and `demo` set up what they need in .venv; `gpu`, `sanitize` and `bench` run on a machine
# that already has a CUDA PyTorch and pytest, with that interpreter as it is: they install nothing.
PYTHON ?= python3
PYTHON_GPU ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
PYTEST_ARGS ?=
SANITIZE_ARGS ?=
FAMILIES ?=
BENCH_ARGS ?=
FUZZ_S ?= 300
FUZZ_ARGS ?=
MATRIX_ARGS ?=

VENV := .venv
VENV_GPU := .venv-gpu
VENV_PACKAGE := .venv-package
PROBLEMS := examples/problems/*.py
NVRTC_12 := nvidia-cuda-nvrtc-cu12==12.9.86
NVRTC_11 := nvidia-cuda-nvrtc-cu11==11.8.89
UV := uv==0.13.9
UV_INSTALL := $(VENV_PACKAGE)/bin/uv pip install --quiet --python $(VENV_PACKAGE)
PIP_FLAGS := --quiet --disable-pip-version-check
RUN_GPU := HALOCONV_TUNE=off PYTHONPATH=. $(PYTHON_GPU)
OF_FAMILIES = $(foreach family,$(FAMILIES),--family $(family))

SEES_CUDA := import sys, torch; sys.exit(not torch.cuda.is_available())
NEEDS_GPU := import cuda.core, cuda.bindings.driver, typer, rich, jinja2, matplotlib, platformdirs, filelock
GPU_EXTRA := import torch; print("gpu-cu12" if str(torch.version.cuda).startswith("12.") else "gpu")
HAS_BROWSER := import sys; from tests.browser import BROWSER; sys.exit(BROWSER is None)
SITE_PATHS := import sys; print("\n".join(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))))

.PHONY: help venv browser demo demo-cpu demo-cuda test only-in-ci lint fuzz gpu sanitize bench package matrix docs clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo      set up and run the main job on the three problem files (on the GPU, else on the emulator)'
	@echo 'make test      set up, lint, and run the tests that need no GPU'
	@echo 'make lint      ruff, mypy and clang-format, checking only'
	@echo 'make fuzz      random problems on the emulator for FUZZ_S seconds (FUZZ_ARGS="--seed 1", "--replay ...")'
	@echo 'make gpu       on a GPU machine: GPU tests, sanitizer, stamps (PYTHON_GPU=... names the interpreter), or of'
	@echo '               FAMILIES="NAME ..." alone; goes on where the last one ended'
	@echo 'make sanitize  on a GPU machine: compute-sanitizer only (SANITIZE_ARGS=..., FAMILIES=...)'
	@echo 'make bench     on a GPU machine: time the suite, refresh the results and the README (BENCH_ARGS=...)'
	@echo 'make package   the files of a release in dist, built and checked'
	@echo 'make matrix    the wheel in bare environments, for each Python on this machine and several PyTorch versions'
	@echo '               (MATRIX_ARGS="--python 3.12 --torch 2.6 newest --torch-backend cpu")'
	@echo 'make docs      the documentation as a site in build/site; a warning is an error'
	@echo 'make venv      the development environment in .venv'
	@echo 'make browser   headless Chromium from Debian packages (as root), for the tests that look at pages in a browser'
	@echo 'make clean     remove the environments and the caches'

venv: $(VENV)/.develop $(VENV)/.nvrtc

browser:
	@$(PYTHON) -c '$(HAS_BROWSER)' || { apt-get update -qq -o Acquire::http::Timeout=20 && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null; }

demo:
	@if $(PYTHON_GPU) -c '$(SEES_CUDA)' 2>/dev/null; \
	then $(MAKE) --no-print-directory demo-cuda; \
	else $(MAKE) --no-print-directory demo-cpu; fi

demo-cpu: $(VENV)/.package
	$(VENV)/bin/haloconv run --device emulator --stats $(PROBLEMS)

demo-cuda:
	@if $(PYTHON_GPU) -c '$(NEEDS_GPU)' 2>/dev/null; \
	then set -x; $(RUN_GPU) -m haloconv run --precision ieee $(PROBLEMS); \
	else $(MAKE) --no-print-directory $(VENV_GPU)/.package && \
	set -x && $(VENV_GPU)/bin/haloconv run --precision ieee $(PROBLEMS); fi

# The tests take every core; what comes before them has parts that need not wait for each other. Tests start Python
# often: bytecode is kept, whatever the environment says, so that each start does not compile our modules again.
test:
	$(MAKE) --no-print-directory -j $(JOBS) lint $(VENV)/.nvrtc only-in-ci
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/cpu -n $(JOBS) $(PYTEST_ARGS)

# CI looks at pages in a browser where one can be installed, and builds the site and the files of a release (15 s with
# their environment); on other machines `make browser docs package` does so when it is asked.
only-in-ci:
	@if [ "$$CI" = true ]; then timeout 90 $(MAKE) --no-print-directory browser || \
	echo 'No headless Chromium could be installed: the tests that need a browser are left out.'; fi
	@if [ "$$CI" = true ]; then if timeout 180 $(MAKE) --no-print-directory $(VENV_PACKAGE)/.docs; \
	then $(MAKE) --no-print-directory docs package; \
	else echo 'The tools of the site and the package could not be installed: neither is checked.'; fi; fi

lint: $(VENV)/.develop
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	find haloconv -name '*.cu' -exec $(VENV)/bin/clang-format --dry-run -Werror {} +
	find haloconv -name '*.cuh' -exec $(VENV)/bin/clang-format --dry-run -Werror {} +
	find haloconv/emulator -name '*.h' -exec $(VENV)/bin/clang-format --dry-run -Werror {} +
	find haloconv/emulator -name '*.cpp' -exec $(VENV)/bin/clang-format --dry-run -Werror {} +

fuzz: $(VENV)/.develop
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.fuzz --seconds $(FUZZ_S) $(FUZZ_ARGS)

gpu:
	$(RUN_GPU) -m pytest tests/gpu --resume $(OF_FAMILIES) $(PYTEST_ARGS)
	$(RUN_GPU) -m tools.make_vectors
	$(RUN_GPU) -m tools.sanitize $(OF_FAMILIES) $(SANITIZE_ARGS)
	$(RUN_GPU) -m tools.make_stamps $(OF_FAMILIES)
	$(RUN_GPU) -m tools.readme_results

sanitize:
	$(RUN_GPU) -m tools.sanitize $(OF_FAMILIES) $(SANITIZE_ARGS)

bench:
	$(RUN_GPU) -m haloconv bench $(BENCH_ARGS)
	$(RUN_GPU) -m tools.readme_results

# The wheel is built from the source archive, as everyone who installs from that does.
package: $(VENV_PACKAGE)/.package
	rm -rf dist
	$(VENV_PACKAGE)/bin/uv build --quiet
	$(VENV_PACKAGE)/bin/twine check --strict dist/*
	$(VENV_PACKAGE)/bin/check-wheel-contents dist/*.whl

matrix: $(VENV_PACKAGE)/.package
	PYTHONPATH=. $(VENV_PACKAGE)/bin/python -m tools.matrix $(MATRIX_ARGS)

# Any warning is an error. The variable leaves out an advertisement of the theme's.
docs: $(VENV_PACKAGE)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV_PACKAGE)/bin/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(VENV_GPU) $(VENV_PACKAGE) .nvrtc .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# PyTorch first and pinned, so that installing the package pulls no other build of it.
$(VENV)/.torch:
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/pip install $(PIP_FLAGS) '$(TORCH)'
	touch $@

$(VENV)/.package: pyproject.toml $(VENV)/.torch
	$(VENV)/bin/pip install $(PIP_FLAGS) --editable '.[cli]'
	touch $@

$(VENV)/.develop: pyproject.toml $(VENV)/.torch
	$(VENV)/bin/pip install $(PIP_FLAGS) --editable '.[test,dev]'
	touch $@ $(VENV)/.package

# NVRTC 12 and 11.8 only compile (sm_70 ended with 12); each stays in its own folder beside the NVRTC 13 of the environment.
$(VENV)/.nvrtc: $(VENV)/.torch
	rm -rf .nvrtc
	$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps --target .nvrtc/12 '$(NVRTC_12)'
	$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps --target .nvrtc/11 '$(NVRTC_11)'
	touch $@

# No PyTorch: what these packages check and read is files.
$(VENV_PACKAGE)/.package: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV_PACKAGE)
	$(VENV_PACKAGE)/bin/pip install $(PIP_FLAGS) '$(UV)'
	$(UV_INSTALL) --group package
	touch $@

$(VENV_PACKAGE)/.docs: $(VENV_PACKAGE)/.package
	$(UV_INSTALL) --group docs
	touch $@

# A fresh environment that also sees the packages of PYTHON_GPU, whose CUDA PyTorch stays the one in use.
$(VENV_GPU)/.package: pyproject.toml
	$(PYTHON_GPU) -m venv --clear $(VENV_GPU)
	$(PYTHON_GPU) -c '$(SITE_PATHS)' > $$(echo $(VENV_GPU)/lib/python3.*/site-packages)/borrowed.pth
	$(VENV_GPU)/bin/pip install $(PIP_FLAGS) --editable ".[cli,$$($(PYTHON_GPU) -c '$(GPU_EXTRA)')]"
	touch $@
