// The raw layer against the golden files: functions, layouts, constants, statuses.

package kvrt

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"testing"
)

func golden(t *testing.T, name string) []string {
	t.Helper()
	folder := os.Getenv("KVRT_GOLDEN_DIR")
	if folder == "" {
		t.Fatal("KVRT_GOLDEN_DIR is not set: it is the repository's tests/abi/golden")
	}
	file, err := os.Open(filepath.Join(folder, name))
	must(t, err)
	defer file.Close()
	var lines []string
	for scanner := bufio.NewScanner(file); scanner.Scan(); {
		lines = append(lines, scanner.Text())
	}
	if len(lines) == 0 {
		t.Fatalf("%s is empty", name)
	}
	return lines
}

// sameLines names what is missing, what is too much, and the first line out of place.
func sameLines(t *testing.T, got, want []string) {
	t.Helper()
	has := map[string]int{}
	for _, line := range got {
		has[line]++
	}
	for _, line := range want {
		if has[line]--; has[line] < 0 {
			t.Errorf("missing: %s", line)
		}
	}
	for line, count := range has {
		if count > 0 {
			t.Errorf("not in the golden file: %s", line)
		}
	}
	for i := range want {
		if !t.Failed() && got[i] != want[i] {
			t.Errorf("line %d is %q, want %q", i+1, got[i], want[i])
		}
	}
}

var (
	comments = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	cgoCall  = regexp.MustCompile(`\bC\.(kvr?t?_\w+)\(`)
	plainC   = regexp.MustCompile(`\b(kvr?t?_\w+)\(`)
)

func TestEveryFunctionIsCalled(t *testing.T) {
	called := map[string]bool{}
	collect := func(pattern string, call *regexp.Regexp) {
		files, err := filepath.Glob(pattern)
		must(t, err)
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			text, err := os.ReadFile(name)
			must(t, err)
			code := comments.ReplaceAllString(string(text), "")
			for _, match := range call.FindAllStringSubmatch(code, -1) {
				called[match[1]] = true
			}
		}
	}
	collect("*.go", cgoCall)
	collect("*.c", plainC)
	delete(called, "kv_seq") // conversions to these types look like calls
	delete(called, "kv_status")
	var names []string
	for name := range called {
		names = append(names, name)
	}
	sort.Strings(names)
	want := append(golden(t, "symbols.txt"), golden(t, "cuda_symbols.txt")...)
	sort.Strings(want)
	sameLines(t, names, want)
}

func TestLayout(t *testing.T) {
	compareLayout(t, rawStructs(), golden(t, "layout.txt"))
	compareLayout(t, rawCUDAStructs(), golden(t, "cuda_layout.txt"))
}

func compareLayout(t *testing.T, structs map[string]any, want []string) {
	t.Helper()
	var order []string // the golden file's, for maps have none
	for _, line := range want {
		if !strings.HasPrefix(line, " ") {
			order = append(order, strings.Fields(line)[0])
		}
	}
	if len(structs) != len(order) {
		t.Errorf("%d structs, the golden file has %d", len(structs), len(order))
	}
	var got []string
	for _, name := range order {
		value, known := structs[name]
		if !known {
			t.Errorf("missing: %s", name)
			continue
		}
		layout := reflect.TypeOf(value)
		got = append(got, fmt.Sprintf("%s size=%d alignment=%d", name, layout.Size(),
			layout.Align()))
		for i := 0; i < layout.NumField(); i++ {
			field := layout.Field(i)
			got = append(got, fmt.Sprintf("  %s offset=%d size=%d", field.Name, field.Offset,
				field.Type.Size()))
		}
	}
	sameLines(t, got, want)
}

func TestConstants(t *testing.T) {
	got := []string{}
	add := func(name string, value any) { got = append(got, fmt.Sprintf("%s %d", name, value)) }
	add("KVRT_VERSION_MAJOR", VersionMajor)
	add("KVRT_VERSION_MINOR", VersionMinor)
	add("KVRT_VERSION_PATCH", VersionPatch)
	add("KVRT_VERSION", Version)
	for _, status := range allStatuses {
		add(status.String(), int32(status)) // the library's name: TestStatuses checks it
	}
	add("KV_CATEGORY_OK", CategoryOK)
	add("KV_CATEGORY_ARGUMENT", CategoryArgument)
	add("KV_CATEGORY_STATE", CategoryState)
	add("KV_CATEGORY_CAPACITY", CategoryCapacity)
	add("KV_CATEGORY_DEVICE", CategoryDevice)
	add("KV_CATEGORY_IO", CategoryIO)
	add("KV_CATEGORY_INTERNAL", CategoryInternal)
	add("KV_LOG_DEBUG", LogDebug)
	add("KV_LOG_INFO", LogInfo)
	add("KV_LOG_WARNING", LogWarning)
	add("KV_LOG_ERROR", LogError)
	add("KV_FORMAT_DEFAULT", FormatDefault)
	add("KV_FORMAT_F32", FormatF32)
	add("KV_FORMAT_F16", FormatF16)
	add("KV_FORMAT_BF16", FormatBF16)
	add("KV_FORMAT_FP8_E4M3", FormatFP8E4M3)
	add("KV_FORMAT_FP8_E5M2", FormatFP8E5M2)
	add("KV_FORMAT_FP8_TOKEN", FormatFP8Token)
	add("KV_FORMAT_INT8_TOKEN", FormatInt8Token)
	add("KV_FORMAT_INT4_TOKEN", FormatInt4Token)
	add("KV_FORMAT_Q8_0", FormatQ8_0)
	add("KV_FORMAT_Q4_0", FormatQ4_0)
	add("KV_FORMAT_Q4_1", FormatQ4_1)
	add("KV_FORMAT_NVFP4", FormatNVFP4)
	add("KV_FORMAT_MXFP4", FormatMXFP4)
	add("KV_FORMAT_KIVI4", FormatKIVI4)
	add("KV_FORMAT_KIVI2", FormatKIVI2)
	add("KV_FORMAT_KVARN4", FormatKVARN4)
	add("KV_FORMAT_KVARN2", FormatKVARN2)
	add("KV_FORMAT_TURBO4", FormatTurbo4)
	add("KV_FORMAT_TURBO3", FormatTurbo3)
	add("KV_FORMAT_AFFINE4", FormatAffine4)
	add("KV_STORAGE_SCALE_ONE", StorageScaleOne)
	add("KV_STORAGE_ROTATE", StorageRotate)
	add("KV_ROPE_NONE", RopeNone)
	add("KV_ROPE_HALF", RopeHalf)
	add("KV_ROPE_INTERLEAVED", RopeInterleaved)
	add("KV_LAYER_SHARED", LayerShared)
	add("KV_LAYER_LANE_PER_HEAD", LayerLanePerHead)
	add("KV_LAYER_CACHE_POSITIONS", LayerCachePositions)
	add("KV_PRESET_NEAR_LOSSLESS", PresetNearLossless)
	add("KV_PRESET_BALANCED", PresetBalanced)
	add("KV_PRESET_SMALLEST", PresetSmallest)
	add("KV_DEVICE_DEFAULT", DeviceDefault)
	add("KV_DEVICE_CPU", DeviceCPU)
	add("KV_DEVICE_CUDA", DeviceCUDA)
	add("KV_LAYOUT_NATIVE", LayoutNative)
	add("KV_LAYOUT_HND", LayoutHND)
	add("KV_LAYOUT_NHD", LayoutNHD)
	add("KV_POOL_ELASTIC", PoolElastic)
	add("KV_POOL_THREAD_SAFE", PoolThreadSafe)
	add("KV_POOL_DEBUG", PoolDebug)
	add("KV_POOL_HOST_FENCES", PoolHostFences)
	add("KV_SEQ_GATHER_STATISTICS", SequenceGatherStatistics)
	add("KV_DTYPE_F32", TypeF32)
	add("KV_DTYPE_F16", TypeF16)
	add("KV_DTYPE_BF16", TypeBF16)
	add("KV_ATTEND_NO_STATISTICS", AttendNoStatistics)
	add("KV_SCORER_NONE", ScorerNone)
	add("KV_SCORER_TRIATTENTION", ScorerTriAttention)
	add("KV_SCORER_STREAMING", ScorerStreaming)
	add("KV_SCORER_KEY_NORM", ScorerKeyNorm)
	add("KV_SCORER_RANDOM", ScorerRandom)
	add("KV_SCORER_H2O", ScorerH2O)
	add("KV_SCORER_SCISSORHANDS", ScorerScissorhands)
	add("KV_SCORER_TOVA", ScorerTOVA)
	add("KV_SCORER_SNAPKV", ScorerSnapKV)
	add("KV_SCORER_RKV", ScorerRKV)
	add("KV_SCORER_VASE_ATTENTION", ScorerVaSEAttention)
	add("KV_SCORER_VASE_SKETCH", ScorerVaSESketch)
	add("KV_SCORER_KEYDIFF", ScorerKeyDiff)
	add("KV_SCORER_LAGKV", ScorerLagKV)
	add("KV_SCORER_EXPECTED_ATTENTION", ScorerExpectedAttention)
	add("KV_SCORER_HOST", ScorerHost)
	add("KV_SCORER_BLEND", ScorerBlend)
	add("KV_SELECT_DEFAULT", SelectDefault)
	add("KV_SELECT_PER_LAYER_PER_HEAD", SelectPerLayerPerHead)
	add("KV_SELECT_PER_HEAD", SelectPerHead)
	add("KV_SELECT_UNION", SelectUnion)
	add("KV_SELECT_PER_LAYER", SelectPerLayer)
	add("KV_ALLOCATE_DEFAULT", AllocateDefault)
	add("KV_ALLOCATE_UNIFORM", AllocateUniform)
	add("KV_ALLOCATE_PYRAMID", AllocatePyramid)
	add("KV_ALLOCATE_ADAPTIVE", AllocateAdaptive)
	add("KV_ALLOCATE_THRESHOLD", AllocateThreshold)
	add("KV_POLICY_PROTECT_PROMPT", PolicyProtectPrompt)
	add("KV_POLICY_PROMPT_ON_TOP", PolicyPromptOnTop)
	add("KV_POLICY_OFFSETS_MAX", PolicyOffsetsMax)
	add("KV_POLICY_STATISTICS_ONLINE", PolicyStatisticsOnline)
	add("KV_POLICY_SAMPLE", PolicySample)
	add("KV_POLICY_POOL_MAX", PolicyPoolMax)
	add("KV_POLICY_EXACT_REDUNDANCY", PolicyExactRedundancy)
	add("KV_POLICY_AT_PROMPT_END", PolicyAtPromptEnd)
	add("KV_COMPRESS_DONE", CompressDone)
	add("KV_COMPRESS_NOTHING", CompressNothing)
	add("KV_COMPRESS_DEFERRED", CompressDeferred)
	add("KV_COMPRESS_NO_STATISTICS", CompressNoStatistics)
	add("KV_COMPRESS_NO_OBSERVATIONS", CompressNoObservations)
	add("KV_LIVE_POOLS", LivePools)
	add("KV_LIVE_SEQUENCES", LiveSequences)
	add("KV_LIVE_STEPS", LiveSteps)
	add("KV_CUDA_TABLES_ATTENDED", cudaTablesAttended)
	add("KV_CUDA_SCORE_KERNEL", CUDAScoreKernel)
	add("KV_CUDA_SCORE_PRODUCTS", CUDAScoreProducts)
	add("KV_CUDA_SCORE_MEASURED", CUDAScoreMeasured)
	add("KV_CUDA_SCORING_TF32", cudaScoringTF32)
	for i, line := range got { // %d of a Stringer prints the number; make sure of it
		if _, err := strconv.Atoi(strings.Fields(line)[1]); err != nil {
			t.Errorf("line %d: %s", i, line)
		}
	}
	sameLines(t, got, golden(t, "constants.txt"))
}

var allStatuses = []Status{StatusOK, ErrInvalid, ErrUnsupported, ErrStale, ErrNoSnapshot, ErrAgain,
	ErrTooLarge, ErrLimit, ErrNoMemory, ErrDevice, ErrIO, ErrCorrupt, ErrInternal}

func TestStatuses(t *testing.T) {
	var got []string
	names := []string{"KV_OK", "KV_INVALID", "KV_UNSUPPORTED", "KV_STALE", "KV_NO_SNAPSHOT",
		"KV_AGAIN", "KV_TOO_LARGE", "KV_LIMIT", "KV_NO_MEMORY", "KV_DEVICE", "KV_IO", "KV_CORRUPT",
		"KV_INTERNAL"}
	for i, status := range allStatuses {
		if status.String() != names[i] {
			t.Errorf("%d is %v, want %s", int32(status), status, names[i])
		}
		got = append(got, fmt.Sprintf("%s %d category %d", names[i], int32(status),
			int32(status.Category())))
	}
	sameLines(t, got, golden(t, "statuses.txt"))
}

func TestUnknownStatusesCountAsTheirCategory(t *testing.T) {
	for code, category := range map[Status]Category{7: CategoryOK, -150: CategoryArgument,
		-299: CategoryState, -399: CategoryCapacity, -450: CategoryDevice, -599: CategoryIO,
		-601: CategoryInternal, -1: CategoryInternal} {
		if code.Category() != category {
			t.Errorf("%d has the category %v, want %v", code, code.Category(), category)
		}
		if want := fmt.Sprintf("KV_UNKNOWN(%d)", int32(code)); code.String() != want {
			t.Errorf("%d is called %q, want %q", int32(code), code, want)
		}
	}
}
