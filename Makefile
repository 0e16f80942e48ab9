# The commands of the house. Each installs what it needs; build trees lie under build/.
#
#   make demo     a real model writes 1,500 tokens through the library, with and without a budget
#   make test     every test, in a release, an address+undefined and a thread sanitizer build
#   make bench    speed, a line per case
#   make golden   rewrites the golden files (look at the diff before committing it)
#   make format   clang-format on all sources
#   make tidy     clang-tidy on the core and the samples

.PHONY: demo test bench golden format tidy release asan tsan deps model clean
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
	@scripts/install_deps.sh --test
	@$(MAKE) --no-print-directory release
	@$(MAKE) --no-print-directory asan
	@$(MAKE) --no-print-directory tsan
	@model=$$(scripts/fetch_model.sh) && KVRT_TEST_MODEL="$$model" \
	    python3 scripts/run_tests.py build/release build/asan build/tsan

bench: release
	@scripts/run_bench.sh build/release

golden: release
	@scripts/golden.sh build/release

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
	rm -rf build/release build/asan build/tsan
