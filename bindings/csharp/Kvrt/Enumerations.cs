// The enumerations of kvrt.h under .NET's names, with the header's numbers.
using System;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>What a call returned. A code that this assembly does not know keeps its number.
    /// </summary>
    public enum Status
    {
        /// <summary>Success.</summary>
        Ok = NativeConstants.KV_OK,
        /// <summary>An argument or the order of calls is wrong; nothing changed.</summary>
        Invalid = NativeConstants.KV_INVALID,
        /// <summary>This build or this geometry cannot.</summary>
        Unsupported = NativeConstants.KV_UNSUPPORTED,
        /// <summary>The sequence is gone.</summary>
        Stale = NativeConstants.KV_STALE,
        /// <summary>What lies before that position is no longer stored.</summary>
        NoSnapshot = NativeConstants.KV_NO_SNAPSHOT,
        /// <summary>Not now: blocks will come back.</summary>
        Again = NativeConstants.KV_AGAIN,
        /// <summary>Never fits this pool.</summary>
        TooLarge = NativeConstants.KV_TOO_LARGE,
        /// <summary>A limit given at creation is reached.</summary>
        Limit = NativeConstants.KV_LIMIT,
        /// <summary>The host's or the system's allocator refused.</summary>
        NoMemory = NativeConstants.KV_NO_MEMORY,
        /// <summary>The device or its driver failed.</summary>
        Device = NativeConstants.KV_DEVICE,
        /// <summary>A file could not be read or written.</summary>
        IO = NativeConstants.KV_IO,
        /// <summary>Checksum, version or geometry of a file does not match.</summary>
        Corrupt = NativeConstants.KV_CORRUPT,
        /// <summary>A defect of the library: please report it.</summary>
        Internal = NativeConstants.KV_INTERNAL
    }

    /// <summary>What kind of thing went wrong: what an unknown <see cref="Status"/> counts as.
    /// </summary>
    public enum Category
    {
        /// <summary>Nothing.</summary>
        Ok = NativeConstants.KV_CATEGORY_OK,
        /// <summary>An argument, or the order of calls.</summary>
        Argument = NativeConstants.KV_CATEGORY_ARGUMENT,
        /// <summary>The state of a sequence.</summary>
        State = NativeConstants.KV_CATEGORY_STATE,
        /// <summary>Room, limits, memory.</summary>
        Capacity = NativeConstants.KV_CATEGORY_CAPACITY,
        /// <summary>The device.</summary>
        Device = NativeConstants.KV_CATEGORY_DEVICE,
        /// <summary>Files.</summary>
        IO = NativeConstants.KV_CATEGORY_IO,
        /// <summary>A defect of the library.</summary>
        Internal = NativeConstants.KV_CATEGORY_INTERNAL
    }

    /// <summary>How grave a line of the log is.</summary>
    public enum LogLevel
    {
        /// <summary>For the library's authors.</summary>
        Debug = NativeConstants.KV_LOG_DEBUG,
        /// <summary>Good to know.</summary>
        Information = NativeConstants.KV_LOG_INFO,
        /// <summary>Worth a look.</summary>
        Warning = NativeConstants.KV_LOG_WARNING,
        /// <summary>Something is broken.</summary>
        Error = NativeConstants.KV_LOG_ERROR
    }

    /// <summary>How keys and values are stored; <see cref="Capabilities"/> says which of these a
    /// library has.</summary>
    public enum StorageFormat : uint
    {
        /// <summary>f16 for keys, the keys' format for values.</summary>
        Default = NativeConstants.KV_FORMAT_DEFAULT,
        /// <summary>32-bit floats.</summary>
        Float32 = NativeConstants.KV_FORMAT_F32,
        /// <summary>IEEE 754 half precision: magnitudes up to 65504.</summary>
        Float16 = NativeConstants.KV_FORMAT_F16,
        /// <summary>The upper half of a 32-bit float.</summary>
        BFloat16 = NativeConstants.KV_FORMAT_BF16,
        /// <summary>8-bit floating point times a static scale: magnitudes up to 448 scales, larger
        /// ones saturate and are counted. The scale must be given in <see cref="Storage"/>.
        /// </summary>
        Float8E4M3 = NativeConstants.KV_FORMAT_FP8_E4M3,
        /// <summary>8-bit floating point times a static scale: magnitudes up to 57344 scales,
        /// larger ones saturate and are counted. The scale must be given in <see cref="Storage"/>.
        /// </summary>
        Float8E5M2 = NativeConstants.KV_FORMAT_FP8_E5M2,
        /// <summary>8-bit floating point (e4m3), a scale per token and head.</summary>
        Float8Token = NativeConstants.KV_FORMAT_FP8_TOKEN,
        /// <summary>8-bit integers, a scale per token and head.</summary>
        Int8Token = NativeConstants.KV_FORMAT_INT8_TOKEN,
        /// <summary>4-bit integers, a scale and a minimum per token and head.</summary>
        Int4Token = NativeConstants.KV_FORMAT_INT4_TOKEN,
        /// <summary>8-bit integers, a scale per 32 channels, as llama.cpp stores them.</summary>
        Q8_0 = NativeConstants.KV_FORMAT_Q8_0,
        /// <summary>4-bit integers, a scale per 32 channels, as llama.cpp stores them.</summary>
        Q4_0 = NativeConstants.KV_FORMAT_Q4_0,
        /// <summary>4-bit integers, a scale and a minimum per 32 channels, as llama.cpp stores
        /// them.</summary>
        Q4_1 = NativeConstants.KV_FORMAT_Q4_1,
        /// <summary>4-bit floating point, an 8-bit scale per 16 channels, and a static scale.
        /// </summary>
        NvFp4 = NativeConstants.KV_FORMAT_NVFP4,
        /// <summary>4-bit floating point, a power of two per 32 channels.</summary>
        MxFp4 = NativeConstants.KV_FORMAT_MXFP4,
        /// <summary>4-bit integers; of keys, 32 tokens of a channel share a scale and a minimum, of
        /// values 32 channels of a token. Keys stay f16 until their block is full.
        /// <see cref="PoolConfig.BlockTokens"/> must be a multiple of 32.</summary>
        Kivi4 = NativeConstants.KV_FORMAT_KIVI4,
        /// <summary>As <see cref="Kivi4"/>, with 2 bits.</summary>
        Kivi2 = NativeConstants.KV_FORMAT_KIVI2,
        /// <summary>4-bit integers of rotated rows whose variances are levelled over a block, which
        /// stay f16 until it is full. <see cref="PoolConfig.BlockTokens"/> must be a multiple of
        /// 64.</summary>
        Kvarn4 = NativeConstants.KV_FORMAT_KVARN4,
        /// <summary>As <see cref="Kvarn4"/>, with 2 bits.</summary>
        Kvarn2 = NativeConstants.KV_FORMAT_KVARN2,
        /// <summary>Rotated rows in 4 bits: keys as a norm and levels of a normal distribution,
        /// values with a scale and a minimum, per token and head.</summary>
        Turbo4 = NativeConstants.KV_FORMAT_TURBO4,
        /// <summary>As <see cref="Turbo4"/>, with 3 bits.</summary>
        Turbo3 = NativeConstants.KV_FORMAT_TURBO3,
        /// <summary>For keys alone, so that values need a format of their own: 4 bits, less a mean
        /// of keys before rotation and over a scale per channel. Wants the channel constants of
        /// <see cref="Storage"/>, and a <see cref="Rope"/> also where nothing is rotated
        /// (<see cref="RopeStyle.None"/>).</summary>
        Affine4 = NativeConstants.KV_FORMAT_AFFINE4
    }

    /// <summary>Switches of <see cref="Storage"/>.</summary>
    [Flags]
    public enum StorageOptions : uint
    {
        /// <summary>None of them.</summary>
        None = 0,
        /// <summary>No static scales, and that is meant: 1.</summary>
        ScaleOne = NativeConstants.KV_STORAGE_SCALE_ONE,
        /// <summary>Store rows rotated by Hadamard's matrix, which spreads outliers; queries and
        /// results are rotated to match. Not for <see cref="StorageFormat.Float32"/>,
        /// <see cref="StorageFormat.Float16"/>, <see cref="StorageFormat.BFloat16"/>.</summary>
        Rotate = NativeConstants.KV_STORAGE_ROTATE
    }

    /// <summary>Formats that go well together, for <see cref="Model.WithPreset"/>. Layers with a
    /// window of at most 1,024 tokens are spared: they stay in f16, or in
    /// <see cref="StorageFormat.Float32"/> or <see cref="StorageFormat.BFloat16"/> where they say
    /// so.</summary>
    public enum Preset : uint
    {
        /// <summary><see cref="StorageFormat.Int8Token"/>, rotated.</summary>
        NearLossless = NativeConstants.KV_PRESET_NEAR_LOSSLESS,
        /// <summary>Keys <see cref="StorageFormat.Int8Token"/>, values
        /// <see cref="StorageFormat.Int4Token"/>, both rotated; the first two and the last two
        /// layers that store are spared too.</summary>
        Balanced = NativeConstants.KV_PRESET_BALANCED,
        /// <summary><see cref="StorageFormat.Int4Token"/>, rotated; spared as in
        /// <see cref="Balanced"/>.</summary>
        Smallest = NativeConstants.KV_PRESET_SMALLEST
    }

    /// <summary>The elements of a tensor that is handed over.</summary>
    public enum DataType : uint
    {
        /// <summary>32-bit floats.</summary>
        Float32 = NativeConstants.KV_DTYPE_F32,
        /// <summary>Bits of IEEE 754 half precision.</summary>
        Float16 = NativeConstants.KV_DTYPE_F16,
        /// <summary>The upper halves of 32-bit floats.</summary>
        BFloat16 = NativeConstants.KV_DTYPE_BF16
    }

    /// <summary>Which dimensions a rotation pairs.</summary>
    public enum RopeStyle : uint
    {
        /// <summary>Not rotated.</summary>
        None = NativeConstants.KV_ROPE_NONE,
        /// <summary>i with i + dimensions / 2 (Llama, Qwen).</summary>
        Half = NativeConstants.KV_ROPE_HALF,
        /// <summary>2i with 2i + 1.</summary>
        Interleaved = NativeConstants.KV_ROPE_INTERLEAVED
    }

    /// <summary>Where a pool lives.</summary>
    public enum Device : uint
    {
        /// <summary>The CPU.</summary>
        Default = NativeConstants.KV_DEVICE_DEFAULT,
        /// <summary>The CPU.</summary>
        Cpu = NativeConstants.KV_DEVICE_CPU,
        /// <summary>A CUDA device.</summary>
        Cuda = NativeConstants.KV_DEVICE_CUDA
    }

    /// <summary>How the tiles of a block lie; kvrt.h says it in full.</summary>
    public enum BlockLayout : uint
    {
        /// <summary>What the library's own kernels like best.</summary>
        Native = NativeConstants.KV_LAYOUT_NATIVE,
        /// <summary>[kv_head][slot][dim], keys first.</summary>
        Hnd = NativeConstants.KV_LAYOUT_HND,
        /// <summary>[slot][kv_head][dim], keys first.</summary>
        Nhd = NativeConstants.KV_LAYOUT_NHD
    }

    /// <summary>Switches of a pool.</summary>
    [Flags]
    public enum PoolOptions : uint
    {
        /// <summary>None of them.</summary>
        None = 0,
        /// <summary>Empty slabs are given back to the system.</summary>
        Elastic = NativeConstants.KV_POOL_ELASTIC,
        /// <summary>A lock inside orders calls of several threads.</summary>
        ThreadSafe = NativeConstants.KV_POOL_THREAD_SAFE,
        /// <summary>Fill fresh and freed blocks with NaN patterns, guard the ends of
        /// blocks.</summary>
        Debug = NativeConstants.KV_POOL_DEBUG,
        /// <summary>A step's fence passes when <see cref="Pool.PassFence"/> says so.</summary>
        HostFences = NativeConstants.KV_POOL_HOST_FENCES
    }

    /// <summary>How a round of compaction ranks tokens.</summary>
    public enum Scorer : uint
    {
        /// <summary>Not at all.</summary>
        None = NativeConstants.KV_SCORER_NONE,
        /// <summary>Expected future attention, from statistics of queries.</summary>
        TriAttention = NativeConstants.KV_SCORER_TRIATTENTION,
        /// <summary>Sinks and the most recent tokens.</summary>
        Streaming = NativeConstants.KV_SCORER_STREAMING,
        /// <summary>Small norms of keys stay.</summary>
        KeyNorm = NativeConstants.KV_SCORER_KEY_NORM,
        /// <summary>Uniform, drawn anew each round.</summary>
        Random = NativeConstants.KV_SCORER_RANDOM,
        /// <summary>By the attention that Step.Attend observes, as the next five and <see
        /// cref="Blend"/>: all of it. They take one of <see
        /// cref="PoolConfig.MaxObservedSequences"/>, and so does <see cref="Host"/>.</summary>
        H2o = NativeConstants.KV_SCORER_H2O,
        /// <summary>How often it was at least the mean, in the last queries.</summary>
        Scissorhands = NativeConstants.KV_SCORER_SCISSORHANDS,
        /// <summary>That of the last query, over all heads of a layer.</summary>
        Tova = NativeConstants.KV_SCORER_TOVA,
        /// <summary>That of the last queries, pooled over neighbours.</summary>
        SnapKv = NativeConstants.KV_SCORER_SNAPKV,
        /// <summary>That of the last queries less redundancy of keys.</summary>
        RKv = NativeConstants.KV_SCORER_RKV,
        /// <summary>As <see cref="SnapKv"/>, sampled, with a reserve of large values.</summary>
        VaseAttention = NativeConstants.KV_SCORER_VASE_ATTENTION,
        /// <summary>Size of keys and values in random directions.</summary>
        VaseSketch = NativeConstants.KV_SCORER_VASE_SKETCH,
        /// <summary>Keys unlike the mean of all stay.</summary>
        KeyDiff = NativeConstants.KV_SCORER_KEYDIFF,
        /// <summary>Deviation within the ranges of the next tokens.</summary>
        LagKv = NativeConstants.KV_SCORER_LAGKV,
        /// <summary>Expected logits, from statistics of queries, times the size of
        /// values.</summary>
        ExpectedAttention = NativeConstants.KV_SCORER_EXPECTED_ATTENTION,
        /// <summary>Numbers that the host gives: <see cref="Pool.SetScores"/>.</summary>
        Host = NativeConstants.KV_SCORER_HOST,
        /// <summary>What attention gave a token so far, and what <see cref="TriAttention"/>
        /// expects.</summary>
        Blend = NativeConstants.KV_SCORER_BLEND
    }

    /// <summary>Which sets of survivors may differ.</summary>
    public enum Selection : uint
    {
        /// <summary>Per layer and head.</summary>
        Default = NativeConstants.KV_SELECT_DEFAULT,
        /// <summary>Each layer and KV head has its own set.</summary>
        PerLayerPerHead = NativeConstants.KV_SELECT_PER_LAYER_PER_HEAD,
        /// <summary>One set per KV head, the same in all layers.</summary>
        PerHead = NativeConstants.KV_SELECT_PER_HEAD,
        /// <summary>One set for the whole model.</summary>
        Union = NativeConstants.KV_SELECT_UNION,
        /// <summary>One set per layer, for all its KV heads.</summary>
        PerLayer = NativeConstants.KV_SELECT_PER_LAYER
    }

    /// <summary>How many tokens each layer and head keeps of a round's budget.</summary>
    public enum Allocator : uint
    {
        /// <summary>Uniform.</summary>
        Default = NativeConstants.KV_ALLOCATE_DEFAULT,
        /// <summary>The budget, everywhere.</summary>
        Uniform = NativeConstants.KV_ALLOCATE_UNIFORM,
        /// <summary>Falls from layer to layer around the budget.</summary>
        Pyramid = NativeConstants.KV_ALLOCATE_PYRAMID,
        /// <summary>Heads of a layer compete for their budgets' sum: layers with <see
        /// cref="Layer.LanePerHead"/>.</summary>
        Adaptive = NativeConstants.KV_ALLOCATE_ADAPTIVE,
        /// <summary>What scores <see cref="Policy.Threshold"/> or more, at most the
        /// budget.</summary>
        Threshold = NativeConstants.KV_ALLOCATE_THRESHOLD
    }

    /// <summary>Switches of a policy.</summary>
    [Flags]
    public enum PolicyOptions : uint
    {
        /// <summary>None of them.</summary>
        None = 0,
        /// <summary>Positions below the prompt's length stay.</summary>
        ProtectPrompt = NativeConstants.KV_POLICY_PROTECT_PROMPT,
        /// <summary>The protected prompt does not count in the budget.</summary>
        PromptOnTop = NativeConstants.KV_POLICY_PROMPT_ON_TOP,
        /// <summary>TriAttention: the maximum over future offsets, not the mean.</summary>
        OffsetsMax = NativeConstants.KV_POLICY_OFFSETS_MAX,
        /// <summary>TriAttention: ignore statistics that were set on the pool.</summary>
        StatisticsOnline = NativeConstants.KV_POLICY_STATISTICS_ONLINE,
        /// <summary>Survivors are drawn with probabilities as their scores: scorers by attention
        /// but RKv, VaseSketch, ExpectedAttention and Host. Not with <see
        /// cref="Allocator.Threshold"/>.</summary>
        Sample = NativeConstants.KV_POLICY_SAMPLE,
        /// <summary><see cref="Policy.PoolWidth"/> takes the greatest score, not the
        /// mean.</summary>
        PoolMax = NativeConstants.KV_POLICY_POOL_MAX,
        /// <summary>RKv: with the rule that spares the newest of similar keys, at a quadratic
        /// cost.</summary>
        ExactRedundancy = NativeConstants.KV_POLICY_EXACT_REDUNDANCY,
        /// <summary>A round also when the prompt has been accepted.</summary>
        AtPromptEnd = NativeConstants.KV_POLICY_AT_PROMPT_END
    }

    /// <summary>What a round of compaction did.</summary>
    public enum CompressOutcome : uint
    {
        /// <summary>It removed tokens.</summary>
        Done = NativeConstants.KV_COMPRESS_DONE,
        /// <summary>No more is retained than the policy keeps.</summary>
        Nothing = NativeConstants.KV_COMPRESS_NOTHING,
        /// <summary>The sequence is in an open step: the round runs at its end.</summary>
        Deferred = NativeConstants.KV_COMPRESS_DEFERRED,
        /// <summary>TriAttention has seen no queries and has no file.</summary>
        NoStatistics = NativeConstants.KV_COMPRESS_NO_STATISTICS,
        /// <summary>Nothing was observed for this scorer, or the host has given no
        /// scores.</summary>
        NoObservations = NativeConstants.KV_COMPRESS_NO_OBSERVATIONS
    }

    /// <summary>Kinds of objects that the library counts.</summary>
    public enum LiveKind : uint
    {
        /// <summary>Pools.</summary>
        Pools = NativeConstants.KV_LIVE_POOLS,
        /// <summary>Sequences.</summary>
        Sequences = NativeConstants.KV_LIVE_SEQUENCES,
        /// <summary>Open steps.</summary>
        Steps = NativeConstants.KV_LIVE_STEPS
    }

    /// <summary>Who scores keys by TriAttention on a CUDA device.</summary>
    public enum CudaScoreMethod : uint
    {
        /// <summary>A kernel of the library's own, which a pool begins with.</summary>
        Kernel = NativeConstants.KV_CUDA_SCORE_KERNEL,
        /// <summary>Matrix products by cuBLASLt.</summary>
        Products = NativeConstants.KV_CUDA_SCORE_PRODUCTS,
        /// <summary>Whichever is measured to be faster.</summary>
        Measured = NativeConstants.KV_CUDA_SCORE_MEASURED
    }
}
