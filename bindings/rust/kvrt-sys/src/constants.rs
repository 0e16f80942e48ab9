//! The constants of `kvrt.h`, in its order.

use crate::structs::kv_status;

pub const KVRT_VERSION_MAJOR: u32 = 0;
pub const KVRT_VERSION_MINOR: u32 = 1;
pub const KVRT_VERSION_PATCH: u32 = 0;
pub const KVRT_VERSION: u32 = 100;

pub const KV_OK: kv_status = 0;
pub const KV_INVALID: kv_status = -100;
pub const KV_UNSUPPORTED: kv_status = -101;
pub const KV_STALE: kv_status = -200;
pub const KV_NO_SNAPSHOT: kv_status = -201;
pub const KV_AGAIN: kv_status = -300;
pub const KV_TOO_LARGE: kv_status = -301;
pub const KV_LIMIT: kv_status = -302;
pub const KV_NO_MEMORY: kv_status = -303;
pub const KV_DEVICE: kv_status = -400;
pub const KV_IO: kv_status = -500;
pub const KV_CORRUPT: kv_status = -501;
pub const KV_INTERNAL: kv_status = -600;

pub const KV_CATEGORY_OK: i32 = 0;
pub const KV_CATEGORY_ARGUMENT: i32 = 1;
pub const KV_CATEGORY_STATE: i32 = 2;
pub const KV_CATEGORY_CAPACITY: i32 = 3;
pub const KV_CATEGORY_DEVICE: i32 = 4;
pub const KV_CATEGORY_IO: i32 = 5;
pub const KV_CATEGORY_INTERNAL: i32 = 6;

pub const KV_LOG_DEBUG: i32 = 1;
pub const KV_LOG_INFO: i32 = 2;
pub const KV_LOG_WARNING: i32 = 3;
pub const KV_LOG_ERROR: i32 = 4;

pub const KV_FORMAT_DEFAULT: u32 = 0;
pub const KV_FORMAT_F32: u32 = 1;
pub const KV_FORMAT_F16: u32 = 2;
pub const KV_FORMAT_BF16: u32 = 3;
pub const KV_FORMAT_FP8_E4M3: u32 = 4;
pub const KV_FORMAT_FP8_E5M2: u32 = 5;
pub const KV_FORMAT_FP8_TOKEN: u32 = 6;
pub const KV_FORMAT_INT8_TOKEN: u32 = 7;
pub const KV_FORMAT_INT4_TOKEN: u32 = 8;
pub const KV_FORMAT_Q8_0: u32 = 9;
pub const KV_FORMAT_Q4_0: u32 = 10;
pub const KV_FORMAT_Q4_1: u32 = 11;
pub const KV_FORMAT_NVFP4: u32 = 12;
pub const KV_FORMAT_MXFP4: u32 = 13;
pub const KV_FORMAT_KIVI4: u32 = 14;
pub const KV_FORMAT_KIVI2: u32 = 15;
pub const KV_FORMAT_KVARN4: u32 = 16;
pub const KV_FORMAT_KVARN2: u32 = 17;
pub const KV_FORMAT_TURBO4: u32 = 18;
pub const KV_FORMAT_TURBO3: u32 = 19;
pub const KV_FORMAT_AFFINE4: u32 = 20;

pub const KV_STORAGE_SCALE_ONE: u32 = 1;
pub const KV_STORAGE_ROTATE: u32 = 2;

pub const KV_ROPE_NONE: u32 = 0;
pub const KV_ROPE_HALF: u32 = 1;
pub const KV_ROPE_INTERLEAVED: u32 = 2;

pub const KV_LAYER_SHARED: u32 = 1;
pub const KV_LAYER_LANE_PER_HEAD: u32 = 2;
pub const KV_LAYER_CACHE_POSITIONS: u32 = 4;

pub const KV_PRESET_NEAR_LOSSLESS: u32 = 1;
pub const KV_PRESET_BALANCED: u32 = 2;
pub const KV_PRESET_SMALLEST: u32 = 3;

pub const KV_DEVICE_DEFAULT: u32 = 0;
pub const KV_DEVICE_CPU: u32 = 1;
pub const KV_DEVICE_CUDA: u32 = 2;

pub const KV_LAYOUT_NATIVE: u32 = 0;
pub const KV_LAYOUT_HND: u32 = 1;
pub const KV_LAYOUT_NHD: u32 = 2;

pub const KV_POOL_ELASTIC: u32 = 1;
pub const KV_POOL_THREAD_SAFE: u32 = 2;
pub const KV_POOL_DEBUG: u32 = 4;
pub const KV_POOL_HOST_FENCES: u32 = 8;

pub const KV_SEQ_GATHER_STATISTICS: u32 = 1;

pub const KV_DTYPE_F32: u32 = 1;
pub const KV_DTYPE_F16: u32 = 2;
pub const KV_DTYPE_BF16: u32 = 3;

pub const KV_ATTEND_NO_STATISTICS: u32 = 1;

pub const KV_SCORER_NONE: u32 = 0;
pub const KV_SCORER_TRIATTENTION: u32 = 1;
pub const KV_SCORER_STREAMING: u32 = 2;
pub const KV_SCORER_KEY_NORM: u32 = 3;
pub const KV_SCORER_RANDOM: u32 = 4;
pub const KV_SCORER_H2O: u32 = 5;
pub const KV_SCORER_SCISSORHANDS: u32 = 6;
pub const KV_SCORER_TOVA: u32 = 7;
pub const KV_SCORER_SNAPKV: u32 = 8;
pub const KV_SCORER_RKV: u32 = 9;
pub const KV_SCORER_VASE_ATTENTION: u32 = 10;
pub const KV_SCORER_VASE_SKETCH: u32 = 11;
pub const KV_SCORER_KEYDIFF: u32 = 12;
pub const KV_SCORER_LAGKV: u32 = 13;
pub const KV_SCORER_EXPECTED_ATTENTION: u32 = 14;
pub const KV_SCORER_HOST: u32 = 15;
pub const KV_SCORER_BLEND: u32 = 16;

pub const KV_SELECT_DEFAULT: u32 = 0;
pub const KV_SELECT_PER_LAYER_PER_HEAD: u32 = 1;
pub const KV_SELECT_PER_HEAD: u32 = 2;
pub const KV_SELECT_UNION: u32 = 3;
pub const KV_SELECT_PER_LAYER: u32 = 4;

pub const KV_ALLOCATE_DEFAULT: u32 = 0;
pub const KV_ALLOCATE_UNIFORM: u32 = 1;
pub const KV_ALLOCATE_PYRAMID: u32 = 2;
pub const KV_ALLOCATE_ADAPTIVE: u32 = 3;
pub const KV_ALLOCATE_THRESHOLD: u32 = 4;

pub const KV_POLICY_PROTECT_PROMPT: u32 = 1;
pub const KV_POLICY_PROMPT_ON_TOP: u32 = 2;
pub const KV_POLICY_OFFSETS_MAX: u32 = 4;
pub const KV_POLICY_STATISTICS_ONLINE: u32 = 8;
pub const KV_POLICY_SAMPLE: u32 = 16;
pub const KV_POLICY_POOL_MAX: u32 = 32;
pub const KV_POLICY_EXACT_REDUNDANCY: u32 = 64;
pub const KV_POLICY_AT_PROMPT_END: u32 = 128;

pub const KV_COMPRESS_DONE: u32 = 1;
pub const KV_COMPRESS_NOTHING: u32 = 2;
pub const KV_COMPRESS_DEFERRED: u32 = 3;
pub const KV_COMPRESS_NO_STATISTICS: u32 = 4;
pub const KV_COMPRESS_NO_OBSERVATIONS: u32 = 5;

pub const KV_LIVE_POOLS: u32 = 1;
pub const KV_LIVE_SEQUENCES: u32 = 2;
pub const KV_LIVE_STEPS: u32 = 3;

pub const KV_CUDA_TABLES_ATTENDED: u32 = 1;
pub const KV_CUDA_SCORE_KERNEL: u32 = 0;
pub const KV_CUDA_SCORE_PRODUCTS: u32 = 1;
pub const KV_CUDA_SCORE_MEASURED: u32 = 2;
pub const KV_CUDA_SCORING_TF32: u32 = 1;
