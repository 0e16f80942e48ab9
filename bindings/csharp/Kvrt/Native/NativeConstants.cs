// The constants of kvrt.h, under its names. The enumerations of the safe layer take their numbers
// from here; tests compare these with the C compiler's.
#pragma warning disable 1591 // the header documents them

namespace Kvrt.Native
{
    /// <summary>Every constant of kvrt.h.</summary>
    public static class NativeConstants
    {
        public const uint KVRT_VERSION_MAJOR = 0;
        public const uint KVRT_VERSION_MINOR = 1;
        public const uint KVRT_VERSION_PATCH = 0;
        public const uint KVRT_VERSION = KVRT_VERSION_MAJOR * 10000 + KVRT_VERSION_MINOR * 100 +
            KVRT_VERSION_PATCH;

        public const int KV_OK = 0;
        public const int KV_INVALID = -100;
        public const int KV_UNSUPPORTED = -101;
        public const int KV_STALE = -200;
        public const int KV_NO_SNAPSHOT = -201;
        public const int KV_AGAIN = -300;
        public const int KV_TOO_LARGE = -301;
        public const int KV_LIMIT = -302;
        public const int KV_NO_MEMORY = -303;
        public const int KV_DEVICE = -400;
        public const int KV_IO = -500;
        public const int KV_CORRUPT = -501;
        public const int KV_INTERNAL = -600;

        public const int KV_CATEGORY_OK = 0;
        public const int KV_CATEGORY_ARGUMENT = 1;
        public const int KV_CATEGORY_STATE = 2;
        public const int KV_CATEGORY_CAPACITY = 3;
        public const int KV_CATEGORY_DEVICE = 4;
        public const int KV_CATEGORY_IO = 5;
        public const int KV_CATEGORY_INTERNAL = 6;

        public const int KV_LOG_DEBUG = 1;
        public const int KV_LOG_INFO = 2;
        public const int KV_LOG_WARNING = 3;
        public const int KV_LOG_ERROR = 4;

        public const uint KV_FORMAT_DEFAULT = 0;
        public const uint KV_FORMAT_F32 = 1;
        public const uint KV_FORMAT_F16 = 2;
        public const uint KV_FORMAT_BF16 = 3;
        public const uint KV_FORMAT_FP8_E4M3 = 4;
        public const uint KV_FORMAT_FP8_E5M2 = 5;
        public const uint KV_FORMAT_FP8_TOKEN = 6;
        public const uint KV_FORMAT_INT8_TOKEN = 7;
        public const uint KV_FORMAT_INT4_TOKEN = 8;
        public const uint KV_FORMAT_Q8_0 = 9;
        public const uint KV_FORMAT_Q4_0 = 10;
        public const uint KV_FORMAT_Q4_1 = 11;
        public const uint KV_FORMAT_NVFP4 = 12;
        public const uint KV_FORMAT_MXFP4 = 13;
        public const uint KV_FORMAT_KIVI4 = 14;
        public const uint KV_FORMAT_KIVI2 = 15;
        public const uint KV_FORMAT_KVARN4 = 16;
        public const uint KV_FORMAT_KVARN2 = 17;
        public const uint KV_FORMAT_TURBO4 = 18;
        public const uint KV_FORMAT_TURBO3 = 19;
        public const uint KV_FORMAT_AFFINE4 = 20;

        public const uint KV_STORAGE_SCALE_ONE = 1u << 0;
        public const uint KV_STORAGE_ROTATE = 1u << 1;

        public const uint KV_ROPE_NONE = 0;
        public const uint KV_ROPE_HALF = 1;
        public const uint KV_ROPE_INTERLEAVED = 2;

        public const uint KV_LAYER_SHARED = 1u << 0;
        public const uint KV_LAYER_LANE_PER_HEAD = 1u << 1;
        public const uint KV_LAYER_CACHE_POSITIONS = 1u << 2;

        public const uint KV_PRESET_NEAR_LOSSLESS = 1;
        public const uint KV_PRESET_BALANCED = 2;
        public const uint KV_PRESET_SMALLEST = 3;

        public const uint KV_DEVICE_DEFAULT = 0;
        public const uint KV_DEVICE_CPU = 1;
        public const uint KV_DEVICE_CUDA = 2;

        public const uint KV_LAYOUT_NATIVE = 0;
        public const uint KV_LAYOUT_HND = 1;
        public const uint KV_LAYOUT_NHD = 2;

        public const uint KV_POOL_ELASTIC = 1u << 0;
        public const uint KV_POOL_THREAD_SAFE = 1u << 1;
        public const uint KV_POOL_DEBUG = 1u << 2;
        public const uint KV_POOL_HOST_FENCES = 1u << 3;

        public const uint KV_SEQ_GATHER_STATISTICS = 1u << 0;

        public const uint KV_DTYPE_F32 = 1;
        public const uint KV_DTYPE_F16 = 2;
        public const uint KV_DTYPE_BF16 = 3;

        public const uint KV_ATTEND_NO_STATISTICS = 1u << 0;

        public const uint KV_SCORER_NONE = 0;
        public const uint KV_SCORER_TRIATTENTION = 1;
        public const uint KV_SCORER_STREAMING = 2;
        public const uint KV_SCORER_KEY_NORM = 3;
        public const uint KV_SCORER_RANDOM = 4;
        public const uint KV_SCORER_H2O = 5;
        public const uint KV_SCORER_SCISSORHANDS = 6;
        public const uint KV_SCORER_TOVA = 7;
        public const uint KV_SCORER_SNAPKV = 8;
        public const uint KV_SCORER_RKV = 9;
        public const uint KV_SCORER_VASE_ATTENTION = 10;
        public const uint KV_SCORER_VASE_SKETCH = 11;
        public const uint KV_SCORER_KEYDIFF = 12;
        public const uint KV_SCORER_LAGKV = 13;
        public const uint KV_SCORER_EXPECTED_ATTENTION = 14;
        public const uint KV_SCORER_HOST = 15;
        public const uint KV_SCORER_BLEND = 16;

        public const uint KV_SELECT_DEFAULT = 0;
        public const uint KV_SELECT_PER_LAYER_PER_HEAD = 1;
        public const uint KV_SELECT_PER_HEAD = 2;
        public const uint KV_SELECT_UNION = 3;
        public const uint KV_SELECT_PER_LAYER = 4;

        public const uint KV_ALLOCATE_DEFAULT = 0;
        public const uint KV_ALLOCATE_UNIFORM = 1;
        public const uint KV_ALLOCATE_PYRAMID = 2;
        public const uint KV_ALLOCATE_ADAPTIVE = 3;
        public const uint KV_ALLOCATE_THRESHOLD = 4;

        public const uint KV_POLICY_PROTECT_PROMPT = 1u << 0;
        public const uint KV_POLICY_PROMPT_ON_TOP = 1u << 1;
        public const uint KV_POLICY_OFFSETS_MAX = 1u << 2;
        public const uint KV_POLICY_STATISTICS_ONLINE = 1u << 3;
        public const uint KV_POLICY_SAMPLE = 1u << 4;
        public const uint KV_POLICY_POOL_MAX = 1u << 5;
        public const uint KV_POLICY_EXACT_REDUNDANCY = 1u << 6;
        public const uint KV_POLICY_AT_PROMPT_END = 1u << 7;

        public const uint KV_COMPRESS_DONE = 1;
        public const uint KV_COMPRESS_NOTHING = 2;
        public const uint KV_COMPRESS_DEFERRED = 3;
        public const uint KV_COMPRESS_NO_STATISTICS = 4;
        public const uint KV_COMPRESS_NO_OBSERVATIONS = 5;

        public const uint KV_LIVE_POOLS = 1;
        public const uint KV_LIVE_SEQUENCES = 2;
        public const uint KV_LIVE_STEPS = 3;

        public const uint KV_CUDA_TABLES_ATTENDED = 1u << 0;
        public const uint KV_CUDA_SCORE_KERNEL = 0;
        public const uint KV_CUDA_SCORE_PRODUCTS = 1;
        public const uint KV_CUDA_SCORE_MEASURED = 2;
        public const uint KV_CUDA_SCORING_TF32 = 1;
    }
}
