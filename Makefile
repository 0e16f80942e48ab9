# The commands of the house. Each installs what it needs; build trees lie under build/.
#
#   make demo           a real model writes 1,500 tokens, with and without a budget
#   make test           every test, in a release, an address+undefined and a thread sanitizer build
#   make test-bindings  the tests of Rust, Go and C# alone
#   make bench          speed, a line per case
#   make bench-bindings the cost of a step driven from Rust, Go and C#, as a ratio to C
#   make eval-formats   quality of every storage format on a real model (docs/formats.md; hours)
#   make eval-retention
#                       quality of every method of eviction (docs/retention.md; hours)
#   make packages       Debian packages, in build/packages/packages
#   make golden         rewrites the golden files (look at the diff before committing it)
#   make golden-abi     those of the ABI alone: symbols, layouts, constants, statuses
#   make abi-release    with a release: its interface becomes the promised one (docs/abi.md)
#   make format         clang-format on all sources
#   make tidy           clang-tidy on the core and the samples

.PHONY: demo test test-bindings bench bench-bindings eval-formats eval-retention packages \
    golden golden-abi abi-release format tidy release asan tsan deps model clean
.DEFAULT_GOAL := release

release asan tsan: deps
	@cmake --preset $@ >build/$@-configure.log || { cat build/$@-configure.log; exit 1; }
	@cmake --build --preset $@

deps:
	@scripts/install_deps.sh

model: deps
	@scripts/fetch_model.sh

demo: deps
	@cmake --preset release >build/release-configure.log || \
	    { cat build/release-configure.log; exit 1; }
	@cmake --build --preset release --target generate
	@model=$$(scripts/fetch_model.sh) && build/release/bin/generate --model "$$model" --demo \
	    --report build/demo-report.json

# The trees are built one after the other: each uses all processors by itself.
test:
	@scripts/install_deps.sh --test --bindings
	@scripts/fetch_cuda.sh >/dev/null || echo "no nvcc: CUDA kernels will not be compiled"
	@$(MAKE) --no-print-directory release
	@$(MAKE) --no-print-directory asan
	@$(MAKE) --no-print-directory tsan
	@$(MAKE) --no-print-directory packages
	@model=$$(scripts/fetch_model.sh) && KVRT_TEST_MODEL="$$model" \
	    python3 scripts/run_tests.py build/release build/asan build/tsan

# On a machine where something must be missing: KVRT_ALLOW_MISSING_TOOLCHAINS=1 make test-bindings
test-bindings:
ifneq ($(KVRT_ALLOW_MISSING_TOOLCHAINS),1)
	@scripts/install_deps.sh --bindings
endif
	@$(MAKE) --no-print-directory release
	@python3 scripts/run_bindings.py build/release

packages: deps
	@cmake --preset $@ >build/$@-configure.log || { cat build/$@-configure.log; exit 1; }
	@cmake --build --preset $@
	@rm -rf build/packages/packages
	@cd build/packages && { cpack >cpack.log || { cat cpack.log; exit 1; }; }
	@ls build/packages/packages/*.deb

bench: release
	@scripts/run_bench.sh build/release

bench-bindings:
	@scripts/install_deps.sh --bindings
	@$(MAKE) --no-print-directory release
	@python3 scripts/bench_bindings.py build/release

eval-formats: release
	@scripts/eval_formats.sh build/release

eval-retention: release
	@scripts/eval_retention.sh build/release

golden: release
	@scripts/golden.sh build/release

golden-abi: release
	@scripts/golden.sh build/release abi

abi-release: release
	@scripts/install_deps.sh --test
	@scripts/abi_guard.py release build/release

format:
	@scripts/install_deps.sh --tools
	@git ls-files '*.c' '*.h' '*.cpp' '*.hpp' | xargs clang-format -i

tidy:
	@scripts/install_deps.sh --tools
	@$(MAKE) --no-print-directory release
	@mkdir -p build/tidy
	@sed 's/ -fno-gnu-unique//g' build/release/compile_commands.json \
	    >build/tidy/compile_commands.json # clang does not know GCC's option
	@git ls-files 'lib/*.cpp' 'samples/*.cpp' | xargs -P $$(nproc) -n 1 clang-tidy -p build/tidy \
	    --quiet

clean:
	rm -rf build/release build/asan build/tsan build/packages build/prefix build/bindings
