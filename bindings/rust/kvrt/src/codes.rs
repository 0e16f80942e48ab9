//! The named numbers of the interface as enums. A value that this crate does not know keeps its
//! number, so that a newer library can be used and a wrong value gives the library's error.

use kvrt_sys as sys;

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident: $raw:ty {
        $($(#[$variant_doc:meta])* $variant:ident = $code:ident,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
            /// A value without a name here.
            Other($raw),
        }

        impl $name {
            /// The number in the C interface.
            pub fn code(self) -> $raw {
                match self {
                    $($name::$variant => sys::$code,)*
                    $name::Other(code) => code,
                }
            }
        }

        impl From<$raw> for $name {
            fn from(code: $raw) -> Self {
                match code {
                    $(sys::$code => $name::$variant,)*
                    _ => $name::Other(code),
                }
            }
        }
    };
}

codes! {
    /// What kind of error a status is.
    Category: i32 {
        Ok = KV_CATEGORY_OK,
        Argument = KV_CATEGORY_ARGUMENT,
        State = KV_CATEGORY_STATE,
        Capacity = KV_CATEGORY_CAPACITY,
        Device = KV_CATEGORY_DEVICE,
        Io = KV_CATEGORY_IO,
        Internal = KV_CATEGORY_INTERNAL,
    }
}

codes! {
    /// How serious a line of the log is.
    LogLevel: i32 {
        Debug = KV_LOG_DEBUG,
        Info = KV_LOG_INFO,
        Warning = KV_LOG_WARNING,
        Error = KV_LOG_ERROR,
    }
}

codes! {
    /// How keys and values are stored.
    Format: u32 {
        /// f16.
        Default = KV_FORMAT_DEFAULT,
        F32 = KV_FORMAT_F32,
        F16 = KV_FORMAT_F16,
        Bf16 = KV_FORMAT_BF16,
        /// 8-bit floating point up to 448, times a static scale (`Storage`).
        Fp8E4m3 = KV_FORMAT_FP8_E4M3,
        /// 8-bit floating point up to 57344, times a static scale (`Storage`).
        Fp8E5m2 = KV_FORMAT_FP8_E5M2,
        /// As `Fp8E4m3`, with a scale per token and head instead.
        Fp8Token = KV_FORMAT_FP8_TOKEN,
        /// 8-bit integers with a scale per token and head.
        Int8Token = KV_FORMAT_INT8_TOKEN,
        /// 4-bit integers with a scale and a minimum per token and head.
        Int4Token = KV_FORMAT_INT4_TOKEN,
        /// Groups of 32 channels as llama.cpp stores them, as the next two.
        Q8_0 = KV_FORMAT_Q8_0,
        Q4_0 = KV_FORMAT_Q4_0,
        Q4_1 = KV_FORMAT_Q4_1,
        /// 4-bit floating point, groups of 16 channels with an 8-bit scale.
        Nvfp4 = KV_FORMAT_NVFP4,
        /// 4-bit floating point, groups of 32 channels with a power of two.
        Mxfp4 = KV_FORMAT_MXFP4,
        /// 4-bit integers; of keys, 32 tokens of a channel share a scale and a minimum, of values
        /// 32 channels of a token. Keys stay f16 until their block is full. `block_tokens` must be
        /// a multiple of 32.
        Kivi4 = KV_FORMAT_KIVI4,
        /// As `Kivi4`, with 2 bits.
        Kivi2 = KV_FORMAT_KIVI2,
        /// 4-bit integers of rotated rows whose variances are levelled over a block, which stay
        /// f16 until it is full. `block_tokens` must be a multiple of 64.
        Kvarn4 = KV_FORMAT_KVARN4,
        /// As `Kvarn4`, with 2 bits.
        Kvarn2 = KV_FORMAT_KVARN2,
        /// Rotated rows in 4 bits: keys as a norm and levels of a normal distribution, values with
        /// a scale and a minimum, per token and head.
        Turbo4 = KV_FORMAT_TURBO4,
        /// As `Turbo4`, with 3 bits.
        Turbo3 = KV_FORMAT_TURBO3,
        /// For keys alone, so that values need a format of their own: 4 bits, less a mean of keys
        /// before rotation and over a scale per channel. Wants `Storage::channels`, and a `Rope`
        /// also where nothing is rotated (`RopeStyle::None`).
        Affine4 = KV_FORMAT_AFFINE4,
    }
}

codes! {
    /// Formats that go well together (`Model::with_preset`). Short windows are spared: layers with
    /// one of at most 1,024 tokens stay in f16, or in `F32` or `Bf16` where they say so.
    Preset: u32 {
        /// `Int8Token`, rotated.
        NearLossless = KV_PRESET_NEAR_LOSSLESS,
        /// Keys `Int8Token`, values `Int4Token`, both rotated; the first two and the last two
        /// layers that store are spared too.
        Balanced = KV_PRESET_BALANCED,
        /// `Int4Token`, rotated; spared as in `Balanced`.
        Smallest = KV_PRESET_SMALLEST,
    }
}

codes! {
    /// Which dimensions of a head a rotation pairs.
    RopeStyle: u32 {
        None = KV_ROPE_NONE,
        /// i with i + dimensions / 2 (Llama, Qwen).
        Half = KV_ROPE_HALF,
        /// 2i with 2i + 1.
        Interleaved = KV_ROPE_INTERLEAVED,
    }
}

codes! {
    /// Where a pool lives.
    Device: u32 {
        Default = KV_DEVICE_DEFAULT,
        Cpu = KV_DEVICE_CPU,
        Cuda = KV_DEVICE_CUDA,
    }
}

codes! {
    /// How the tiles of a block lie.
    Layout: u32 {
        /// What the library's kernels like best.
        Native = KV_LAYOUT_NATIVE,
        /// `[kv_head][slot][dim]`, for foreign kernels.
        Hnd = KV_LAYOUT_HND,
        /// `[slot][kv_head][dim]`, for foreign kernels.
        Nhd = KV_LAYOUT_NHD,
    }
}

codes! {
    /// What ranks tokens when a policy must drop some.
    Scorer: u32 {
        None = KV_SCORER_NONE,
        /// Expected future attention, from query statistics.
        TriAttention = KV_SCORER_TRIATTENTION,
        /// Sinks and the most recent.
        Streaming = KV_SCORER_STREAMING,
        /// Small key norms stay.
        KeyNorm = KV_SCORER_KEY_NORM,
        /// Uniform, drawn anew each round: the baseline.
        Random = KV_SCORER_RANDOM,
        /// By the attention that `Step::attend` observes, as the next five, `Blend` too: all of it.
        /// They take one of the pool's `max_observed_sequences`, and so does `Host`.
        H2o = KV_SCORER_H2O,
        /// How often it was at least the mean, in the last queries.
        Scissorhands = KV_SCORER_SCISSORHANDS,
        /// That of the last query, over all heads of a layer.
        Tova = KV_SCORER_TOVA,
        /// That of the last queries, pooled over neighbours.
        SnapKv = KV_SCORER_SNAPKV,
        /// That of the last queries less redundancy of keys.
        RKv = KV_SCORER_RKV,
        /// As `SnapKv`, sampled, with a reserve of large values.
        VaseAttention = KV_SCORER_VASE_ATTENTION,
        /// Size of keys and values in random directions.
        VaseSketch = KV_SCORER_VASE_SKETCH,
        /// Keys unlike the mean of all stay.
        KeyDiff = KV_SCORER_KEYDIFF,
        /// Deviation within the ranges of the next tokens.
        LagKv = KV_SCORER_LAGKV,
        /// Expected logits, from query statistics, times the size of values.
        ExpectedAttention = KV_SCORER_EXPECTED_ATTENTION,
        /// Numbers that the host gives (`PoolOf::set_scores`).
        Host = KV_SCORER_HOST,
        /// What attention gave a token so far, and what `TriAttention` expects.
        Blend = KV_SCORER_BLEND,
    }
}

codes! {
    /// Which sets of survivors may differ.
    Selection: u32 {
        /// Per layer and per head.
        Default = KV_SELECT_DEFAULT,
        PerLayerPerHead = KV_SELECT_PER_LAYER_PER_HEAD,
        /// One set per KV head, the same in all layers.
        PerHead = KV_SELECT_PER_HEAD,
        /// One set of tokens for the whole model.
        Union = KV_SELECT_UNION,
        /// One set per layer, for all its KV heads.
        PerLayer = KV_SELECT_PER_LAYER,
    }
}

codes! {
    /// How many tokens each layer and head keeps of a round's budget.
    Allocator: u32 {
        /// Uniform.
        Default = KV_ALLOCATE_DEFAULT,
        /// The budget, everywhere.
        Uniform = KV_ALLOCATE_UNIFORM,
        /// Falls from layer to layer around the budget.
        Pyramid = KV_ALLOCATE_PYRAMID,
        /// Heads of a layer compete for their budgets' sum: layers with `Layer::lane_per_head`.
        Adaptive = KV_ALLOCATE_ADAPTIVE,
        /// What scores `Policy::threshold` or more, at most the budget.
        Threshold = KV_ALLOCATE_THRESHOLD,
    }
}

codes! {
    /// What became of a round of compaction.
    CompressOutcome: u32 {
        Done = KV_COMPRESS_DONE,
        /// No more is retained than the policy keeps.
        Nothing = KV_COMPRESS_NOTHING,
        /// The sequence is in an open step: the round runs at its end.
        Deferred = KV_COMPRESS_DEFERRED,
        /// TriAttention has seen no queries and has no file.
        NoStatistics = KV_COMPRESS_NO_STATISTICS,
        /// Nothing was observed for this scorer, or the host has given no scores.
        NoObservations = KV_COMPRESS_NO_OBSERVATIONS,
    }
}

impl CompressOutcome {
    /// 0 says that there was no round.
    pub(crate) fn of_round(code: u32) -> Option<CompressOutcome> {
        (code != 0).then(|| CompressOutcome::from(code))
    }
}

codes! {
    /// Objects that are counted over all pools of the process.
    LiveKind: u32 {
        Pools = KV_LIVE_POOLS,
        Sequences = KV_LIVE_SEQUENCES,
        Steps = KV_LIVE_STEPS,
    }
}

codes! {
    /// Who scores keys by TriAttention on a CUDA device.
    CudaScoreMethod: u32 {
        /// A kernel of the library's own, which a pool begins with.
        Kernel = KV_CUDA_SCORE_KERNEL,
        /// Matrix products by cuBLASLt.
        Products = KV_CUDA_SCORE_PRODUCTS,
        /// Whichever is measured to be faster.
        Measured = KV_CUDA_SCORE_MEASURED,
    }
}
