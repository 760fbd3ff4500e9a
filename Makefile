# Works with GNU make 3.81 (macOS) and later. `make demo` and `make test` install what they need into .venv by themselves.

VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test soak sanitize lint site clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	@out=runs/quickstart; n=2; \
	while [ -e "$$out" ]; do out=runs/quickstart-$$n; n=$$((n + 1)); done; \
	$(BIN)/et train quickstart --rule expert_threshold --minutes 3.75 --out "$$out" && \
	echo "et is in $(BIN): type $(BIN)/et, or first, once in this shell: source $(BIN)/activate"

help:
	@echo "make demo      train a small model in four minutes, write samples and a report"
	@echo "make test      run the tests; make soak: the campaigns of minutes"
	@echo "make lint      ruff and mypy"
	@echo "make sanitize  the kernels' tests under AddressSanitizer; PART=tests/kernels/test_muon.py for some"
	@echo "make site      the documentation, as pages in site/"
	@echo "make clean     remove .venv, builds and caches"

# Two workers with one thread each: torch would otherwise start as many threads as there are cores in every worker.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Campaigns of minutes, which `make test` leaves out, and many more examples of what it draws by chance.
soak: $(VENV)/.installed-soak
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "soak or hypothesis" --hypothesis-profile many --timeout 3600

# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, whose libraries must be loaded first. Flags
# at the end of the compiler's line override the kernels' own; a report would be lost if pytest captured it. PART
# chooses tests: make sanitize PART=tests/kernels
PART := tests/kernels tests/generate/test_kernel.py
sanitize: $(VENV)/.installed-dev
	CXX="sh -c 'unset LD_PRELOAD; g++ \"\$$@\" -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all' g++" \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -rs $(PART)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

site: $(VENV)/.installed-site
	PYTHONPATH=docs $(BIN)/zensical build --strict --clean

# A name on the PATH may be a stub or too old, so each candidate is run.
$(BIN)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14; do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "making $(VENV) with $$python"; \
			exec "$$python" -m venv --clear $(VENV); \
		fi; \
	done; \
	echo "No Python 3.11 or newer was found: install it (https://www.python.org/downloads/) or name it: make PYTHON=/path/to/python3" >&2; \
	exit 1

EXTRAS-demo := serve,viz
EXTRAS-dev := dev
EXTRAS-soak := dev,soak
EXTRAS-site := docs
# pip compiles one file at a time, compileall on every core. Packages contain files that do not compile: its exit status
# is ignored.
$(VENV)/.installed-%: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing the package, its dependencies and [$(EXTRAS-$*)] (PyTorch is large: minutes on a slow network)"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(EXTRAS-$*)]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

clean:
	rm -rf $(VENV) build dist site .cache .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
